/* Converts the lists that torch's optimizers make of a parameter group (parameters, gradients,
 * states). Local tensors replace DTensors. Items with the same index belong to the same parameter.
 * The caller's dict caches pairs of specs with equal layouts. */
#include "local_lists.h"

#include "../bridge/pyobject.h"
#include "../core/dtype.h"
#include "dtensor.h"

/* The arguments and the state of one call. */
typedef struct conversion {
    const fcpy_module *mod;
    PyObject *params;        /* borrowed list */
    PyObject *layout_cache;  /* borrowed dict: id of a spec -> (spec, spec with an equal layout) */
    PyObject *layouts_equal; /* borrowed function: compares the layouts of two specs */
    PyObject *equal_pair[2]; /* the latest two specs with equal layouts, or NULLs */
} conversion;

static void conversion_fini(conversion *c) {
    Py_CLEAR(c->equal_pair[0]);
    Py_CLEAR(c->equal_pair[1]);
}

/* Compares two specs with the caller's dict, then with the caller's function. Returns the result of
 * compare_specs(). The keys are addresses of specs, because hashing a spec is slow. The dict keeps
 * these specs alive. */
static int compare_with_cache(const conversion *c, PyObject *spec, PyObject *param_spec) {
    PyObject *key = PyLong_FromVoidPtr(spec);
    PyObject *pair = key != NULL ? PyDict_GetItemWithError(c->layout_cache, key) : NULL;
    int equal = pair != NULL && PyTuple_GET_ITEM(pair, 1) == param_spec ? 1 : -1;
    if (equal < 0 && key != NULL && !PyErr_Occurred()) {
        PyObject *result = PyObject_CallFunctionObjArgs(c->layouts_equal, spec, param_spec, NULL);
        equal = result != NULL ? PyObject_IsTrue(result) : -1;
        Py_XDECREF(result);
        pair = equal == 1 ? PyTuple_Pack(2, spec, param_spec) : NULL;
        if (equal == 1 && (pair == NULL || PyDict_SetItem(c->layout_cache, key, pair) != 0)) {
            equal = -1;
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(key);
    return equal;
}

/* Returns 1 if both specs place equal elements at equal offsets, else 0. Returns -1 with an
 * exception on failure. */
static int compare_specs(conversion *c, PyObject *spec, PyObject *param_spec) {
    if (spec == c->equal_pair[0] && param_spec == c->equal_pair[1]) {
        return 1;
    }
    const int equal = compare_with_cache(c, spec, param_spec);
    if (equal == 1) {
        Py_XSETREF(c->equal_pair[0], Py_NewRef(spec));
        Py_XSETREF(c->equal_pair[1], Py_NewRef(param_spec));
    }
    return equal;
}

/* Compares the specs of two DTensors. Returns the result of compare_specs(). */
static int compare_dtensor_specs(conversion *c, PyObject *value, PyObject *param) {
    PyObject *spec = fcpy_dtensor_spec(c->mod, value);
    PyObject *param_spec = spec != NULL ? fcpy_dtensor_spec(c->mod, param) : NULL;
    int equal = param_spec != NULL ? compare_specs(c, spec, param_spec) : -1;
    Py_XDECREF(spec);
    Py_XDECREF(param_spec);
    return equal;
}

/* Returns whether `value` is a tensor of at least one dimension, or -1 with an exception. */
static int has_dimensions(const conversion *c, PyObject *value) {
    if (!fct_py_is_tensor(value)) {
        return 0;
    }
    PyObject *ndim = PyObject_GetAttr(value, c->mod->names.ndim);
    int has_dims = ndim != NULL ? PyObject_IsTrue(ndim) : -1;
    Py_XDECREF(ndim);
    return has_dims;
}

/* Sets *local to the replacement of `value` (new reference) and returns 1. Returns -1 with an
 * exception on failure. Returns 0 if torch's code must process the list. The reason is that layouts
 * differ, that the local tensor is a subclass, or that only one of both is a DTensor. (A value
 * without dimensions may be plain.) */
static int convert(conversion *c, PyObject *value, PyObject *param, PyObject **local) {
    bool of_dtensor = fcpy_is_dtensor(c->mod, param);
    if (!fcpy_is_dtensor(c->mod, value)) {
        int has_dims = of_dtensor ? has_dimensions(c, value) : 0;
        *local = has_dims == 0 ? Py_NewRef(value) : NULL;
        return has_dims < 0 ? -1 : !has_dims;
    }
    int status = of_dtensor ? compare_dtensor_specs(c, value, param) : 0;
    if (status == 1) {
        *local = fcpy_dtensor_local(c->mod, value);
        status = *local == NULL ? -1 : fcpy_is_base_tensor(c->mod, *local);
    }
    if (status != 1) {
        Py_CLEAR(*local);
    }
    return status;
}

/* Sets *converted to a new list of the converted values. Returns the status of convert(). Items are
 * read one by one, because convert() may run Python code that changes the lists. */
static int convert_list(conversion *c, PyObject *values, PyObject **converted) {
    Py_ssize_t count = PyList_GET_SIZE(values);
    int result = 1;
    *converted = PyList_New(0);
    if (count != 0 && count != PyList_GET_SIZE(c->params)) {
        return *converted == NULL ? -1 : 0;
    }
    for (Py_ssize_t i = 0; *converted != NULL && result == 1 && i < count; i++) {
        PyObject *local = NULL;
        if (i >= PyList_GET_SIZE(values) || i >= PyList_GET_SIZE(c->params)) {
            return 0;
        }
        PyObject *value = Py_NewRef(PyList_GET_ITEM(values, i));
        PyObject *param = Py_NewRef(PyList_GET_ITEM(c->params, i));
        result = convert(c, value, param, &local);
        if (result == 1 && PyList_Append(*converted, local) != 0) {
            result = -1;
        }
        Py_XDECREF(local);
        Py_DECREF(value);
        Py_DECREF(param);
    }
    return *converted == NULL ? -1 : result;
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
            PyErr_SetString(PyExc_TypeError, "local_lists expects a tuple of lists");
            return NULL;
        }
    }
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (fcpy_check_bound(mod) != 0) {
        return NULL;
    }
    conversion c = {mod, PyTuple_GET_ITEM(args[0], 0), args[1], args[2], {NULL, NULL}};
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject *converted = NULL;
        int status = convert_list(&c, PyTuple_GET_ITEM(args[0], i), &converted);
        if (status == 1) {
            PyTuple_SET_ITEM(result, i, converted);
            continue;
        }
        Py_XDECREF(converted);
        Py_SETREF(result, status == 0 ? Py_NewRef(Py_None) : NULL);
        break;
    }
    conversion_fini(&c);
    return result;
}

