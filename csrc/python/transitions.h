/* A group's transitions as they are made here, and what the core asks of whoever overrides. */
#ifndef FSDP_C_PYTHON_TRANSITIONS_H
#define FSDP_C_PYTHON_TRANSITIONS_H

#include "objects.h"

/* The transitions of a group as they are made here: each asks whether somebody has overridden
 * it. */
extern const fc_transitions fcpy_transitions;
/* For fc_host. */
bool fcpy_host_moves(void *group, fc_move move);
void fcpy_host_log(void *group, const char *label);

#endif
