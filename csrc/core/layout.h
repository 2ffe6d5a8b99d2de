/* Pure arithmetic: how one parameter is cut along one dim, with torch.chunk's semantics and
 * padding. */
#ifndef FSDP_C_CORE_LAYOUT_H
#define FSDP_C_CORE_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* The tensor seen as [outer, rows, row_numel]; `rows` is the dim that is cut. Rank r of `world`
 * holds rows [r*chunk_rows, r*chunk_rows + local_rows) of every outer block; every rank reserves
 * chunk_rows rows, the ones past local_rows are zero padding. Only dim 0 (outer == 1) may be cut
 * unevenly. All counts in elements. */
typedef struct fc_layout {
    int64_t world;
    int64_t rank;
    int64_t outer;        /* product of the dims before the one that is cut */
    int64_t rows;         /* size of the dim that is cut */
    int64_t row_numel;    /* product of the dims behind it */
    int64_t chunk_rows;   /* ceil(rows / world) */
    int64_t local_rows;   /* this rank's, 0 .. chunk_rows */
    int64_t numel;        /* of the whole tensor */
    int64_t local_numel;  /* of this rank's shard */
    int64_t padded_numel; /* outer * chunk_rows * row_numel: what every rank stores and sends */
} fc_layout;

/* a*b and a+b of non-negative numbers; false on overflow, *out then untouched. */
bool fc_size_mul(int64_t a, int64_t b, int64_t *out);
bool fc_size_add(int64_t a, int64_t b, int64_t *out);

/* FC_EASSERT where ndim < 1, dim is not in [0, ndim), a size is negative, rank is not in
 * [0, world), a dim other than 0 is not divisible by world, or a product overflows. */
FC_CHECK fc_status fc_layout_init(fc_layout *layout, int32_t ndim, const int64_t *sizes,
                                  int32_t dim, int64_t world, int64_t rank, fc_error *err);

#endif
