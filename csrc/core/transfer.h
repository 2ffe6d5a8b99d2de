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

/* Casts and packs the inputs into part `rank` of each of the plan's chunks. */
FC_CHECK fc_status fc_transfer_pack(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_tensor *const *chunks,
                                    int64_t rank, fc_error *err);
/* Casts every input straight into its output: the unshard of a group of one rank. */
FC_CHECK fc_status fc_transfer_fill(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_device device, fc_error *err);
/* Copies the gathered parts of a chunk that is not owned (plan->world of them, in `buffer`) out
 * into the outputs of the parameters. */
FC_CHECK fc_status fc_transfer_unpack(fc_transfer *t, const fc_gather_plan *plan,
                                      fc_param *const *params, size_t chunk,
                                      const fct_tensor *buffer, fc_error *err);

/* Casts and packs the gradients of a chunk into `buffer`, which holds `world` parts of the chunk's
 * elements. */
FC_CHECK fc_status fc_transfer_pack_gradients(fc_transfer *t, const fc_reduce_plan *plan,
                                              size_t chunk, int64_t world, fct_tensor *buffer,
                                              fc_error *err);

#endif
