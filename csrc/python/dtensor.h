/* DTensor objects: reads their fields from their slots, because torch's getters take ten times as
 * long, and makes new ones. */
#ifndef FSDP_C_PYTHON_DTENSOR_H
#define FSDP_C_PYTHON_DTENSOR_H

#include "objects.h"

/* isinstance(obj, DTensor). Requires bind(). */
bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj);
/* type(obj) is torch.Tensor, the base class of DTensor. */
bool fcpy_is_plain_tensor(const fcpy_module *mod, PyObject *obj);
/* Finds the offsets of the slots. bind() calls it. */
void fcpy_dtensor_find_slots(fcpy_module *mod);
/* Returns obj._local_tensor, borrowed, without running code. NULL if obj is NULL or no DTensor, or
 * if only an attribute lookup can read it. Sets no exception. */
PyObject *fcpy_dtensor_peek(const fcpy_module *mod, PyObject *obj);
/* Return obj._local_tensor and obj._spec of an instance of DTensor or of a subclass; new
 * references, NULL with an exception. */
PyObject *fcpy_dtensor_local(const fcpy_module *mod, PyObject *obj);
PyObject *fcpy_dtensor_spec(const fcpy_module *mod, PyObject *obj);
/* Returns a new DTensor of `local`, a torch.Tensor, without requires_grad, as torch's function
 * makes it. */
PyObject *fcpy_dtensor_new(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* Whether the extension makes a DTensor of these two exactly as this torch does. If so, it may make
 * all. */
bool fcpy_dtensor_try(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* Returns param.grad of any tensor; new reference, NULL with an exception. torch's getter checks
 * every subclass for __torch_function__; the check is skipped for DTensor, which has none. */
PyObject *fcpy_grad_of(const fcpy_module *mod, PyObject *param);

#endif
