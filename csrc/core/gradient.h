/* What a backward does with a group's gradients before their reduction. Owns nothing: they are the
 * parameters', and then the plan's. */
#ifndef FSDP_C_CORE_GRADIENT_H
#define FSDP_C_CORE_GRADIENT_H

#include "members.h"
#include "plan.h"

/* Adds the span's new gradients to what earlier backwards without reduction have left. */
FC_CHECK fc_status fc_gradient_fold(const fc_members *m, fc_span span);
/* A backward that does not reduce: all gradients stay with the parameters, in the reduce type. */
FC_CHECK fc_status fc_gradient_stash(const fc_members *m);
/* Takes the span's gradients out of the parameters into the plan. `unused`: parameters without one
 * have zeros. */
FC_CHECK fc_status fc_gradient_collect(const fc_members *m, fc_span span, bool unused,
                                       fc_reduce_plan *plan);

#endif
