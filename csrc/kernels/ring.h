/* Sums the buffers of several ranks in the order in which a ring all-reduce adds them. Functions
 * take raw pointers, like those of kernels.h, and keep no state. */
#ifndef FSDP_C_KERNELS_RING_H
#define FSDP_C_KERNELS_RING_H

#include "kernels.h"

/* Returns 1 if fck_ring_sum supports the type: the floating-point types of kernels.h. */
int fck_ring_supports(fck_dtype dtype);

/* Computes `count` elements of gloo's ring all-reduce over a buffer of `total` elements, from
 * element `first` on, bit for bit. The array `inputs` has one pointer per rank of `world` (at least
 * 2), to these elements of that rank. `out` may be one of the inputs and overlaps no other.
 * Preconditions: fck_ring_supports(dtype) is 1, and the elements lie within `total`. */
void fck_ring_sum(fck_dtype dtype, void *out, const void *const *inputs, int64_t world,
                  int64_t total, int64_t first, int64_t count);

#endif
