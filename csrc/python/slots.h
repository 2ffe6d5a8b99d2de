/* The slots of a Param: the (module, name) pairs under which modules hold the parameter. */
#ifndef FSDP_C_PYTHON_SLOTS_H
#define FSDP_C_PYTHON_SLOTS_H

#include "objects.h"

void fcpy_slots_clear(fcpy_param *self);
/* Registers `param` in every slot. Returns -1 with an exception on failure; a `param` of NULL is a
 * SystemError. */
int fcpy_slots_register(const fcpy_param *self, PyObject *param);
/* Param._set_slots(pairs, direct). `direct`: whether a slot's entry of the module's _parameters is
 * replaced without __setattr__. */
PyObject *fcpy_slots_set(PyObject *param, PyObject *args);

#endif
