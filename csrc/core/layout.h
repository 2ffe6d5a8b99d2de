/* Shard layout: the split of one dimension of a parameter over ranks, with the semantics of
 * torch.chunk plus padding. Pure arithmetic. */
#ifndef FSDP_C_CORE_LAYOUT_H
#define FSDP_C_CORE_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* The tensor is viewed as [outer, rows, row_numel]; `rows` is the sharded dimension. Rank r of
 * `world` holds the rows [r * chunk_rows, r * chunk_rows + local_rows) of every outer block. Every
 * rank reserves chunk_rows rows, and the rows from local_rows on are zero padding. Only dim 0
 * (outer == 1) may be split unevenly. */
typedef struct fc_layout {
    int64_t world;
    int64_t rank;
    int64_t outer;        /* product of the sizes before the sharded dim */
    int64_t rows;         /* size of the sharded dim */
    int64_t row_numel;    /* product of the sizes after the sharded dim */
    int64_t chunk_rows;   /* ceil(rows / world) */
    int64_t local_rows;   /* rows of this rank, 0 .. chunk_rows */
    int64_t numel;        /* elements of the whole tensor */
    int64_t padded_numel; /* outer * chunk_rows * row_numel: stored and sent by every rank */
} fc_layout;

/* Compute a * b and a + b. Return false on overflow and leave *out unchanged. Precondition: neither
 * number is negative. */
bool fc_size_mul(int64_t a, int64_t b, int64_t *out);
bool fc_size_add(int64_t a, int64_t b, int64_t *out);

/* Computes the layout. Returns FC_EASSERT with a message if ndim < 1, dim is not in [0, ndim), a
 * size is negative, or rank is not in [0, world). Also returns FC_EASSERT if a dim other than 0 is
 * not divisible by world, or if a product overflows. */
FC_CHECK fc_status fc_layout_init(fc_layout *layout, int32_t ndim, const int64_t *sizes,
                                  int32_t dim, int64_t world, int64_t rank, fc_error *err);

#endif
