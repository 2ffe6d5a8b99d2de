/* The shard of a Param: its creation, and the detection of a replaced shard. */
#ifndef FSDP_C_PYTHON_SHARD_H
#define FSDP_C_PYTHON_SHARD_H

#include "objects.h"

/* fc_callbacks.refresh_shard */
int fcpy_shard_refresh(void *param);
/* Param._cut(tensor, dim) -> local tensor: makes the shard of a new Param. Param._note_shard():
 * records the tensors of a new shard. */
PyObject *fcpy_shard_cut(PyObject *param, PyObject *args);
PyObject *fcpy_shard_note(PyObject *param, PyObject *unused);
/* _C.bump_shard_versions(optimizer, args, kwargs): bumps counters after optimizer.step(). */
PyObject *fcpy_bump_shard_versions(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* _C.has_memory(tensor) -> bool */
PyObject *fcpy_has_memory(PyObject *module, PyObject *obj);

#endif
