/* Memory transfers of a plan: with fsdp_c's kernels if the device has them, otherwise with torch's
 * multi-tensor operations (foreach.h). All work is queued on the device's current stream. Every raw
 * pointer is checked when it is read, and no pointer is kept. */
#ifndef FSDP_C_CORE_TRANSFER_H
#define FSDP_C_CORE_TRANSFER_H

#include "checksum.h"
#include "foreach.h"
#include "plan.h"

/* Scratch memory for the descriptors of one launch. The contents are undefined between two calls.
 * The memory is kept, so that later steps need no allocation. Initialize it with zeros. */
typedef struct fc_transfer {
    void *descriptors;
    size_t capacity; /* in bytes */
    fc_foreach foreach;
} fc_transfer;

void fc_transfer_fini(fc_transfer *t);

/* Casts the inputs and packs them into part `rank` of each chunk. Adds this rank's shard to the
 * checksum; NULL: none. */
FC_CHECK fc_status fc_transfer_pack(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_tensor *const *chunks,
                                    int64_t rank, fc_checksum *checksum, fc_error *err);
/* Casts every input directly into its output, without a buffer. Used for groups of one rank. */
FC_CHECK fc_status fc_transfer_fill(fc_transfer *t, const fc_gather_plan *plan,
                                    fc_param *const *params, fct_device device, fc_error *err);
/* Copies the gathered parts in `buffer` (plan->world of them) to the outputs of the parameters.
 * Precondition: `chunk` is a packed chunk, so its `owned` is false. Adds the parts to the checksum;
 * NULL: none. `rank` is this rank. */
FC_CHECK fc_status fc_transfer_unpack(fc_transfer *t, const fc_gather_plan *plan,
                                      fc_param *const *params, size_t chunk,
                                      const fct_tensor *buffer, int64_t rank, fc_checksum *checksum,
                                      fc_error *err);

/* Casts the gradients of a chunk and packs them into `buffer`, which holds `world` parts of the
 * chunk's elements. */
FC_CHECK fc_status fc_transfer_pack_gradients(fc_transfer *t, const fc_reduce_plan *plan,
                                              size_t chunk, int64_t world, fct_tensor *buffer,
                                              fc_error *err);

#endif
