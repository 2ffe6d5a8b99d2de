/* Gradient clipping: module functions, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_CLIP_H
#define FSDP_C_PYTHON_CLIP_H

#include "objects.h"

/* New tuple of lists: local gradients, kinds as (mesh, placements), each gradient's kind. */
PyObject *fcpy_clip_collect(PyObject *module, PyObject *params);
PyObject *fcpy_clip(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fcpy_clip_total(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fcpy_clip_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
