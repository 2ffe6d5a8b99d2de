/* Gradient clipping: module functions, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_CLIP_H
#define FSDP_C_PYTHON_CLIP_H

#include "objects.h"

PyObject *fcpy_clip_collect(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fcpy_clip_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fcpy_clip_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
