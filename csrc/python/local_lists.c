/* The lists that torch's optimizers make of a group (parameters, gradients, states), with local
 * tensors in the place of DTensors. An item belongs to the parameter at its place. Owns nothing:
 * which specs were found alike is kept in a dict of the caller's. */
#include "local_lists.h"

#include "../core/dtype.h"
#include "dtensor.h"

/* A call. */
typedef struct conversion {
    const fcpy_module *mod;
    PyObject *params;  /* borrowed list */
    PyObject *seen;    /* borrowed dict: spec -> spec that it was found to lay tensors out like */
    PyObject *alike;   /* borrowed: asks that of a new pair */
    PyObject *last[2]; /* the latest pair that was found to, or NULL */
} conversion;

static void conversion_end(conversion *c) {
    Py_CLEAR(c->last[0]);
    Py_CLEAR(c->last[1]);
}

/* lie_alike, by what other calls have found. Specs are told apart by their addresses, which the
 * dict keeps theirs: hashing one is dear. */
static int found_alike(const conversion *c, PyObject *one, PyObject *other) {
    PyObject *key = PyLong_FromVoidPtr(one);
    PyObject *pair = key != NULL ? PyDict_GetItemWithError(c->seen, key) : NULL;
    int answer = pair != NULL && PyTuple_GET_ITEM(pair, 1) == other ? 1 : -1;
    if (answer < 0 && key != NULL && !PyErr_Occurred()) {
        PyObject *said = PyObject_CallFunctionObjArgs(c->alike, one, other, NULL);
        answer = said != NULL ? PyObject_IsTrue(said) : -1;
        Py_XDECREF(said);
        pair = answer == 1 ? PyTuple_Pack(2, one, other) : NULL;
        if (answer == 1 && (pair == NULL || PyDict_SetItem(c->seen, key, pair) != 0)) {
            answer = -1;
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(key);
    return answer;
}

/* 1: equal elements have equal places; 0: not so; -1 with an exception. */
static int lie_alike(conversion *c, PyObject *one, PyObject *other) {
    if (one == c->last[0] && other == c->last[1]) {
        return 1;
    }
    const int answer = found_alike(c, one, other);
    if (answer == 1) {
        Py_XSETREF(c->last[0], Py_NewRef(one));
        Py_XSETREF(c->last[1], Py_NewRef(other));
    }
    return answer;
}

/* lie_alike for two DTensors. */
static int specs_alike(conversion *c, PyObject *value, PyObject *param) {
    PyObject *one = fcpy_dtensor_spec(c->mod, value);
    PyObject *other = one != NULL ? fcpy_dtensor_spec(c->mod, param) : NULL;
    int answer = other != NULL ? lie_alike(c, one, other) : -1;
    Py_XDECREF(one);
    Py_XDECREF(other);
    return answer;
}

/* Whether it is a tensor of at least one dimension; -1 with an exception. */
static int is_shaped(const conversion *c, PyObject *value) {
    if (!fct_py_is_tensor(value)) {
        return 0;
    }
    PyObject *ndim = PyObject_GetAttr(value, c->mod->names.ndim);
    int shaped = ndim != NULL ? PyObject_IsTrue(ndim) : -1;
    Py_XDECREF(ndim);
    return shaped;
}

/* *local: new, what stands for `value` in the list. 1; 0 where its layout is not the parameter's;
 * -1 with an exception. */
static int convert(conversion *c, PyObject *value, PyObject *param, PyObject **local) {
    bool of_dtensor = fcpy_is_dtensor(c->mod, param);
    if (!fcpy_is_dtensor(c->mod, value)) {
        int shaped = of_dtensor ? is_shaped(c, value) : 0;
        *local = shaped == 0 ? Py_NewRef(value) : NULL;
        return shaped < 0 ? -1 : !shaped;
    }
    int alike = of_dtensor ? specs_alike(c, value, param) : 0;
    if (alike == 1) {
        *local = fcpy_dtensor_local(c->mod, value);
        alike = *local == NULL ? -1 : fcpy_is_plain_tensor(c->mod, *local);
    }
    if (alike != 1) {
        Py_CLEAR(*local);
    }
    return alike;
}

/* *made: new list for `values`. As convert. Items are taken one by one: what is asked may be
 * Python's, and change the lists. */
static int convert_list(conversion *c, PyObject *values, PyObject **made) {
    Py_ssize_t count = PyList_GET_SIZE(values);
    int result = 1;
    *made = PyList_New(0);
    if (count != 0 && count != PyList_GET_SIZE(c->params)) {
        return *made == NULL ? -1 : 0;
    }
    for (Py_ssize_t i = 0; *made != NULL && result == 1 && i < count; i++) {
        PyObject *local = NULL;
        if (i >= PyList_GET_SIZE(values) || i >= PyList_GET_SIZE(c->params)) {
            return 0;
        }
        PyObject *value = Py_NewRef(PyList_GET_ITEM(values, i));
        PyObject *param = Py_NewRef(PyList_GET_ITEM(c->params, i));
        result = convert(c, value, param, &local);
        if (result == 1 && PyList_Append(*made, local) != 0) {
            result = -1;
        }
        Py_XDECREF(local);
        Py_DECREF(value);
        Py_DECREF(param);
    }
    return *made == NULL ? -1 : result;
}

PyObject *fcpy_local_lists(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) == 0 ||
        !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "local_lists expects (tuple of lists, dict, function)");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyList_Check(PyTuple_GET_ITEM(args[0], i))) {
            PyErr_SetString(PyExc_TypeError, "local_lists expects lists");
            return NULL;
        }
    }
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (mod->bound.dtensor_class == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: the extension is not bound");
        return NULL;
    }
    conversion c = {mod, PyTuple_GET_ITEM(args[0], 0), args[1], args[2], {NULL, NULL}};
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject *made = NULL;
        int status = convert_list(&c, PyTuple_GET_ITEM(args[0], i), &made);
        if (status == 1) {
            PyTuple_SET_ITEM(result, i, made);
            continue;
        }
        Py_XDECREF(made);
        Py_SETREF(result, status == 0 ? Py_NewRef(Py_None) : NULL);
        break;
    }
    conversion_end(&c);
    return result;
}

