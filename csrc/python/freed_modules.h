/* Calls _leave_lists() of a state when all its modules and all its hooks are freed. */
#ifndef FSDP_C_PYTHON_FREED_MODULES_H
#define FSDP_C_PYTHON_FREED_MODULES_H

#include "objects.h"

/* Returns a new reference to the state of a group, or NULL if the state was freed. */
fcpy_state *fcpy_group_unit(const fcpy_group *group);
/* Retains the state of a Hook object, or of a hook in an autograd graph, and counts the hook. */
void fcpy_hook_retain(void *state);
/* Releases the state. The release of the last hook calls _leave_lists() if all modules were
 * freed. */
void fcpy_hook_release(void *state);
/* State._note_freed_modules(): notes that all modules of the state were freed. Calls
 * _leave_lists() if no hook of the state is left. Returns a new reference to None. */
PyObject *fcpy_state_note_freed_modules(PyObject *state, PyObject *unused);

#endif
