/* Pure arithmetic: how one parameter is cut along dim 0, with torch.chunk's semantics and padding.
 */
#ifndef FSDP_C_CORE_LAYOUT_H
#define FSDP_C_CORE_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* Rank r of `world` holds rows [r*chunk_rows, r*chunk_rows + local_rows) of the `rows` rows; every
 * rank reserves chunk_rows rows, the ones past local_rows are zero padding. All counts in elements.
 */
typedef struct fc_layout {
    int64_t world;
    int64_t rank;
    int64_t rows;         /* size of dim 0 */
    int64_t row_numel;    /* elements per row: product of the other dims */
    int64_t chunk_rows;   /* ceil(rows / world) */
    int64_t local_rows;   /* this rank's, 0 .. chunk_rows */
    int64_t numel;        /* rows * row_numel */
    int64_t local_numel;  /* local_rows * row_numel */
    int64_t padded_numel; /* chunk_rows * row_numel: what every rank stores and sends */
} fc_layout;

/* a*b and a+b of non-negative numbers; false on overflow, *out then untouched. */
bool fc_size_mul(int64_t a, int64_t b, int64_t *out);
bool fc_size_add(int64_t a, int64_t b, int64_t *out);

/* FC_EINVAL where ndim < 1, a size is negative, rank is not in [0, world) or a product overflows.
 */
FC_CHECK fc_status fc_layout_init(fc_layout *layout, int32_t ndim, const int64_t *sizes,
                                  int64_t world, int64_t rank, fc_error *err);

#endif
