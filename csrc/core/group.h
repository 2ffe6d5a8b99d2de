/* The parameter group: parameters that are gathered in one collective and reduced in one
 * collective.
 *
 * Sharded state (what is registered on the modules):
 *
 *              unshard            wait
 *   SHARDED ------------> (gather ------> UNSHARDED ----- reshard in forward, where a smaller
 *      ^                  in flight)       |     ^        group is set
 *      |                      ^            |     |          |
 *      +--------------- reshard -----------+     +--- ... --- SHARDED_POST_FORWARD
 *
 * "gather in flight" is not a state of its own: the modules still hold the sharded parameters,
 * `gather.flight.active` says that there is something to wait for. Every transition has two phases:
 * first all that can fail (allocate, gather, wait, copy out), then one loop of swaps. A swap that
 * fails (a module's own __setattr__) is rolled back. Where the rollback fails as well the group is
 * `torn`: some modules may hold another face. Whatever uses or changes the registration next
 * registers the group's own face again first, and fails where that fails.
 *
 * Training state:
 *
 *   IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE
 *
 * After any failure fc_group_reset brings the group to SHARDED and IDLE with no partial gradient.
 */
#ifndef FSDP_C_CORE_GROUP_H
#define FSDP_C_CORE_GROUP_H

#include "bucket.h"
#include "gather.h"
#include "gradient.h"
#include "members.h"
#include "reduce.h"

typedef enum fc_training_state {
    FC_FORWARD = 1,
    FC_PRE_BACKWARD = 2,
    FC_POST_BACKWARD = 3,
    FC_IDLE = 4
} fc_training_state;

/* What the backward that runs now is to the group. */
typedef enum fc_course {
    FC_COURSE_PLAIN,
    FC_COURSE_ALONE,   /* no other group is reduced in it, and it records no graph */
    FC_COURSE_DOUBLED, /* it runs in what a recording one has recorded of the group */
    FC_COURSE_UNSEEN   /* it has recorded what the next may enter where no hook would see it: the
                          parameters stay */
} fc_course;

struct fc_group;

/* The transitions that happen inside of others, as a group makes them. The host may put a table of
 * its own in the place of fc_group_transitions, which runs what somebody has overridden or
 * patched, and otherwise the group's own transition (below). */
typedef struct fc_transitions {
    fc_status (*unshard)(struct fc_group *g, fc_training_state pass, bool async_op);
    fc_status (*wait_unshard)(struct fc_group *g);
    fc_status (*reshard)(struct fc_group *g);
    fc_status (*to_sharded)(struct fc_group *g);
    fc_status (*pre_backward)(struct fc_group *g, bool default_prefetch);
    fc_status (*post_backward)(struct fc_group *g);
    fc_status (*finalize_backward)(struct fc_group *g);
    fc_status (*backward_prefetch)(struct fc_group *g);
} fc_transitions;
extern const fc_transitions fc_group_transitions;

/* Which of the groups of one fully_shard call this is. */
typedef struct fc_place {
    const void *unit; /* the same for all groups of the call, only compared; NULL: no others */
    size_t index;     /* this group's among the call's groups */
    size_t siblings;  /* how many groups the call made; at least 1 */
    size_t modules;   /* how many modules the call was given */
} fc_place;

/* What users set, between steps; see also fc_reducer. */
typedef struct fc_group_settings {
    bool reduce_grads;
    bool reshard_after_forward;
    bool reshard_after_backward;
    bool unshard_async_op;
    bool unshard_in_backward;
} fc_group_settings;

typedef struct fc_group {
    const fc_transitions *via; /* borrowed */
    fc_members members;
    fc_place place;
    fc_group_settings settings;
    /* Sharded state. */
    fc_sharded_state sharded_state;
    bool torn;                 /* a swap and its rollback failed: modules may hold another face */
    uint64_t gathered_version; /* fingerprint of the shards that the unsharded parameters were made
                                  of */
    fc_gather gather;
    /* Training state. */
    fc_training_state training_state;
    fc_course course;
    uint64_t grads_before;  /* fingerprint of the gradients when a recording backward came */
    fc_positions positions; /* in the context's order, of forwards that wait for their backward */
    bool deferred;          /* a backward has left its gradients for a later reduction */
    fc_buckets buckets;
    fc_reducer reducer;
} fc_group;

