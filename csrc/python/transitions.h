/* Selects, at the entry of a hook, which transitions and data movements Python code performs.
 *
 * Rule: before csrc/python calls a transition of the core, it refreshes each group that the
 * transition can reach. The transition itself checks nothing. A patch that is made during a
 * transition takes effect at the next refresh. */
#ifndef FSDP_C_PYTHON_TRANSITIONS_H
#define FSDP_C_PYTHON_TRANSITIONS_H

#include "objects.h"

/* Reads the guard and the group's settings. Sets fcpy_group.replaced, and the core's table of
 * transitions, its fallbacks and its `logs`. Never fails. Does nothing before initialization. */
void fcpy_group_refresh(fcpy_group *self);
/* The same for the groups that the group's backward prefetches by the post-forward order. */
void fcpy_group_refresh_targets(const fcpy_group *self);

/* Reads the guard and sets fcpy_state.replaced. */
void fcpy_state_refresh(fcpy_state *self);
/* Refresh all groups of one state, of `count` states, or of all states under the same root. */
void fcpy_state_refresh_groups(fcpy_state *self);
void fcpy_states_refresh_groups(fcpy_module *mod, fc_state *const *states, size_t count);
void fcpy_iteration_refresh_groups(const fcpy_state *self);
/* Refreshes the groups that fc_state_pre_backward() reaches. */
void fcpy_state_refresh_backward(fcpy_state *self);

/* Member of fc_host. */
void fcpy_host_log(void *group, const char *label);

#endif
