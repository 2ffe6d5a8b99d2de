/* Reads the fields of DTensor objects from their slots, because torch's getters take ten times as
 * long. Makes new DTensors. */
#ifndef FSDP_C_PYTHON_DTENSOR_H
#define FSDP_C_PYTHON_DTENSOR_H

#include "objects.h"

/* isinstance(obj, DTensor). Requires bind(). */
bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj);
/* type(obj) is torch.Tensor, the base class of DTensor. */
bool fcpy_is_base_tensor(const fcpy_module *mod, PyObject *obj);
/* Finds the offsets of the slots. Called by bind(). */
void fcpy_dtensor_find_slots(fcpy_module *mod);
/* Returns obj._local_tensor, borrowed, without running code. Returns NULL if obj is NULL or not a
 * DTensor, or if only an attribute lookup can read the field. Sets no exception. */
PyObject *fcpy_dtensor_peek(const fcpy_module *mod, PyObject *obj);
/* Return obj._local_tensor and obj._spec of an instance of DTensor or of a subclass; new
 * references, NULL with an exception. */
PyObject *fcpy_dtensor_local(const fcpy_module *mod, PyObject *obj);
PyObject *fcpy_dtensor_spec(const fcpy_module *mod, PyObject *obj);
/* Returns a new DTensor of `local`, a torch.Tensor, equal to the result of torch's constructor
 * (bound.dtensor_new). The DTensor does not require grad. */
PyObject *fcpy_dtensor_new(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* Makes a DTensor of `local` and `spec` in the extension and with torch's constructor. Returns
 * whether the two are equal. If so, the extension may make all DTensors. Sets no exception. */
bool fcpy_dtensor_new_equals_torch(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* Returns param.grad of any tensor; new reference, NULL with an exception. torch's getter checks
 * every subclass for __torch_function__. fsdp_c skips the check for DTensor, which does not define
 * it. */
PyObject *fcpy_grad_of(const fcpy_module *mod, PyObject *param);

#endif
