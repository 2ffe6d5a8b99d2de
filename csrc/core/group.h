/* Parameter group: parameters that are gathered in one collective and reduced in one collective.
 *
 * Sharded state (selects the parameters that the modules hold):
 *
 *              unshard            wait
 *   SHARDED ------------> (gather ------> UNSHARDED ----- reshard in forward, if a smaller
 *      ^                  pending)         |     ^        group is set
 *      |                      ^            |     |          |
 *      +--------------- reshard -----------+     +--- ... --- SHARDED_POST_FORWARD
 *
 * The smaller group is fc_group_base.post_forward (reshard_after_forward as an int).
 *
 * A pending gather is not a state of its own: the modules still hold the sharded parameters, and
 * `gather.pending.active` is set. Every transition has two phases: first all steps that can fail
 * (allocate, gather, wait, copy out), then one loop of swaps. If a swap fails (a module's own
 * __setattr__ raises), the transition rolls back all swaps. If the rollback fails too,
 * `registration_dirty` is set: some modules may hold parameters of another state. The next
 * transition that uses or changes the registration first registers the parameters of
 * `sharded_state` again. If this registration fails, the transition fails.
 *
 * Training state:
 *
 *   IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE
 *
 * After a failure fc_group_reset returns the group to SHARDED and IDLE without partial gradients.
 *
 * The caller holds the GIL, which a wait for a collective may release. Transitions run in the
 * thread of the forward or in autograd's thread. */
#ifndef FSDP_C_CORE_GROUP_H
#define FSDP_C_CORE_GROUP_H

#include "bucket.h"
#include "gather.h"
#include "gradient.h"
#include "group_base.h"
#include "reduce.h"

typedef enum fc_training_state {
    FC_FORWARD = 1,
    FC_PRE_BACKWARD = 2,
    FC_POST_BACKWARD = 3,
    FC_IDLE = 4
} fc_training_state;

/* Kind of the running backward for this group. */
typedef enum fc_backward_kind {
    FC_BACKWARD_PLAIN,
    FC_BACKWARD_SOLE_GROUP, /* no other group is reduced, and the backward records no graph */
    /* runs through a graph that a backward with create_graph=True recorded */
    FC_BACKWARD_DOUBLE,
    /* recorded a graph that no later hook enters: the parameters stay unsharded */
    FC_BACKWARD_UNTRACKED
} fc_backward_kind;

struct fc_group;

/* Transitions that other transitions call. The caller of a transition may set another table before
 * the call. The entries of a table run methods that the user has overridden, or the functions
 * below. */
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

/* Position of the group among the groups of one fully_shard call. */
typedef struct fc_place {
    const void *unit; /* identifies the call; compared, never dereferenced; NULL: no other groups */
    size_t index;     /* index of this group among the groups of the call */
    size_t siblings;  /* number of groups of the call; at least 1 */
    size_t modules;   /* number of modules of the call */
} fc_place;

/* Settings of the user, changed only between steps. See also fc_reducer. */
typedef struct fc_group_settings {
    bool reduce_grads;
    bool reshard_after_forward;
    bool reshard_after_backward;
    bool unshard_async_op;
    bool unshard_in_backward;
} fc_group_settings;

typedef struct fc_group {
    /* borrowed; fc_group_transitions if no method is overridden */
    const fc_transitions *transitions;
    fc_group_base base;
    fc_place place;
    fc_group_settings settings;
    /* Sharded state. */
    fc_sharded_state sharded_state;
    bool registration_dirty; /* modules may hold parameters of another state (see above) */
    /* Shard version that the unsharded parameters, and the post-forward shards, were made from. */
    uint64_t gathered_version;
    fc_gather gather;
    /* Training state. */
    fc_training_state training_state;
    fc_backward_kind backward_kind;
    /* fingerprint of the gradients at the start of a backward with create_graph=True */
    uint64_t grads_before;
    /* Indices in the post-forward order: one for each forward whose backward has not run. */
    fc_index_stack post_forward_indices;
    bool deferred; /* a backward has left gradients for a later reduction */
    fc_buckets buckets;
    fc_reducer reducer;
} fc_group;

/* Preconditions of the functions below. is_initialized returns true between fc_group_init and
 * fc_group_fini. All functions except init, fini and fc_group_invalidate require an initialized
 * group. is_ready returns true if the group also has a comm context. All functions that run a
 * transition require a ready group. */
static inline bool fc_group_is_initialized(const fc_group *g) {
    return g->transitions != NULL && g->sharded_state >= FC_SHARDED &&
           g->sharded_state <= FC_UNSHARDED && g->training_state >= FC_FORWARD &&
           g->training_state <= FC_IDLE;
}

static inline bool fc_group_is_ready(const fc_group *g) {
    return fc_group_is_initialized(g) && g->base.comm != NULL;
}

/* Called by the functions that visit groups. */
typedef fc_status (*fc_visit)(fc_group *g);

