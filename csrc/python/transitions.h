/* Selects which transitions and operations Python code performs.
 *
 * Rule: before csrc/python calls a transition of the core, it refreshes each group that the
 * transition can reach. The transition itself checks nothing. A patch that is made during a
 * transition takes effect at the next refresh, usually in the next hook. */
#ifndef FSDP_C_PYTHON_TRANSITIONS_H
#define FSDP_C_PYTHON_TRANSITIONS_H

#include "objects.h"

/* Reads the guard of patches (guard.h) and the group's settings. Sets fcpy_group.replaced, and in
 * the core the table of transitions, `fallbacks` and `logs`. No-op before initialization. The
 * functions of this header set no exception. The caller has no pending exception. */
void fcpy_group_refresh(fcpy_group *self);
/* Refreshes the groups that the group's backward prefetches. Requires a call of
 * fcpy_group_refresh() before, which reads the guard. */
void fcpy_group_refresh_targets(const fcpy_group *self);

/* Sets fcpy_state.replaced from the methods of the state and its type. Does not read the guard. */
void fcpy_state_refresh(fcpy_state *self);
/* Refresh groups: those of the state, those that the state prefetches in forward, those that its
 * pre-backward reaches, and all groups under its root. */
void fcpy_state_refresh_groups(fcpy_state *self);
void fcpy_state_refresh_forward_prefetch(fcpy_state *self);
void fcpy_state_refresh_pre_backward(fcpy_state *self);
void fcpy_state_refresh_iteration(fcpy_state *self);

/* Member of fc_callbacks. */
void fcpy_callback_log(void *group, const char *label);

#endif
