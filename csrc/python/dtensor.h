/* DTensor objects: what they hold, read from their slots, since torch's getters take ten times as
 * long; and new ones. */
#ifndef FSDP_C_PYTHON_DTENSOR_H
#define FSDP_C_PYTHON_DTENSOR_H

#include "objects.h"

/* isinstance(obj, DTensor), once the module is bound. */
bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj);
/* type(obj) is torch.Tensor, DTensor's base. */
bool fcpy_is_plain_tensor(const fcpy_module *mod, PyObject *obj);
/* Looks for the slots, once DTensor is bound. */
void fcpy_dtensor_find_slots(fcpy_module *mod);
/* obj._local_tensor without running code, borrowed; NULL where obj is no DTensor (or NULL), or it
 * has to be asked for. */
PyObject *fcpy_dtensor_peek(const fcpy_module *mod, PyObject *obj);
/* obj._local_tensor and obj._spec of an instance of DTensor or a subclass, new references; NULL
 * with an exception. */
PyObject *fcpy_dtensor_local(const fcpy_module *mod, PyObject *obj);
PyObject *fcpy_dtensor_spec(const fcpy_module *mod, PyObject *obj);
/* A new DTensor of `local`, a torch.Tensor, without gradient: what torch's function makes. */
PyObject *fcpy_dtensor_new(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* Whether the extension makes one of these two as this torch does; from then on it may make all. */
bool fcpy_dtensor_try(const fcpy_module *mod, PyObject *local, PyObject *spec);
/* param.grad of any tensor, new reference; NULL with an exception. torch's getter asks every
 * subclass for __torch_function__; DTensor, the usual one, has none. */
PyObject *fcpy_grad_of(const fcpy_module *mod, PyObject *param);

#endif
