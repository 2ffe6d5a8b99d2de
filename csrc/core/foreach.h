/* Transfers on devices without kernels of fsdp_c, with torch's multi-tensor operations. These
 * functions issue at most the operations of torch's FSDP2, apart from those for gaps (plan.h). Data
 * moves between tensor aliases, which the torch boundary checks; no address is read here.
 *
 * Preconditions: the plan is valid (laid out), a gather plan is not split into chunks (plan.h),
 * `world` is at least 1, and `start` is not negative. */
#ifndef FSDP_C_CORE_FOREACH_H
#define FSDP_C_CORE_FOREACH_H

#include "plan.h"

/* Argument lists of one operation. The lists are empty between two calls; only their memory is
 * kept. Initialize the struct with zeros. */
typedef struct fc_foreach {
    fct_tensor **dst; /* [capacity] counted, or NULL */
    fct_tensor **src; /* [capacity] counted, or NULL */
    int64_t *sizes;   /* [capacity] of the parts of a split; in copies a key of both dtypes */
    size_t count;
    size_t capacity;
} fc_foreach;

void fc_foreach_fini(fc_foreach *f);

/* Casts the inputs and packs them into the rank shard that starts `start` bytes into the storage of
 * `buffer`. With `buffer` NULL each input is copied to its output. One launch per pair of dtypes.
 * One more for each input that is cast from complex to real, or to a place that is not aligned to
 * its dtype. */
FC_CHECK fc_status fc_foreach_pack(fc_foreach *f, const fc_gather_plan *plan,
                                   fc_param *const *params, const fct_tensor *buffer, int64_t start,
                                   fc_error *err);
/* Copies the rank shards, which start `start` bytes into the storage of `buffer`, to the outputs.
 * One launch, and one per parameter that is sharded on another dim than 0. */
FC_CHECK fc_status fc_foreach_unpack(fc_foreach *f, const fc_gather_plan *plan,
                                     fc_param *const *params, const fct_tensor *buffer,
                                     int64_t start, fct_device device);
/* Casts the gradients and packs them into `world` rank shards, which start `start` bytes into the
 * storage of `buffer`. Padding and gaps are zeroed. One launch, plus one per gradient that is
 * sharded on another dim than 0. If the gradients have several dtypes, one more for each dtype that
 * is not the plan's. Gaps need one more for their zeros. */
FC_CHECK fc_status fc_foreach_pack_gradients(fc_foreach *f, const fc_reduce_plan *plan,
                                             int64_t world, const fct_tensor *buffer, int64_t start,
                                             fct_device device);

#endif
