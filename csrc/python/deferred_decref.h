/* Deferred release of objects while calls of the extension are in progress. */
#ifndef FSDP_C_PYTHON_DEFERRED_DECREF_H
#define FSDP_C_PYTHON_DEFERRED_DECREF_H

#include "objects.h"

/* Surround every call that may run foreign code while the core holds borrowed pointers. */
void fcpy_calls_enter(fcpy_module *mod);
void fcpy_calls_leave(fcpy_module *mod);
/* Releases the former value of an attribute when no call is in progress. Takes the reference; NULL
 * is allowed. */
void fcpy_defer_decref(fcpy_module *mod, PyObject *obj);
/* Stores a new reference to `value` (or NULL) in *slot and defers the release of the former value.
 * Code that the release runs finds the new value. */
void fcpy_replace(fcpy_module *mod, PyObject **slot, PyObject *value);
/* Keep a tensor that is about to be replaced (adds a reference), and a malloc'ed block (takes it),
 * until no call is in progress. */
void fcpy_defer_tensor_release(fcpy_module *mod, fct_tensor *tensor);
void fcpy_defer_free(fcpy_module *mod, void *block);

#endif
