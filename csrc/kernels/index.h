/* Index arithmetic of the kernels, shared by the CPU loops and the CUDA grid so that one set of
 * tests covers both: which elements of a gradient land in which row, and how work is cut into
 * tiles.
 *
 * A job is `rows` rows of `items` items each. Long rows are cut into tiles of at most
 * `tile_items` items; short rows are put several to a tile, so that a large world of small
 * shards does not become a grid of nearly empty blocks. Every (row, item) belongs to exactly one
 * tile. All sizes are int64: callers have checked that every extent fits its storage, so no
 * product here overflows. */
#ifndef FSDP_C_KERNELS_INDEX_H
#define FSDP_C_KERNELS_INDEX_H

#include <stdint.h>

#include "kernels.h"

#ifdef __CUDACC__
#define FCK_FN static __host__ __device__ inline
#else
#define FCK_FN static inline
#endif

enum {
    FCK_TILE_BYTES = 16384, /* one block's work, counted on the wider of source and destination */
    FCK_TILE_ROWS_MAX = 32, /* short rows put into one tile: four for each warp of a block */
};

/* Rows [first_row, last_row) and items [begin, end) of each of them. */
typedef struct fck_tile {
    int64_t first_row;
    int64_t last_row;
    int64_t begin;
    int64_t end;
} fck_tile;

FCK_FN int64_t fck_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

FCK_FN int64_t fck_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

FCK_FN int64_t fck_ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* Bytes of one element of a castable type, 0 for every other type (its size comes with the
 * data). */
FCK_FN int32_t fck_float_size(fck_dtype dtype) {
    switch (dtype) {
    case FCK_FLOAT16:
    case FCK_BFLOAT16:
        return 2;
    case FCK_FLOAT32:
        return 4;
    case FCK_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

FCK_FN int fck_castable(fck_dtype src, fck_dtype dst) {
    return src == dst || (fck_float_size(src) != 0 && fck_float_size(dst) != 0);
}

/* Bytes of a destination element: an equal type has the gradient's own size, any other is
 * castable. */
FCK_FN int64_t fck_target_size(const fck_gradient *gradient, fck_dtype dst_dtype) {
    return gradient->src_dtype == dst_dtype ? gradient->itemsize : fck_float_size(dst_dtype);
}

/* How many of the `chunk` slots of `row` hold elements of a gradient of `numel`; the rest is
 * padding. */
FCK_FN int64_t fck_row_filled(int64_t numel, int64_t chunk, int64_t row) {
    return fck_min(fck_max(numel - row * chunk, 0), chunk);
}

/* How many short rows share a tile; 1 where a row fills a tile alone. */
FCK_FN int64_t fck_rows_per_tile(int64_t items, int64_t tile_items) {
    return items >= tile_items ? 1 : fck_min(tile_items / items, FCK_TILE_ROWS_MAX);
}

/* How many tiles `rows` rows of `items` items make. */
FCK_FN int64_t fck_tile_count(int64_t items, int64_t tile_items, int64_t rows) {
    if (items <= 0 || rows <= 0) {
        return 0;
    }
    if (items > tile_items) {
        return rows * fck_ceil_div(items, tile_items);
    }
    return fck_ceil_div(rows, fck_rows_per_tile(items, tile_items));
}

/* Tile `index` of those counted by fck_tile_count. */
FCK_FN fck_tile fck_tile_at(int64_t items, int64_t tile_items, int64_t rows, int64_t index) {
    fck_tile tile;
    if (items > tile_items) {
        const int64_t per_row = fck_ceil_div(items, tile_items);
        tile.first_row = index / per_row;
        tile.last_row = tile.first_row + 1;
        tile.begin = index % per_row * tile_items;
        tile.end = fck_min(tile.begin + tile_items, items);
    } else {
        const int64_t rows_per_tile = fck_rows_per_tile(items, tile_items);
        tile.first_row = index * rows_per_tile;
        tile.last_row = fck_min(tile.first_row + rows_per_tile, rows);
        tile.begin = 0;
        tile.end = items;
    }
    return tile;
}

/* The job that owns tile `index`: the last i with first[i] <= index. `first` rises strictly from
 * 0. */
FCK_FN int32_t fck_find_job(const uint32_t *first, int32_t count, uint32_t index) {
    int32_t low = 0;
    int32_t high = count;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (first[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

#endif
