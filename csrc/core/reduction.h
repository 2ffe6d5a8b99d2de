/* One reduction in flight: from its collectives to the gradients that are handed out. All of them
 * hang off their comm context, oldest first; each owns its buffers and its work until it is
 * finished and recycled, or abandoned. */
#ifndef FSDP_C_CORE_REDUCTION_H
#define FSDP_C_CORE_REDUCTION_H

#include "members.h"

typedef struct fc_reduction {
    fc_members *members; /* borrowed: whoever owns them discards its reductions before they go */
    fc_param **params;   /* [total], behind the struct: in the order of their rows */
    size_t count;        /* those with a gradient */
    size_t total;        /* and those that have only a partial row to all-reduce */
    fct_tensor *input;
    fct_tensor *output;
    fct_work *work;
    bool all_reducing;    /* `work` is the all-reduce */
    fct_event *scattered; /* end of the input's last use, on the reduce stream (one rank: on the
                             all-reduce stream, where there are replicas) */
    double divide_after;
    bool hooked;       /* host->reduce_hook is to be called */
    bool elsewhere;    /* what follows the reduce-scatter runs on another stream than the row's */
    bool keep_partial; /* no all-reduce in this backward: the rows stay with the parameters */
    bool sends;        /* gradients are on their way to the host's memory */
    bool finished;     /* the gradients were handed out; only the input is still kept */
    struct fc_reduction *next;
} fc_reduction;

/* Room for `total` parameters; empty. NULL: no memory. */
fc_reduction *fc_reduction_new(fc_members *members, size_t total);
/* Elements of the whole row: of the parameters with a gradient, then of the others. */
int64_t fc_reduction_row_numel(const fc_reduction *r);
/* Waits for the collective in flight, on the CPU; orders the current stream after it elsewhere. */
FC_CHECK fc_status fc_reduction_wait(fc_reduction *r);
/* Adds what earlier backwards left to the row's parts and takes it away from the parameters; or, in
 * a backward without all-reduce, leaves the parts with them. */
FC_CHECK fc_status fc_reduction_merge_partials(fc_reduction *r);
/* Waits for the collective, scales, casts and hands out. The row stays in r->output where another
 * stream than its own uses it or a cast of it, or of a part, was queued: gradients that are added
 * to others let their views go at once. */
FC_CHECK fc_status fc_reduction_finish(fc_reduction *r);
/* Whether user code is to see the result before backward goes on. A hook may issue collectives, so
 * it must run at the same place on all ranks, not when a poll happens to find the reduction
 * done. */
bool fc_reduction_wanted_now(const fc_reduction *r);
/* Takes r: parks what the backend may still use, releases the rest, ordered behind the streams that
 * used it. */
void fc_reduction_abandon(fc_reduction *r);

/* Takes r: it is the newest in flight. */
void fc_reduction_append(fc_reduction *r);
/* Finishes the oldest reductions until at most `keep` are in flight, and releases their inputs. */
FC_CHECK fc_status fc_reduction_recycle(fc_comm *c, size_t keep);
/* The current stream has waited for the end of all reductions in flight: nobody needs to wait for
 * their inputs any more. */
void fc_reduction_note_settled(fc_comm *c);
/* Without streams: finishes the oldest reductions whose collectives are done by now, so that their
 * buffers go early. */
FC_CHECK fc_status fc_reduction_poll(fc_comm *c);
/* Whether reductions of these members are in flight. */
bool fc_reduction_has(const fc_comm *c, const fc_members *m);
/* Gives up on the reductions of these members (NULL: on all) without waiting; their gradients are
 * lost. */
void fc_reduction_discard(fc_comm *c, const fc_members *m);
/* What must hold between transitions of those in flight: FC_ESTATE with a message where it does
 * not. */
FC_CHECK fc_status fc_reduction_check(fc_comm *c);

#endif
