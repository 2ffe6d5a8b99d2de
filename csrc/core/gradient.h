/* Gradients of a group between autograd and their reduction. Owns nothing: a gradient belongs to
 * its parameter, then to the reduce plan. */
#ifndef FSDP_C_CORE_GRADIENT_H
#define FSDP_C_CORE_GRADIENT_H

#include "members.h"
#include "plan.h"

/* Adds the span's new gradients to those that earlier backwards without reduction have left. */
FC_CHECK fc_status fc_gradient_fold(const fc_members *m, fc_span span);
/* Ends a backward without reduction: all gradients stay with the parameters, in the reduce
 * dtype. */
FC_CHECK fc_status fc_gradient_stash(const fc_members *m);
/* Moves the span's gradients from the parameters to the plan. `unused`: parameters without a
 * gradient contribute zeros. */
FC_CHECK fc_status fc_gradient_collect(const fc_members *m, fc_span span, bool unused,
                                       fc_reduce_plan *plan);

#endif
