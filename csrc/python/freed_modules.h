/* The end of a state, when its modules are freed. */
#ifndef FSDP_C_PYTHON_FREED_MODULES_H
#define FSDP_C_PYTHON_FREED_MODULES_H

#include "objects.h"

/* Returns a new reference to the state of a group, or NULL if the state was freed. */
fcpy_state *fcpy_group_unit(const fcpy_group *group);
/* Reference counting of a state by its Hook objects, and by its hooks in autograd graphs. */
void fcpy_hook_retain(void *state);
void fcpy_hook_release(void *state);
/* State._note_freed_modules() */
PyObject *fcpy_state_note_freed_modules(PyObject *state, PyObject *unused);

#endif
