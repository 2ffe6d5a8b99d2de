/* Gradients of a group between autograd and their reduction. Owns nothing: a gradient belongs to
 * its parameter, then to the reduce plan. */
#ifndef FSDP_C_CORE_GRADIENT_H
#define FSDP_C_CORE_GRADIENT_H

#include "group_base.h"
#include "plan.h"

/* Call fc_param_begin_grad() and fc_param_end_grad() for all parameters, if a parameter of the
 * group defers its cast. begin runs at the beginning of the group's backward, and end at its end.
 * `reduces`: this backward reduces its gradients. */
FC_CHECK fc_status fc_gradient_begin(const fc_group_base *base, bool reduces);
FC_CHECK fc_status fc_gradient_end(const fc_group_base *base);
/* Adds the span's new gradients to the gradients of earlier backwards without reduction. */
FC_CHECK fc_status fc_gradient_accumulate(const fc_group_base *base, fc_span span);
/* Ends a backward without reduction: all gradients stay with the parameters; see
 * fc_param_to_accumulated_grad() for their dtype. */
FC_CHECK fc_status fc_gradient_to_accumulated(const fc_group_base *base);
/* Moves the span's gradients from the parameters to the plan. `zero_unused`: parameters without a
 * gradient contribute zeros. */
FC_CHECK fc_status fc_gradient_collect(const fc_group_base *base, fc_span span, bool zero_unused,
                                       fc_reduce_plan *plan);
/* Returns FC_EVALUE if zeros of a trainable parameter would have no dtype that all ranks agree on:
 * the user has set its grad_dtype to None, and the policy has no reduce_dtype. Depends on settings
 * only, so all ranks fail together. */
FC_CHECK fc_status fc_gradient_check_zeros(const fc_group_base *base);
/* Drops all partial gradients of the group. */
void fc_gradient_drop(const fc_group_base *base);

#endif