/* Takes the array of `count` borrowed parameters, which fini frees. Borrows everything else. */
void fc_group_init(fc_group *g, void *owner, const fc_callbacks *callbacks, fc_comm_ctx *comm,
                   fc_param **params, size_t count, fct_device device, int64_t world, int64_t rank);
/* Defers the release of pending work, removes the group from its comm context's order and releases
 * everything. Safe on a zeroed struct. */
void fc_group_fini(fc_group *g);
/* Moves the group to another comm context of the same device. Returns FC_ESTATE while a reduction
 * of the group is in flight. */
FC_CHECK fc_status fc_group_set_comm(fc_group *g, fc_comm_ctx *comm);
/* Call it after the shard or dtype of a parameter was replaced. Plans and buckets are computed
 * again at the next unshard. */
void fc_group_invalidate(fc_group *g);

/* Starts the all-gather, unless a gather is pending or the group is unsharded. `pass`: the pass
 * that needs the parameters. In FORWARD and IDLE, data of older shards are discarded and gathered
 * again. In PRE_BACKWARD nothing is gathered if unshard_in_backward is off. In a prefetch `pass`
 * differs from the group's training state. */
FC_CHECK fc_status fc_group_unshard(fc_group *g, fc_training_state pass, bool async_op);
/* Waits for the pending gather, copies out and registers the unsharded parameters. Does nothing
 * without a pending gather. */
FC_CHECK fc_status fc_group_wait_unshard(fc_group *g);
/* Registers the sharded parameters and frees the unsharded parameters. In FORWARD the group
 * reshards only if reshard_after_forward is set, and reshards to the smaller group if it has one.
 */
FC_CHECK fc_status fc_group_reshard(fc_group *g);
/* Registers the sharded parameters and frees the unsharded parameters, in any training state. */
FC_CHECK fc_status fc_group_to_sharded(fc_group *g);
/* Changes from unsharded to the smaller group's shards. Returns FC_ESTATE if there is no smaller
 * group. */
FC_CHECK fc_status fc_group_to_sharded_post_forward(fc_group *g);
/* Registers the unsharded parameters, whose memory copy_out() of the callbacks has filled. Returns
 * FC_ESTATE if a parameter has no memory. */
FC_CHECK fc_status fc_group_to_unsharded(fc_group *g);
/* `keep`: resharding keeps the memory of the unsharded parameters, so that their addresses are
 * stable. */
void fc_group_set_keep_storage(fc_group *g, bool keep);

/* Runs before the forward of each module of the group. *entering is true for the group's first
 * module in this forward: the caller then inserts the post-backward node above the module's inputs.
 */
FC_CHECK fc_status fc_group_pre_forward(fc_group *g, bool *entering);
/* Runs after the forward of the group's last module: reshards and records the post-forward
 * order. */
FC_CHECK fc_status fc_group_post_forward(fc_group *g);
/* Unshards the group for backward. `default_prefetch`: also prefetches by the post-forward
 * order. */
FC_CHECK fc_status fc_group_pre_backward(fc_group *g, bool default_prefetch);
/* Ends the group's backward: reduces or keeps its gradients and reshards the group. */
FC_CHECK fc_status fc_group_post_backward(fc_group *g);
/* Runs when autograd reaches the post-backward node. Nodes of a double backward normally run before
 * the nodes of the forward's graph. Devices with their own autograd threads number nodes per
 * thread, so the order may be the reverse there. On these devices a group in a double backward
 * waits for the end of backward. */
FC_CHECK fc_status fc_group_leave_backward(fc_group *g);
/* Reduces the next buckets until the first incomplete bucket. */
FC_CHECK fc_status fc_group_reduce_buckets(fc_group *g);
/* Starts the gather for a pass that will reach the group later, under the profiler range of a
 * prefetch. */
FC_CHECK fc_status fc_group_prefetch(fc_group *g, fc_training_state pass);
/* Prefetches the groups that precede this group in the post-forward order. */
FC_CHECK fc_status fc_group_backward_prefetch(fc_group *g);
/* Calls `visit` for the groups that the next fc_group_backward_prefetch() would prefetch. Stops at
 * the first failure of `visit` and returns that failure. */
FC_CHECK fc_status fc_group_visit_targets(const fc_group *g, fc_visit visit);
/* Ends the last backward: the current stream waits for the reductions, and an unused gather is
 * dropped. */
FC_CHECK fc_status fc_group_finalize_backward(fc_group *g);

/* Completes the reductions that the group has started. Without streams: waits for all reductions of
 * the group's context. With streams: orders the current stream after the group's last reduction,
 * and waits for gradients that are copied to host memory. */
FC_CHECK fc_status fc_group_complete_reductions(fc_group *g);

/* Returns the group to SHARDED and IDLE after a failure. The release of pending work is deferred
 * and partial gradients are dropped. */
FC_CHECK fc_status fc_group_reset(fc_group *g);

/* Checks the invariants of the group and of its parts that hold between transitions. Returns
 * FC_ESTATE with a message if one is violated. Debug builds run this check at the end of every
 * transition, also of a failed transition. */
FC_CHECK fc_status fc_group_check(fc_group *g);

#endif
