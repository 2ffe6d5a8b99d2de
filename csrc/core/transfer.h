/* Moves memory as a plan says: with the device's foreach kernels where there are any, with torch
 * copies elsewhere. All work is queued on the device's current stream. Every raw pointer is checked
 * here, where it is taken. */
#ifndef FSDP_C_CORE_TRANSFER_H
#define FSDP_C_CORE_TRANSFER_H

#include "plan.h"

/* Casts and packs the shards into row `row` of buffer (rows of plan->row_numel elements of
 * plan->dtype). */
FC_CHECK fc_status fc_transfer_pack(fc_gather_plan *plan, fc_param *const *params,
                                    fct_tensor *buffer, int64_t row, fc_error *err);
/* Casts every shard straight into its flat tensor: the unshard of a group of one rank. */
FC_CHECK fc_status fc_transfer_fill(fc_gather_plan *plan, fc_param *const *params,
                                    fct_device device, fc_error *err);
/* Copies the gathered rows (plan->world of them) out into the flat tensors of the parameters. */
FC_CHECK fc_status fc_transfer_unpack(fc_gather_plan *plan, fc_param *const *params,
                                      const fct_tensor *buffer, fc_error *err);
/* Casts and packs the plan's gradients into buffer: `world` rows of plan->row_numel elements. */
FC_CHECK fc_status fc_transfer_pack_gradients(fc_reduce_plan *plan, int64_t world,
                                              fct_tensor *buffer, fc_error *err);

#endif
