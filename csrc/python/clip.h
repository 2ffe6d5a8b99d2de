/* Gradient clipping: module functions, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_CLIP_H
#define FSDP_C_PYTHON_CLIP_H

#include "objects.h"

/* A kind is the (mesh, placements) of DTensor gradients, or (None, None) for plain gradients. */

/* _C.clip_collect(tensors, are_params) -> (local gradients, kinds, index of each gradient's
 * kind) */
PyObject *fcpy_clip_collect(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
/* _C.clip_norm(local gradients, kind indices, groups of each kind) -> float or None */
PyObject *fcpy_clip_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
/* _C.clip_scale(local gradients, max_norm, total, max_numel, all_or_none) -> (factor, unscaled
 * gradients) or None */
PyObject *fcpy_clip_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
