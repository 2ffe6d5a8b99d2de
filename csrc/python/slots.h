/* The registrations of a Param: its (module, name) pairs. */
#ifndef FSDP_C_PYTHON_SLOTS_H
#define FSDP_C_PYTHON_SLOTS_H

#include "objects.h"

void fcpy_slots_clear(fcpy_param *self);
/* Registers `param` in every slot. Returns -1 with an exception on failure; a `param` of NULL is a
 * SystemError. */
int fcpy_slots_register(const fcpy_param *self, PyObject *param);
/* Param._set_slots(pairs, direct) */
PyObject *fcpy_slots_set(PyObject *param, PyObject *args);

#endif
