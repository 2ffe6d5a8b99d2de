/* Sums of several ranks' rows, in the order in which a ring all-reduce adds them. Raw pointers,
 * like kernels.h; nothing is kept. */
#ifndef FSDP_C_KERNELS_RING_H
#define FSDP_C_KERNELS_RING_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 1 where elements of the type can be summed here: the floating-point types of kernels.h. */
int fck_ring_knows(fck_dtype dtype);

/* out[i] = the sum over all ranks of element first + i of a buffer of `total` elements, for i below
 * `count`, bit for bit as gloo's ring all-reduce over that buffer adds it. rows[r]: those elements
 * on rank r of `world` (at least 2). `out` may be one of the rows, and overlaps no other. The type
 * is one that fck_ring_knows(). */
void fck_ring_sum(fck_dtype dtype, void *out, const void *const *rows, int64_t world, int64_t total,
                  int64_t first, int64_t count);

#ifdef __cplusplus
}
#endif

#endif
