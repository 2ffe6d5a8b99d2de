/* All-gather extensions of a Param. */
#ifndef FSDP_C_PYTHON_EXTENSION_H
#define FSDP_C_PYTHON_EXTENSION_H

#include "objects.h"

/* Members of fc_callbacks. */
fc_status fcpy_extend_inputs(void *param);
fc_status fcpy_extend_unsharded(void *param);

/* Getters and setters of Param.all_gather_outputs and Param._unsharded_inner_tensors. */
PyObject *fcpy_get_outputs(PyObject *param, void *closure);
int fcpy_set_outputs(PyObject *param, PyObject *value, void *closure);
PyObject *fcpy_get_inner(PyObject *param, void *closure);
int fcpy_set_inner(PyObject *param, PyObject *value, void *closure);
/* Keeps the tensors of both attributes alive until no call is in progress (deferred_decref.h). */
void fcpy_defer_outputs_release(fcpy_param *self);

#endif
