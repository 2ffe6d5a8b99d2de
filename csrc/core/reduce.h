/* Gradient reduction: pack, divide, reduce-scatter, all-reduce, divide, cast, views, accumulate.
 * Owns the plan of the collected gradients. The comm context owns the reductions in flight.
 *
 *   run:    grads --pack--> input --(pre-divide)--> reduce-scatter --> output
 *           output (+ partial outputs) --> all-reduce, with replicas (HSDP)
 *   finish: output --(hook)--(post-divide)--cast--> one view per parameter --> set_sharded_grad()
 *
 * With replicas and all_reduce_grads off, each parameter keeps its part of the output
 * (fc_param.partial) until a backward that all-reduces.
 *
 * With streams, run and finish are queued together on the reduce stream. Without streams the
 * collective runs while backward continues. A later pre-backward, a later reduction or the end of
 * backward finishes the reduction. If a parameter has post-accumulate-grad hooks, the reduction is
 * finished before backward continues. A reduction that does not overlap (fc_overlap) is complete
 * before backward continues; with streams, the current stream waits for the last use of its input.
 *
 * Preconditions: fc_reducer_init, and the group has a comm context, except in fini. The span lies
 * within the group's parameters. */
#ifndef FSDP_C_CORE_REDUCE_H
#define FSDP_C_CORE_REDUCE_H

#include "chunks.h"
#include "group_base.h"
#include "plan.h"
#include "transfer.h"

/* Selects whether backward continues while a reduction is in flight. */
typedef enum fc_overlap {
    FC_OVERLAP_UNLESS_CPU_BOUND = 0, /* overlap of a CPU-bound reduction saves no time */
    FC_OVERLAP_ALWAYS,
    FC_OVERLAP_NEVER,
} fc_overlap;

typedef struct fc_reducer {
    fc_group_base *base; /* borrowed */
    fc_reduce_plan plan; /* plan of the collected gradients */
    fc_transfer transfer;
    fc_chunks chunks;          /* chunks of the plan, until the Work holds references to them */
    fct_event *reduced;        /* end of the latest reduction; only with streams */
    fct_event *copied_to_host; /* end of the latest queued copies to host memory */
    bool used_fallback;        /* callbacks->reduce() has run, and may hold buffers and work */
    /* Settings of the user. */
    double divide_factor; /* replaces the number of ranks if has_divide_factor */
    bool has_divide_factor;
    bool force_sum;
    bool all_reduce_grads; /* false, with replicas: only reduce-scatter */
    bool reduce_unused;    /* parameters without a gradient contribute zeros */
    bool has_hook;         /* callbacks->reduce_hook must be called */
    fc_overlap overlap;
} fc_reducer;

/* Borrows `base`, which must outlive the reducer. */
void fc_reducer_init(fc_reducer *reducer, fc_group_base *base);
/* Discards the reductions in flight and releases everything. */
void fc_reducer_fini(fc_reducer *reducer);

/* Returns the reducer's events to the comm context. Call it before the group changes its
 * context. */
void fc_reducer_return_events(fc_reducer *reducer);

/* Reduces the gradients of the span that were collected into reducer->plan, and removes them from
 * the plan. A reduction with an all-reduce includes parameters that only have a partial output.
 * `order_compute`: the current stream waits for the result. Used if backward begins before all
 * modules of the group have run forward. On failure the gradients are lost. The failure may be
 * that of an earlier reduction: call fc_reduce_reset. */
FC_CHECK fc_status fc_reduce_run(fc_reducer *reducer, fc_span span, bool order_compute);
/* Makes the current stream wait for the reducer's latest reduction. Blocks until the latest copies
 * of gradients to host memory are complete. Also waits for the work of the fallback's reduce(). */
FC_CHECK fc_status fc_reduce_order_compute(fc_reducer *reducer);
/* Ends a backward: like fc_reduce_order_compute, but the current stream waits for all reductions of
 * the context. */
FC_CHECK fc_status fc_reduce_settle(fc_reducer *reducer);
/* Drops gradients and partial results. Call it after a failure. */
void fc_reduce_reset(fc_reducer *reducer);

/* Checks the invariants that hold between transitions. Returns FC_ESTATE with a message if one is
 * violated. */
FC_CHECK fc_status fc_reduce_check(const fc_reducer *reducer);

#endif
