/* A module's parameters for its state dict. DTensors are detached here, without the dispatcher,
 * which takes several times as long to find out that their spec stays what it is. Owns nothing. */
#include "saved.h"

#include "dtensor.h"

/* The local tensor of a DTensor that is no more than a plain tensor and a spec; borrowed, or
 * NULL. */
static PyObject *plain_local(const fcpy_module *mod, PyObject *param) {
    const bool plain = (PyObject *)Py_TYPE(param) == mod->bound.dtensor_class;
    PyObject *local = plain ? fcpy_dtensor_peek(mod, param) : NULL;
    return local != NULL && fcpy_is_plain_tensor(mod, local) ? local : NULL;
}

/* A DTensor of `local` detached; new reference. */
static PyObject *rewrapped(const fcpy_module *mod, PyObject *param, PyObject *local) {
    fct_tensor *detached = NULL;
    PyObject *inner = NULL;
    PyObject *made = NULL;
    PyObject *spec = fcpy_dtensor_spec(mod, param);
    if (spec == NULL || fct_tensor_detach(fct_py_tensor(local), &detached) != 0 ||
        fct_py_from_tensor(detached, &inner) != 0) {
        goto done;
    }
    made = fcpy_dtensor_new(mod, inner, spec);
    if (made == NULL) {
        goto done;
    }
    fct_tensor *wrapper = fct_py_tensor(made);
    if (wrapper == NULL || fct_tensor_share(wrapper, fct_py_tensor(param)) != 0) {
        Py_CLEAR(made);
    }
done:
    Py_XDECREF(spec);
    Py_XDECREF(inner);
    fct_tensor_release(detached);
    return made;
}

/* param.detach(); new reference. */
static PyObject *detached(const fcpy_module *mod, PyObject *param) {
    PyObject *local = plain_local(mod, param);
    return local != NULL ? rewrapped(mod, param, local)
                         : PyObject_CallMethodNoArgs(param, mod->names.detach);
}

/* destination[prefix + name] = param.detach() */
static int save(const fcpy_module *mod, PyObject *destination, PyObject *prefix, PyObject *name,
                PyObject *param) {
    PyObject *key = PyUnicode_Concat(prefix, name);
    PyObject *value = key != NULL ? detached(mod, param) : NULL;
    int result = value != NULL ? PyObject_SetItem(destination, key, value) : -1;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return result;
}

PyObject *fcpy_save_parameters(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const fcpy_module *mod = (fcpy_module *)PyModule_GetState(module);
    if (nargs != 3 || !PyDict_Check(args[0]) || !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "save_parameters(dict, destination, str)");
        return NULL;
    }
    PyObject *items = PyDict_Items(args[0]); /* foreign code runs meanwhile */
    int failed = items == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(items); i++) {
        PyObject *pair = PyList_GET_ITEM(items, i);
        PyObject *param = PyTuple_GET_ITEM(pair, 1);
        if (param != Py_None) {
            failed = save(mod, args[1], args[2], PyTuple_GET_ITEM(pair, 0), param);
        }
    }
    Py_XDECREF(items);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}
