/* Hooks of a simulated model. Before a hook calls a transition, it refreshes the groups that the
 * transition can reach, as csrc/python does. During the hook, the groups' table of transitions
 * reports each group that was not refreshed. Also counts the core's callbacks. */
#include "sim_internal.h"
#include "sim_model.h"

#include <stdio.h>
#include <string.h>

static _Thread_local size_t hooks; /* number of hooks so far */
static _Thread_local bool in_hook;

void sim_hook_begin(void) {
    hooks++;
    in_hook = true;
}

fc_status sim_hook_end(fc_status status) {
    in_hook = false;
    return status;
}

fc_status sim_hook_refresh(fc_group *g) {
    ((sim_group *)g->base.owner)->hook = hooks;
    return FC_OK;
}

/* ---- table of transitions ---- */

static void check(const fc_group *g, const char *transition) {
    const sim_group *group = (const sim_group *)g->base.owner;
    if (in_hook && group->hook != hooks) {
        sim_fail("%s of group %s runs in a hook that has not refreshed the group", transition,
                 group->name);
    }
}

static fc_status checked_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    check(g, "unshard");
    return fc_group_unshard(g, pass, async_op);
}

static fc_status checked_pre_backward(fc_group *g, bool default_prefetch) {
    check(g, "pre_backward");
    return fc_group_pre_backward(g, default_prefetch);
}

#define CHECKED(name, transition)                                                                  \
    static fc_status name(fc_group *g) {                                                           \
        check(g, #transition);                                                                     \
        return transition(g);                                                                      \
    }
CHECKED(checked_wait, fc_group_wait_unshard)
CHECKED(checked_reshard, fc_group_reshard)
CHECKED(checked_to_sharded, fc_group_to_sharded)
CHECKED(checked_post_backward, fc_group_post_backward)
CHECKED(checked_finalize, fc_group_finalize_backward)
CHECKED(checked_prefetch, fc_group_backward_prefetch)
#undef CHECKED

const fc_transitions sim_transitions = {
    .unshard = checked_unshard,
    .wait_unshard = checked_wait,
    .reshard = checked_reshard,
    .to_sharded = checked_to_sharded,
    .pre_backward = checked_pre_backward,
    .post_backward = checked_post_backward,
    .finalize_backward = checked_finalize,
    .backward_prefetch = checked_prefetch,
};

/* ---- callbacks ---- */

enum { CALLBACKS_MAX = 16 };

static _Thread_local struct {
    const char *name;
    size_t count;
} callbacks[CALLBACKS_MAX];

void sim_callback(const char *name) {
    sim_gil_need(name);
    size_t i = 0;
    while (i < CALLBACKS_MAX && callbacks[i].name != NULL && strcmp(callbacks[i].name, name) != 0) {
        i++;
    }
    if (i == CALLBACKS_MAX) {
        fail_msg("the table of callbacks is full");
    }
    callbacks[i].name = name;
    callbacks[i].count++;
}

void sim_callbacks_reset(void) {
    memset(callbacks, 0, sizeof callbacks);
}

size_t sim_callbacks_of(const char *name) {
    size_t count = 0;
    for (size_t i = 0; i < CALLBACKS_MAX && callbacks[i].name != NULL; i++) {
        if (name == NULL || strcmp(callbacks[i].name, name) == 0) {
            count += callbacks[i].count;
        }
    }
    return count;
}
