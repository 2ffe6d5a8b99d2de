/* A module's parameters for its state dict: a module function, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_SAVED_H
#define FSDP_C_PYTHON_SAVED_H

#include "objects.h"

/* _C.save_parameters(parameters, destination, prefix) */
PyObject *fcpy_save_parameters(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