/* Takes the array of `count` borrowed parameters (freed by fini). */
void fc_group_init(fc_group *g, void *owner, const fc_host *host, fc_comm *comm, fc_param **params,
                   size_t count, fct_device device, int64_t world, int64_t rank);
/* Parks what is in flight, forgets the group in its comm context, releases all. Safe on a zeroed
 * struct. */
void fc_group_fini(fc_group *g);
/* Moves the group to another context (of the same device). FC_ESTATE while a reduction is in
 * flight. */
FC_CHECK fc_status fc_group_set_comm(fc_group *g, fc_comm *comm);
/* To be called after any parameter's shard or dtype was replaced: plans are built and buckets cut
 * anew at the next unshard. */
void fc_group_invalidate(fc_group *g);

/* Starts the all-gather, unless there is one in flight or the group is unsharded with current data.
 * `pass`: what it is for, the group's own training state or, where it is prefetched, the pass that
 * will reach it. */
FC_CHECK fc_status fc_group_unshard(fc_group *g, fc_training_state pass, bool async_op);
/* Waits for it, copies out and registers the unsharded parameters. Without a gather in flight it
 * does nothing. */
FC_CHECK fc_status fc_group_wait_unshard(fc_group *g);
/* Registers the sharded parameters and frees the unsharded ones; in FORWARD only where
 * reshard_after_forward. */
FC_CHECK fc_status fc_group_reshard(fc_group *g);
FC_CHECK fc_status fc_group_to_sharded(fc_group *g);
/* From unsharded to the smaller group's shards. FC_ESTATE where there is no smaller group. */
FC_CHECK fc_status fc_group_to_sharded_post_forward(fc_group *g);
/* Registers the unsharded parameters, whose memory somebody else has filled. FC_ESTATE where one
 * has none. */
FC_CHECK fc_status fc_group_to_unsharded(fc_group *g);
/* Whether resharding leaves the unsharded parameters' memory where it is. */
void fc_group_set_keep_storage(fc_group *g, bool keep);

/* *entering says that this is the group's first module in this forward: the caller has to put the
 * post-backward node above its inputs. */
FC_CHECK fc_status fc_group_pre_forward(fc_group *g, bool *entering);
FC_CHECK fc_status fc_group_post_forward(fc_group *g);
FC_CHECK fc_status fc_group_pre_backward(fc_group *g, bool default_prefetch);
FC_CHECK fc_status fc_group_post_backward(fc_group *g);
/* The post-backward node is reached. Autograd runs a double backward's nodes before those of the
 * forward's graph, but on devices with threads of their own, where their sequence numbers begin
 * anew, they may come later: there a doubled group waits for the end of backward. */
FC_CHECK fc_status fc_group_leave_backward(fc_group *g);
/* Reduces the buckets that are complete and next. */
FC_CHECK fc_status fc_group_reduce_buckets(fc_group *g);
/* Unshards for a pass that is going to reach the group. */
FC_CHECK fc_status fc_group_prefetch(fc_group *g, fc_training_state pass);
/* Prefetches the group (or groups) whose forward came before this one's. */
FC_CHECK fc_status fc_group_backward_prefetch(fc_group *g);
/* End of the last backward: orders the current stream after the reductions, drops a gather nobody
 * waited for. */
FC_CHECK fc_status fc_group_finalize_backward(fc_group *g);

/* Completes the reductions that the group has started. Devices without streams: waits for every
 * reduction of the group's context. With streams: orders the current stream after the group's last
 * reduction, and waits for gradients that are copied to the host. */
FC_CHECK fc_status fc_group_complete_reductions(fc_group *g);

/* Back to SHARDED and IDLE after a failure: what is in flight is parked, partial gradients are
 * dropped. */
FC_CHECK fc_status fc_group_reset(fc_group *g);

/* What must hold between transitions, here and in the rooms below: FC_ESTATE with a message where
 * it does not. Debug builds assert it after every transition. */
FC_CHECK fc_status fc_group_check(fc_group *g);

#endif
