/* Conversions, getters and setters that several types share. */
#include "attributes.h"

#include "../bridge/error.h"
#include "../bridge/pyobject.h"
#include "deferred_decref.h"

PyObject *fcpy_or_none(PyObject *obj) {
    PyObject *result = obj != NULL ? obj : Py_None;
    Py_INCREF(result);
    return result;
}

PyObject *fcpy_tuple_of(PyObject *list, PyTypeObject *type, const char *name) {
    if (list == NULL || !PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list", name);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        if (!PyObject_TypeCheck(PyList_GET_ITEM(list, i), type)) {
            PyErr_Format(PyExc_TypeError, "%s must hold %s objects, got %s", name, type->tp_name,
                         Py_TYPE(PyList_GET_ITEM(list, i))->tp_name);
            return NULL;
        }
    }
    return PyList_AsTuple(list);
}

void *fcpy_core_array(PyObject *tuple, size_t offset) {
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    void **array = (void **)malloc((count > 0 ? count : 1) * sizeof *array);
    if (array == NULL) {
        return PyErr_NoMemory();
    }
    for (size_t i = 0; i < count; i++) {
        array[i] = (char *)PyTuple_GET_ITEM(tuple, (Py_ssize_t)i) + offset;
    }
    return (void *)array;
}

/* bind() stores enum members as tuples in the order of the C enums, which start at 1. */
static PyObject *enum_member(PyObject *members, int number) {
    if (members == NULL || !PyTuple_Check(members) || number < 1 ||
        number > PyTuple_GET_SIZE(members)) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: _C.bind() has not been called");
        return NULL;
    }
    PyObject *result = PyTuple_GET_ITEM(members, number - 1);
    Py_INCREF(result);
    return result;
}

PyObject *fcpy_training_state(const fcpy_module *mod, fc_training_state state) {
    return enum_member(mod->bound.training_states, (int)state);
}

int fcpy_parse_training_state(const fcpy_module *mod, PyObject *obj, fc_training_state *out) {
    PyObject *members = mod->bound.training_states;
    for (Py_ssize_t i = 0; members != NULL && i < PyTuple_GET_SIZE(members); i++) {
        if (PyTuple_GET_ITEM(members, i) == obj) {
            *out = (fc_training_state)(i + 1);
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError, "expected a TrainingState, got %R", obj != NULL ? obj : Py_None);
    return -1;
}

PyObject *fcpy_sharded_state(const fcpy_module *mod, fc_sharded_state state) {
    return enum_member(mod->bound.sharded_states, (int)state);
}

int fcpy_parse_bool(PyObject *value, bool *target) {
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "this attribute cannot be deleted");
        return -1;
    }
    int truth = PyObject_IsTrue(value);
    if (truth < 0) {
        return -1;
    }
    *target = truth != 0;
    return 0;
}

PyObject *fcpy_dtype_object(fct_dtype dtype) {
    PyObject *result = NULL;
    if (dtype == FCT_NO_DTYPE) {
        Py_RETURN_NONE;
    }
    return fct_py_from_dtype(dtype, &result) == 0 ? result : NULL;
}

int fcpy_parse_dtype(PyObject *value, fct_dtype *target) {
    fct_dtype dtype = value == NULL ? FCT_NO_DTYPE : fct_py_dtype(value);
    if (dtype < FCT_NO_DTYPE) {
        return -1;
    }
    *target = dtype;
    return 0;
}

static void *field_of(PyObject *obj, void *closure) {
    return (char *)obj + (size_t)(uintptr_t)closure;
}

PyObject *fcpy_get_object(PyObject *obj, void *closure) {
    return fcpy_or_none(*(PyObject **)field_of(obj, closure));
}

PyObject *fcpy_get_size(PyObject *obj, void *closure) {
    return PyLong_FromSize_t(*(size_t *)field_of(obj, closure));
}

PyObject *fcpy_get_flag(PyObject *obj, void *closure) {
    return PyBool_FromLong(*(bool *)field_of(obj, closure));
}

int fcpy_set_flag(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_parse_bool(value, (bool *)field_of(obj, closure));
}

PyObject *fcpy_get_dtype(PyObject *obj, void *closure) {
    return fcpy_dtype_object(*(fct_dtype *)field_of(obj, closure));
}

int fcpy_set_dtype(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_parse_dtype(value, (fct_dtype *)field_of(obj, closure));
}

int fcpy_set_text(fcpy_module *mod, PyObject *value, PyObject **slot, const char **text) {
    PyObject *name = value == Py_None ? NULL : value;
    const char *utf8 = name != NULL ? PyUnicode_AsUTF8(name) : NULL;
    if (name != NULL && utf8 == NULL) {
        return -1;
    }
    *text = utf8;
    fcpy_replace(mod, slot, name);
    return 0;
}

void fcpy_call_and_report(PyObject *self, PyObject *name) {
    void *error = fct_error_set_aside();
    if (fcpy_drop_result(PyObject_CallMethodNoArgs(self, name)) != 0) {
        PyErr_WriteUnraisable(self);
    }
    fct_error_put_back(error);
}

PyObject *fcpy_weak_target(PyObject *reference) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *target = NULL;
    (void)PyWeakref_GetRef(reference, &target); /* fails only for other types of references */
    return target;
#else
    PyObject *target = PyWeakref_GetObject(reference);
    return target == Py_None ? NULL : Py_NewRef(target);
#endif
}

void fcpy_retain(void *owner) {
    Py_INCREF((PyObject *)owner);
}

void fcpy_release(void *owner) {
    Py_DECREF((PyObject *)owner);
}
