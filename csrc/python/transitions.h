/* A group's transitions with checks for overridden methods, and callbacks of the core. */
#ifndef FSDP_C_PYTHON_TRANSITIONS_H
#define FSDP_C_PYTHON_TRANSITIONS_H

#include "objects.h"

/* A group's transitions. Each calls the overridden method, if there is one, in place of the
 * core. */
extern const fc_transitions fcpy_transitions;
/* Members of fc_callbacks. */
bool fcpy_uses_fallback(void *group, fc_fallback move);
void fcpy_callback_log(void *group, const char *label);

#endif
