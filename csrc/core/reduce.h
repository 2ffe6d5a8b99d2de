/* Gradient reduction: pack, divide, reduce-scatter, (all-reduce), divide, cast, view out, hand to
 * the sharded parameters.
 *
 *   start:  grads --pack--> input --(pre-divide)--> reduce-scatter --> row
 *           row (+ partial rows) --> all-reduce, with replicas (HSDP)
 *   finish: row --(hook)--(post-divide)--cast--> one view per parameter --> host->take_grad
 *
 * With replicas and all_reduce_grads off the row is kept instead, parameter by parameter
 * (fc_param.partial), until a backward that all-reduces.
 *
 * On devices with streams start and finish run in one go on the reduce stream. Without streams the
 * collective runs in the background while backward goes on, and finish comes with the next group's
 * reduction, at the end of backward, or at once where a parameter's hooks want the gradient now. */
#ifndef FSDP_C_CORE_REDUCE_H
#define FSDP_C_CORE_REDUCE_H

#include "comm.h"
#include "group.h"

/* How a mean over all ranks (or a division by `factor`) is split around the collectives. A divisor
 * of 1: none. */
typedef struct fc_divide {
    double before;
    double after;
    fct_reduce_op op;
    double premultiply; /* for FCT_PREMUL_SUM */
    fct_reduce_op all_reduce_op;
} fc_divide;

/* What the division depends on. */
typedef struct fc_divide_rule {
    int64_t world;    /* ranks of the reduce-scatter; 1: none */
    int64_t replicas; /* ranks of the all-reduce; 0: none */
    fct_dtype dtype;  /* that is reduced in */
    bool has_factor;  /* the user's divisor in place of the number of ranks */
    double factor;
    bool force_sum;
    bool
        has_premul; /* the backend can scale inside the collective; else inputs are scaled before */
} fc_divide_rule;

fc_divide fc_reduce_divide(const fc_divide_rule *rule);

/* Reduces the gradients of the span, collected and laid out in g->reduce_plan, and takes them out of
 * it. `order_compute`: make the current stream wait for the result (partial group backward). On
 * failure the gradients are gone and nothing is in flight. */
FC_CHECK fc_status fc_reduce_start(fc_group *g, fc_span span, bool order_compute);
/* Whether the span has partial gradients to all-reduce even without new ones: reduce-scattered in
 * backwards that did not all-reduce. */
bool fc_reduce_pending(const fc_group *g, fc_span span);
/* Finishes the oldest reductions until at most `keep` are in flight, and releases their inputs. */
FC_CHECK fc_status fc_reduce_recycle(fc_comm *c, size_t keep);
/* Without streams: finishes the oldest reductions whose collectives are done by now, so that their
 * buffers go early. */
FC_CHECK fc_status fc_reduce_poll(fc_comm *c);
/* Whether reductions of `g` are in flight. */
bool fc_reduce_has(const fc_comm *c, const fc_group *g);
/* Gives up on the reductions of `g` (NULL: of all groups) without waiting; their gradients are
 * lost. */
void fc_reduce_discard(fc_comm *c, const fc_group *g);

#endif
