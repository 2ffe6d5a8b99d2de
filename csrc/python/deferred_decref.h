/* Deferred release of objects while calls of the extension are in progress. */
#ifndef FSDP_C_PYTHON_DEFERRED_DECREF_H
#define FSDP_C_PYTHON_DEFERRED_DECREF_H

#include "objects.h"

/* Mark the begin and the end of a call during which the core holds borrowed pointers. Foreign code
 * may run in the call: users' hooks, __setattr__ of modules. */
void fcpy_calls_enter(fcpy_module *mod);
void fcpy_calls_leave(fcpy_module *mod);
/* Releases the former value of an attribute when no call is in progress. Takes the reference. `obj`
 * may be NULL. */
void fcpy_defer_decref(fcpy_module *mod, PyObject *obj);
/* Stores a new reference to `value` (or NULL) in *slot and defers the release of the former value.
 * A finalizer that the release runs reads the new value. */
void fcpy_replace(fcpy_module *mod, PyObject **slot, PyObject *value);
/* Holds a new reference to a tensor until no call is in progress. The caller replaces the tensor
 * next. */
void fcpy_hold_tensor(fcpy_module *mod, fct_tensor *tensor);
/* Frees a malloc'ed block when no call is in progress. */
void fcpy_defer_free(fcpy_module *mod, void *block);

#endif