/* Whether the tensor is strided and real. */
static bool is_strided_real(PyObject *local) {
    fct_facts facts;
    fct_tensor *tensor = fct_py_tensor(local);
    if (tensor == NULL) {
        return false;
    }
    fct_tensor_facts(tensor, &facts);
    return facts.strided && !fc_dtype_is_complex(facts.dtype);
}

/* Appends the converted value. Returns the status of convert(). With `require_plain`, returns 0 for
 * sparse and complex tensors. */
static int append_converted(conversion *c, PyObject *value, PyObject *param, PyObject *list,
                            bool require_plain) {
    PyObject *local = NULL;
    int result = convert(c, value, param, &local);
    if (result == 1 && require_plain && !is_strided_real(local)) {
        result = 0;
    }
    if (result == 1 && PyList_Append(list, local) != 0) {
        result = -1;
    }
    Py_XDECREF(local);
    return result;
}

/* Appends the states of one parameter to the lists from index 3 on. Returns the status of
 * convert(). A key that is None leaves its list empty. */
static int append_states(conversion *c, PyObject *param, PyObject *states_of_params, PyObject *keys,
                         PyObject *lists) {
    PyObject *states = Py_XNewRef(PyDict_GetItemWithError(states_of_params, param));
    int result = PyErr_Occurred() ? -1 : 1; /* a missing state matters only if a key needs it */
    for (Py_ssize_t i = 0; result == 1 && i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        if (key == Py_None) {
            continue;
        }
        const bool has_states = states != NULL && PyDict_CheckExact(states);
        PyObject *value = has_states ? Py_XNewRef(PyDict_GetItemWithError(states, key)) : NULL;
        result = PyErr_Occurred() ? -1 : value != NULL && fct_py_is_tensor(value);
        if (result == 1) {
            result = append_converted(c, value, param, PyTuple_GET_ITEM(lists, i + 3), false);
        }
        Py_XDECREF(value);
    }
    Py_XDECREF(states);
    return result;
}

/* Appends a parameter, its gradient and its states to the lists. Returns the status of convert().
 * Skips a parameter without gradient. */
static int append_param(conversion *c, PyObject *param, PyObject *states_of_params, PyObject *keys,
                        PyObject *lists) {
    PyObject *grad = fcpy_grad_of(c->mod, param);
    int result = grad == NULL ? -1 : 1;
    if (result == 1 && grad != Py_None) {
        result = PyList_Append(PyTuple_GET_ITEM(lists, 0), param) == 0 ? 1 : -1;
        if (result == 1) {
            result = append_converted(c, param, param, PyTuple_GET_ITEM(lists, 1), true);
        }
        if (result == 1) {
            result = append_converted(c, grad, param, PyTuple_GET_ITEM(lists, 2), true);
        }
        if (result == 1) {
            result = append_states(c, param, states_of_params, keys, lists);
        }
    }
    Py_XDECREF(grad);
    return result;
}

/* Returns a tuple of `count` new lists, or NULL with an exception. */
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
        !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError,
                        "local_group expects (list of parameters, dict, tuple, dict, function)");
        return NULL;
    }
    if (fcpy_check_bound(mod) != 0) {
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
    conversion_fini(&c);
    if (status != 1) {
        Py_XDECREF(lists);
        return status == 0 ? Py_NewRef(Py_None) : NULL;
    }
    return lists;
}
