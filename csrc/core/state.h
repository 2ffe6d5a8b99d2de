/* The state of one fully_shard call (one or several modules, their groups) and the iteration that
 * all states of one root share. The state drives its groups; it knows neither modules nor tensors.
 */
#ifndef FSDP_C_CORE_STATE_H
#define FSDP_C_CORE_STATE_H

#include "group.h"

struct fc_state;

/* Shared by all states under one root. Borrows the states; the host keeps them alive. */
typedef struct fc_iteration {
    struct fc_state **states; /* in named_modules() pre-order */
    size_t count;
    struct fc_state *forward_root; /* whose forward this is; NULL between forwards */
    size_t order_mark;             /* length of the post-forward order when that forward began */
    bool callback_queued;          /* end-of-backward callback, once for each backward */
    bool callback_counted;         /* and that is among these: */
    size_t callbacks;              /* that autograd has and may still call; the host counts */
    bool records;                  /* this backward makes a graph of itself (create_graph) */
    bool is_last_backward;
    bool manual;  /* the end of a backward finishes nothing: fc_iteration_finalize does */
    bool pending; /* that was called, and fc_iteration_complete not yet */
} fc_iteration;

typedef struct fc_state {
    void *owner;
    fc_iteration *iteration; /* borrowed */
    fc_comm *comm;           /* borrowed */
    fct_device device;
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
/* Takes the array. */
void fc_iteration_set_states(fc_iteration *it, fc_state **states, size_t count);
/* End of a backward: runs the post-backwards that autograd did not reach, finishes reductions, goes
 * idle. */
FC_CHECK fc_status fc_iteration_end_backward(fc_iteration *it, fc_comm *c);
/* Whether a backward has begun and will not come to its end: autograd has given it up, for an
 * exception. What it left has to be reset before anything else. */
bool fc_iteration_is_lost(const fc_iteration *it);
/* Starts the reductions that backwards have left for later, where the groups reduce now. */
FC_CHECK fc_status fc_iteration_finalize(fc_iteration *it);
/* The current stream (on the CPU: the caller) waits for all reductions; the next iteration may
 * start. */
FC_CHECK fc_status fc_iteration_complete(fc_iteration *it, fc_comm *c);

void fc_state_init(fc_state *s, void *owner, fc_iteration *iteration, fc_comm *comm,
                   fct_device device);
void fc_state_fini(fc_state *s);

/* Once per iteration, by the first state whose forward runs. `after_compute`: the gather streams
 * wait for the compute stream; else the caller has seen to it that they wait for the shards. */
FC_CHECK fc_status fc_state_begin_iteration(fc_state *s, bool after_compute);
/* Recomputation inside backward (activation checkpointing): only makes sure that the groups are
 * unsharded. */
FC_CHECK fc_status fc_state_recompute(fc_state *s);
FC_CHECK fc_status fc_state_forward_prefetch(fc_state *s);
/* The forward is over: idle; the iteration's root also lets the last gather buffer go. */
FC_CHECK fc_status fc_state_end_forward(fc_state *s);
/* at_end is queued once per backward and must call fc_iteration_end_backward. */
FC_CHECK fc_status fc_state_pre_backward(fc_state *s, const fct_hook *at_end);
/* A backward has reached the graph that an earlier one made of itself where that left this state:
 * the parameters are needed before any gradient of the forward's outputs is computed. */
FC_CHECK fc_status fc_state_pre_double_backward(fc_state *s, const fct_hook *at_end);
/* After the post-backward node of one of the state's groups. Where no end of this backward was
 * asked for (nothing that it reached hooks an output: a module of a list called by itself, an
 * output that is no tensor), what was reduced is finished here: nobody else would. */
FC_CHECK fc_status fc_state_post_backward(const fc_state *s, fc_group *g);
/* Back to where a new iteration can start, whatever failed; for the root. What other roots have in
 * the same context stays. Where the device's streams do not obey, nothing is changed. Any other
 * failure is returned after all of the reset was tried. A reset can be repeated. */
FC_CHECK fc_status fc_state_reset(fc_state *s);

#endif
