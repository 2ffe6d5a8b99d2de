/* The end of a state, when its modules are freed. */
#ifndef FSDP_C_PYTHON_FREED_MODULES_H
#define FSDP_C_PYTHON_FREED_MODULES_H

#include "objects.h"

/* Returns a new reference to the state of a group, or NULL if the state was freed. */
fcpy_state *fcpy_group_unit(const fcpy_group *group);
/* Reference counting of a state that owns an fct_hook in an autograd graph. */
void fcpy_graph_hook_retain(void *state);
void fcpy_graph_hook_release(void *state);
/* State._note_freed_modules() */
PyObject *fcpy_state_note_freed_modules(PyObject *state, PyObject *unused);

#endif
