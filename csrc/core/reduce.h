/* Gradient reduction: pack, divide, reduce-scatter, divide, cast, view out, hand to the sharded
 * parameters.
 *
 *   start: grads --pack--> input --(pre-divide)--> reduce-scatter --> output        finish: output
 * --(post-divide)-->
 *          --cast--> one view per parameter --> host->take_grad
 *
 * On devices with streams start and finish run in one go on the reduce stream. Without streams the
 * collective runs in the background while backward goes on, and finish comes with the next group's
 * reduction, at the end of backward, or at once where a parameter's hooks want the gradient now. */
#ifndef FSDP_C_CORE_REDUCE_H
#define FSDP_C_CORE_REDUCE_H

#include "comm.h"
#include "group.h"

/* How a mean over `world` ranks (or a division by `factor`) is split around the collective. A
 * divisor of 1: none. */
typedef struct fc_divide {
    double before;
    double after;
    fct_reduce_op op;
    double premultiply; /* for FCT_PREMUL_SUM */
} fc_divide;

/* has_premul: whether the backend can scale inside the collective; where it cannot, the inputs are
 * scaled before. */
fc_divide fc_reduce_divide(int64_t world, fct_dtype dtype, bool has_factor, double factor,
                           bool force_sum, bool has_premul);

/* Reduces the gradients collected in g->reduce_plan and takes them out of it. `order_compute`: make
 * the current stream wait for the result (partial group backward). On failure the gradients are
 * gone and nothing is in flight. */
FC_CHECK fc_status fc_reduce_start(fc_group *g, bool order_compute);
/* Finishes the oldest reductions until at most `keep` are in flight, and releases their inputs. */
FC_CHECK fc_status fc_reduce_recycle(fc_comm *c, size_t keep);
/* Without streams: finishes the oldest reductions whose collectives are done by now, so that their
 * buffers go early. */
FC_CHECK fc_status fc_reduce_poll(fc_comm *c);
/* Gives up on the reductions of `g` (NULL: of all groups) without waiting; their gradients are
 * lost. */
void fc_reduce_discard(fc_comm *c, const fc_group *g);

#endif
