/* The transfers of devices that have no kernels of ours, with torch's multi-tensor operations: the
 * same that torch's own FSDP2 uses, and never more of them. What moves are aliases of tensors,
 * which the boundary checks; no address is taken here. */
#ifndef FSDP_C_CORE_FOREACH_H
#define FSDP_C_CORE_FOREACH_H

#include "plan.h"

/* The lists of one operation. Empty between two calls; only the memory is kept. Zeroed at first. */
typedef struct fc_foreach {
    fct_tensor **dst; /* [capacity] counted, or NULL */
    fct_tensor **src; /* [capacity] likewise */
    int64_t *sizes;   /* [capacity] */
    size_t count;
    size_t capacity;
} fc_foreach;

void fc_foreach_fini(fc_foreach *f);

/* The inputs, cast, into the row of `buffer` that starts `start` bytes into its storage; buffer
 * NULL: each into its output. One launch for each pair of dtypes. */
FC_CHECK fc_status fc_foreach_pack(fc_foreach *f, const fc_gather_plan *plan,
                                   fc_param *const *params, const fct_tensor *buffer, int64_t start,
                                   fc_error *err);
/* The rows of `buffer`, from `start` bytes into its storage on, to the outputs. One launch,
 * and one for each parameter that is cut on another dim than 0. */
FC_CHECK fc_status fc_foreach_unpack(fc_foreach *f, const fc_gather_plan *plan,
                                     fc_param *const *params, const fct_tensor *buffer,
                                     int64_t start, fct_device device);
/* The gradients, cast, to `world` rows of `buffer`, which start `start` bytes into its storage; the
 * padding becomes zeros. One launch, one for each gradient that is cut on another dim, and where
 * the gradients have several dtypes one for each of those. */
FC_CHECK fc_status fc_foreach_pack_gradients(fc_foreach *f, const fc_reduce_plan *plan,
                                             int64_t world, const fct_tensor *buffer, int64_t start,
                                             fct_device device);

#endif
