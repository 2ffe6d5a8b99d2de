/* What is kept while a call is under way. */
#ifndef FSDP_C_PYTHON_RETIRED_H
#define FSDP_C_PYTHON_RETIRED_H

#include "objects.h"

/* Around every call that may run foreign code while the core holds borrowed pointers. */
void fcpy_calls_enter(fcpy_module *mod);
void fcpy_calls_leave(fcpy_module *mod);
/* Lets go of what an attribute held (taken, NULL is fine) when no call is under way any more. */
void fcpy_retire(fcpy_module *mod, PyObject *obj);
/* Puts a new reference to `value` (or NULL) into *slot and retires what was there: whoever the
 * freeing runs finds the new value. */
void fcpy_replace(fcpy_module *mod, PyObject **slot, PyObject *value);
/* The same for a reference to the tensor that is about to be replaced, and for a block. */
void fcpy_retire_tensor(fcpy_module *mod, fct_tensor *tensor);
void fcpy_retire_block(fcpy_module *mod, void *block);

#endif
