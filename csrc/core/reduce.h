/* Gradient reduction: pack, divide, reduce-scatter, (all-reduce), divide, cast, view out, hand to
 * the sharded parameters. Owns the plan of the gradients that are to be reduced, and with the comm
 * context the reductions in flight.
 *
 *   run:    grads --pack--> input --(pre-divide)--> reduce-scatter --> row
 *           row (+ partial rows) --> all-reduce, with replicas (HSDP)
 *   finish: row --(hook)--(post-divide)--cast--> one view per parameter --> host->take_grad
 *
 * With replicas and all_reduce_grads off the row is kept instead, parameter by parameter
 * (fc_param.partial), until a backward that all-reduces.
 *
 * On devices with streams run and finish happen in one go on the reduce stream. Without streams the
 * collective runs in the background while backward goes on, and finish comes with the next group's
 * reduction, at the end of backward, or at once where a parameter's hooks want the gradient now.
 * A reduction that does not overlap (fc_overlap) ends before backward goes on, on any device. */
#ifndef FSDP_C_CORE_REDUCE_H
#define FSDP_C_CORE_REDUCE_H

#include "chunks.h"
#include "members.h"
#include "plan.h"
#include "transfer.h"

/* Whether backward goes on while a reduction is in flight. */
typedef enum fc_overlap {
    FC_OVERLAP_UNLESS_COPIED = 0, /* not where the processors that compute copy the rows: that takes
                                     as long, and two units' gradients in memory */
    FC_OVERLAP_ALWAYS,
    FC_OVERLAP_NEVER,
} fc_overlap;

typedef struct fc_reducer {
    fc_members *members; /* borrowed */
    fc_reduce_plan plan; /* the gradients that were collected */
    fc_transfer transfer;
    fc_chunks chunks;   /* packed and on the way to the collective, which then holds them */
    fct_event *reduced; /* end of the latest reduction; only with streams */
    fct_event *sent;    /* end of the latest that has queued copies to the host's memory, until the
                           host has waited for it */
    /* What users set. */
    fct_dtype reduce_dtype; /* FCT_NO_DTYPE: the gradients' own */
    double divide_factor;   /* in place of the number of ranks, where has_divide_factor */
    bool has_divide_factor;
    bool force_sum;
    bool all_reduce_grads; /* false: with replicas, only reduce-scatter */
    bool reduce_unused;    /* zeros for parameters without gradient */
    bool has_hook;         /* host->reduce_hook is to be called */
    fc_overlap overlap;
} fc_reducer;

void fc_reducer_init(fc_reducer *d, fc_members *members);
/* Gives up on what is in flight, releases all. */
void fc_reducer_fini(fc_reducer *d);

/* Gives its events back to the context, which is to change. */
void fc_reducer_forget_event(fc_reducer *d);

/* Reduces the gradients of the span, which were collected into d->plan, and takes them out of it;
 * with partial rows that wait for an all-reduce, also without any. `order_compute`: the current
 * stream waits for the result (partial group backward). On failure the gradients are gone and
 * nothing is in flight. */
FC_CHECK fc_status fc_reduce_run(fc_reducer *d, fc_span span, bool order_compute);
/* The current stream waits for the reducer's latest reduction. */
FC_CHECK fc_status fc_reduce_order_compute(fc_reducer *d);
/* The end of a backward: the current stream waits for all reductions of the context, and what the
 * host has of this one. */
FC_CHECK fc_status fc_reduce_settle(fc_reducer *d);
/* Forgets gradients and partial results; after a failure. */
void fc_reduce_reset(fc_reducer *d);

/* What must hold between transitions: FC_ESTATE with a message where it does not. */
FC_CHECK fc_status fc_reduce_check(const fc_reducer *d);

#endif
