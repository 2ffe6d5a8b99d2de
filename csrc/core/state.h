/* FSDP state of one fully_shard call (its modules and their groups), and the iteration that all
 * states of one root share. A state controls its groups. A state has no access to modules or
 * tensors, apart from a fingerprint of the gradients. */
#ifndef FSDP_C_CORE_STATE_H
#define FSDP_C_CORE_STATE_H

#include "group.h"

struct fc_state;

/* Preconditions. Functions of fc_iteration: fc_iteration_init. Functions of fc_state that run a
 * transition: the state has an iteration and a comm context. */

/* Shared by all states under one root. Borrows the states, which their owners keep alive. */
typedef struct fc_iteration {
    struct fc_state **states; /* in named_modules() pre-order */
    size_t count;
    struct fc_state *forward_root; /* state of the outermost forward; NULL between forwards */
    /* length of the post-forward order at the start of that forward */
    size_t order_mark;
    bool callback_queued;  /* the end-of-backward callback is registered */
    bool callback_counted; /* that callback is included in `callbacks` */
    /* end-of-backward callbacks that autograd holds; counted by csrc/python */
    size_t callbacks;
    bool records; /* this backward records a graph (create_graph=True) */
    bool is_last_backward;
    /* the end of backward completes no reduction; the caller calls finalize and complete */
    bool manual;
    bool pending; /* fc_iteration_finalize ran, fc_iteration_complete has not */
} fc_iteration;

typedef struct fc_state {
    void *owner;
    fc_iteration *iteration; /* borrowed */
    fc_comm_ctx *comm;       /* borrowed */
    fc_training_state training_state;
    fc_group **groups; /* owned array of borrowed groups */
    size_t group_count;
    struct fc_state **forward_prefetch; /* owned arrays of borrowed states */
    size_t forward_prefetch_count;
    struct fc_state **backward_prefetch;
    size_t backward_prefetch_count;
} fc_state;

void fc_iteration_init(fc_iteration *it);
void fc_iteration_fini(fc_iteration *it);
/* Takes the array and frees the previous one. */
void fc_iteration_set_states(fc_iteration *it, fc_state **states, size_t count);
/* Sets in the buckets of all groups whether another group has the same root. Call it after a change
 * of a state's groups. */
void fc_iteration_update_siblings(const fc_iteration *it);
/* Ends a backward: runs the post-backward of groups that autograd did not reach, completes
 * reductions and sets all states to idle. */
FC_CHECK fc_status fc_iteration_end_backward(fc_iteration *it, fc_comm_ctx *c);
/* Returns true if a backward has begun but autograd has discarded its callback after an exception.
 * The caller must then reset the state before any other transition. */
bool fc_iteration_is_lost(const fc_iteration *it);
/* Starts the reductions that earlier backwards deferred, for all groups with reduce_grads. */
FC_CHECK fc_status fc_iteration_finalize(fc_iteration *it);
/* Makes the current stream (on the CPU: the caller) wait for all reductions. Call it before the
 * next iteration. */
FC_CHECK fc_status fc_iteration_complete(fc_iteration *it, fc_comm_ctx *c);

void fc_state_init(fc_state *s, void *owner, fc_iteration *iteration, fc_comm_ctx *comm);
void fc_state_fini(fc_state *s);

/* Call `visit` for each group that a transition can reach. The caller of the transition sets the
 * group's table of transitions and its fallbacks with `visit`, before the call. These functions
 * stop at the first failure of `visit` and return that failure.
 *
 * visit_groups: fc_state_recompute, fc_state_pre_double_backward, and all calls for one group. */
FC_CHECK fc_status fc_state_visit_groups(const fc_state *s, fc_visit visit);
FC_CHECK fc_status fc_state_visit_forward_prefetch(const fc_state *s, fc_visit visit);
FC_CHECK fc_status fc_state_visit_pre_backward(const fc_state *s, fc_visit visit);
/* Visits all groups under the root: for the functions of fc_iteration and for fc_state_reset. */
FC_CHECK fc_status fc_iteration_visit_groups(const fc_iteration *it, fc_visit visit);

/* Starts an iteration. Only the first call of an iteration has an effect, from the state whose
 * forward is outermost. `after_compute`: the gather streams wait for the compute stream. Otherwise
 * the caller has ordered the gather streams after the last write to the shards. */
FC_CHECK fc_status fc_state_begin_iteration(fc_state *s, bool after_compute);
/* Runs before a recomputation inside backward (activation checkpointing): ensures that the groups
 * are unsharded. */
FC_CHECK fc_status fc_state_recompute(fc_state *s);
/* Prefetches the groups of the states in forward_prefetch. */
FC_CHECK fc_status fc_state_forward_prefetch(fc_state *s);
/* Ends a forward: sets the state to idle. The outermost state also releases the kept gather
 * buffer. */
FC_CHECK fc_status fc_state_end_forward(fc_state *s);
/* Runs before the backward of the state's modules. `at_end` is registered once per backward and
 * must call fc_iteration_end_backward. */
FC_CHECK fc_status fc_state_pre_backward(fc_state *s, const fct_hook *at_end);
/* Runs when a backward enters a graph that an earlier backward recorded (create_graph=True).
 * Unshards the groups, because that graph uses the parameters before any gradient of the forward's
 * outputs exists. */
FC_CHECK fc_status fc_state_pre_double_backward(fc_state *s, const fct_hook *at_end);
/* Runs after the post-backward node of one of the state's groups. If autograd holds no
 * end-of-backward callback and `manual` is off, this function completes the reductions, because no
 * later call does. That is the case if autograd reached no output with a hook: only one module of a
 * fully_shard list was called, or an output is not a tensor. Pipeline schedules also prevent
 * the callback: they set callback_queued. */
FC_CHECK fc_status fc_state_post_backward(const fc_state *s, fc_group *g);
/* Resets the root after a failure, so that a new iteration can start. Other roots in the same
 * context are not affected. If the streams cannot be synchronized, the reset changes nothing. After
 * a failure of a group the reset continues, and returns the first failure. A reset can be repeated,
 * also to complete one that failed at its end. */
FC_CHECK fc_status fc_state_reset(fc_state *s);

/* Checks the invariants of the state, of its iteration and of its groups that hold between
 * transitions. Returns FC_ESTATE with a message if one is violated. Debug builds run this check at
 * the end of every function above that the hooks call. */
FC_CHECK fc_status fc_state_check(const fc_state *s);

#endif
