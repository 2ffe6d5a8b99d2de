/* The shard of a Param: its creation, and the detection that users have replaced it. */
#ifndef FSDP_C_PYTHON_SHARD_H
#define FSDP_C_PYTHON_SHARD_H

#include "objects.h"

/* fc_callbacks.refresh_shard */
int fcpy_shard_refresh(void *param);
/* Param._cut(tensor, dim) -> local tensor, and Param._note_shard(). */
PyObject *fcpy_shard_cut(PyObject *param, PyObject *args);
PyObject *fcpy_shard_note(PyObject *param, PyObject *unused);
/* _C.count_step(optimizer, args, kwargs) */
PyObject *fcpy_count_step(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* _C.has_memory(tensor) -> bool */
PyObject *fcpy_has_memory(PyObject *module, PyObject *obj);

#endif
