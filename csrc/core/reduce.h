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
