/* Finds the module state of a type, and checks whether it is bound. */
#include "objects.h"

const char fcpy_module_name[] = "fsdp_c._C";

fcpy_module *fcpy_module_of(PyTypeObject *type) {
    PyObject *mro = type->tp_mro;
    for (Py_ssize_t i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(mro, i);
        if (!PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE)) {
            continue;
        }
        PyObject *module = ((PyHeapTypeObject *)base)->ht_module;
        if (module != NULL && PyModule_Check(module) &&
            PyModule_GetDef(module)->m_name == fcpy_module_name) {
            return (fcpy_module *)PyModule_GetState(module);
        }
    }
    PyErr_SetString(PyExc_TypeError, "the type must derive from a type of fsdp_c._C");
    return NULL;
}

int fcpy_check_bound(const fcpy_module *mod) {
    if (mod->bound.dtensor_class == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: _C.bind() has not been called");
        return -1;
    }
    return 0;
}
