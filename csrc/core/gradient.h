/* What a backward does with a group's gradients before their reduction. */
#ifndef FSDP_C_CORE_GRADIENT_H
#define FSDP_C_CORE_GRADIENT_H

#include "group.h"

/* Before a group is resharded: whoever has frozen or unfrozen its unsharded parameters meant the
 * parameters, and finds them so from now on. */
FC_CHECK fc_status fc_gradient_requirements(fc_group *g);
/* Adds the span's new gradients to what earlier backwards without reduction have left. */
FC_CHECK fc_status fc_gradient_fold(fc_group *g, fc_span span);
/* A backward that does not reduce: reshards, then keeps the gradients with the parameters. */
FC_CHECK fc_status fc_gradient_keep(fc_group *g);
/* Takes the span's gradients out of the parameters into g->reduce_plan. Then reshards where
 * `last` (before the reduction: less memory). Where unused parameters are reduced too, they have
 * zeros. */
FC_CHECK fc_status fc_gradient_collect(fc_group *g, fc_span span, bool last);

#endif
