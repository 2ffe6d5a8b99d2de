/* A Param's part in its own gather: all-gather extensions. */
#ifndef FSDP_C_PYTHON_EXTENSION_H
#define FSDP_C_PYTHON_EXTENSION_H

#include "objects.h"

/* For fc_host. */
fc_status fcpy_extend_inputs(void *param);
fc_status fcpy_extend_unsharded(void *param);

/* Param.all_gather_outputs and Param._unsharded_inner_tensors. */
PyObject *fcpy_get_outputs(PyObject *param, void *closure);
int fcpy_set_outputs(PyObject *param, PyObject *value, void *closure);
PyObject *fcpy_get_inner(PyObject *param, void *closure);
int fcpy_set_inner(PyObject *param, PyObject *value, void *closure);
/* Keeps what the two have while a call is under way. */
void fcpy_retire_outputs(fcpy_param *self);

#endif