/* Whether nothing is special about the tensor for an optimizer. */
static bool is_usual(PyObject *local) {
    fct_facts facts;
    fct_tensor *tensor = fct_py_tensor(local);
    if (tensor == NULL) {
        return false;
    }
    fct_tensor_facts(tensor, &facts);
    return facts.strided && !fc_dtype_is_complex(facts.dtype);
}

/* Appends what stands for `value` of `param`. As convert; `is_tensor`: a usual
 * tensor is wanted. */
static int append(conversion *c, PyObject *value, PyObject *param, PyObject *list, bool is_tensor) {
    PyObject *local = NULL;
    int result = convert(c, value, param, &local);
    if (result == 1 && is_tensor && !is_usual(local)) {
        result = 0;
    }
    if (result == 1 && PyList_Append(list, local) != 0) {
        result = -1;
    }
    Py_XDECREF(local);
    return result;
}

/* Appends the states of one parameter to the lists behind the third; a key that is None leaves its
 * list empty. As convert. */
static int append_states(conversion *c, PyObject *param, PyObject *all, PyObject *keys,
                         PyObject *lists) {
    PyObject *states = Py_XNewRef(PyDict_GetItemWithError(all, param));
    int result = PyErr_Occurred() ? -1 : 1; /* no state: only a key makes that wrong */
    for (Py_ssize_t i = 0; result == 1 && i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        if (key == Py_None) {
            continue;
        }
        const bool has_states = states != NULL && PyDict_CheckExact(states);
        PyObject *value = has_states ? Py_XNewRef(PyDict_GetItemWithError(states, key)) : NULL;
        result = PyErr_Occurred() ? -1 : value != NULL && fct_py_is_tensor(value);
        if (result == 1) {
            result = append(c, value, param, PyTuple_GET_ITEM(lists, i + 3), false);
        }
        Py_XDECREF(value);
    }
    Py_XDECREF(states);
    return result;
}

/* Appends what one parameter has to all lists; nothing where it has no gradient. As convert. */
static int append_param(conversion *c, PyObject *param, PyObject *all, PyObject *keys,
                        PyObject *lists) {
    PyObject *grad = fcpy_grad_of(c->mod, param);
    int result = grad == NULL ? -1 : 1;
    if (result == 1 && grad != Py_None) {
        result = PyList_Append(PyTuple_GET_ITEM(lists, 0), param) == 0 ? 1 : -1;
        if (result == 1) {
            result = append(c, param, param, PyTuple_GET_ITEM(lists, 1), true);
        }
        if (result == 1) {
            result = append(c, grad, param, PyTuple_GET_ITEM(lists, 2), true);
        }
        if (result == 1) {
            result = append_states(c, param, all, keys, lists);
        }
    }
    Py_XDECREF(grad);
    return result;
}

/* A tuple of so many new lists; NULL with an exception. */
static PyObject *new_lists(Py_ssize_t count) {
    PyObject *lists = PyTuple_New(count);
    for (Py_ssize_t i = 0; lists != NULL && i < count; i++) {
        PyObject *list = PyList_New(0);
        if (list == NULL) {
            Py_CLEAR(lists);
        } else {
            PyTuple_SET_ITEM(lists, i, list);
        }
    }
    return lists;
}

PyObject *fcpy_local_group(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (nargs != 5 || !PyList_Check(args[0]) || !PyDict_Check(args[1]) || !PyTuple_Check(args[2]) ||
        !PyDict_Check(args[3]) || mod->bound.dtensor_class == NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "local_group expects (list of parameters, dict, tuple, dict, function)");
        return NULL;
    }
    conversion c = {mod, args[0], args[3], args[4], {NULL, NULL}};
    PyObject *lists = new_lists(3 + PyTuple_GET_SIZE(args[2]));
    int status = lists != NULL ? 1 : -1;
    for (Py_ssize_t i = 0; status == 1 && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *param = Py_NewRef(PyList_GET_ITEM(args[0], i));
        status = append_param(&c, param, args[1], args[2], lists);
        Py_DECREF(param);
    }
    conversion_end(&c);
    if (status != 1) {
        Py_XDECREF(lists);
        return status == 0 ? Py_NewRef(Py_None) : NULL;
    }
    return lists;
}
