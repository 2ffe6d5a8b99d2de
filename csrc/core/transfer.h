/* Moves memory as a plan says: with the device's kernels where there are any, with torch's own
 * multi-tensor operations elsewhere (foreach.h). All work is queued on the device's current stream.
 * Every raw pointer is checked here, where it is taken, and none is kept. */
#ifndef FSDP_C_CORE_TRANSFER_H
#define FSDP_C_CORE_TRANSFER_H

#include "foreach.h"
#include "plan.h"

/* Room for the descriptors of one launch. What is in it means nothing between two calls; only the
 * memory is kept, so that a step allocates none. Zeroed at first. */
typedef struct fc_transfer {
    void *descriptors;
    size_t capacity; /* in bytes */
    fc_foreach foreach;
} fc_transfer;

void fc_transfer_fini(fc_transfer *t);

/* Casts and packs the inputs into row `row` of buffer (rows of plan->row_numel elements of
 * plan->dtype). With `own`, as many tensors as the plan has cuts, those of pieces of their own go
 * into row `row` of those, and buffer (NULL where there is no rest) has rows of the rest. */
FC_CHECK fc_status fc_transfer_pack(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_tensor *buffer,
                                    fct_tensor *const *own, int64_t row, fc_error *err);
/* Casts every input straight into its output: the unshard of a group of one rank. */
FC_CHECK fc_status fc_transfer_fill(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_device device, fc_error *err);
/* Copies the gathered rows (plan->world of them) out into the outputs of the parameters.
 * `rest`: they are rows of the rest, and other parameters have theirs. */
FC_CHECK fc_status fc_transfer_unpack(fc_transfer *t, const fc_gather_plan *plan,
                                      fc_param *const *params, const fct_tensor *buffer, bool rest,
                                      fc_error *err);

/* Which of a reduce plan's gradients are meant: the one at an index, all, or the rest. */
enum { FC_ALL_GRADIENTS = -1, FC_REST_OF_GRADIENTS = -2 };

/* Casts and packs gradients of the plan into buffer: `world` rows of as many elements as all
 * (plan->row_numel), the rest (plan->rest_numel) or the one have. */
FC_CHECK fc_status fc_transfer_pack_gradients(fc_transfer *t, const fc_reduce_plan *plan,
                                              ptrdiff_t which, int64_t world, fct_tensor *buffer,
                                              fc_error *err);

#endif
