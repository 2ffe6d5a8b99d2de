/* Selects, at the entry of a hook, which transitions and operations Python code performs.
 *
 * Rule: before csrc/python calls a transition of the core, it refreshes each group that the
 * transition can reach. The transition itself checks nothing. A patch that is made during a
 * transition takes effect at the next refresh, usually in the next hook. */
#ifndef FSDP_C_PYTHON_TRANSITIONS_H
#define FSDP_C_PYTHON_TRANSITIONS_H

#include "objects.h"

/* Reads the guard and the group's settings. Sets fcpy_group.replaced, and the core's table of
 * transitions, its fallbacks and its `logs`. Does nothing before initialization. None of these
 * functions fails. No exception may be pending. */
void fcpy_group_refresh(fcpy_group *self);
/* The same for the groups that the group's backward prefetches. Call fcpy_group_refresh() first,
 * which reads the guard. */
void fcpy_group_refresh_targets(const fcpy_group *self);

/* Reads the guard and sets fcpy_state.replaced. */
void fcpy_state_refresh(fcpy_state *self);
/* Refresh the groups of the state, those that it prefetches in forward, those that its pre-backward
 * reaches, or all groups under its root. */
void fcpy_state_refresh_groups(fcpy_state *self);
void fcpy_state_refresh_forward_prefetch(fcpy_state *self);
void fcpy_state_refresh_pre_backward(fcpy_state *self);
void fcpy_state_refresh_iteration(fcpy_state *self);

/* Member of fc_callbacks. */
void fcpy_callback_log(void *group, const char *label);

#endif
