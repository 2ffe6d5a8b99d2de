/* Index arithmetic of the kernels, shared by the CPU loops and the CUDA grid so that one set of
 * tests covers both: which elements of a gradient land in which row, and how work is cut into
 * tiles.
 *
 * A job is `lines` lines of `items` items each: a line is what one row holds of one block. Long
 * lines are cut into tiles of at most `tile_items` items; short ones are put together, as many as a
 * tile holds, so that a large world of small shards does not become a grid of nearly empty blocks.
 * Every (line, item) belongs to exactly one tile. Lines and tiles are counted in 32 bits, so that
 * the grid divides by no wider number; all other sizes are int64: callers have checked that every
 * extent fits its storage, so no product here overflows. */
#ifndef FSDP_C_KERNELS_INDEX_H
#define FSDP_C_KERNELS_INDEX_H

#include <stdint.h>

#include "kernels.h"

#ifdef __CUDACC__
#define FCK_FN static __host__ __device__ inline
#else
#define FCK_FN static inline
#endif

enum { FCK_TILE_BYTES = 16384 }; /* one thread block's work, on the wider of both sides */

/* How a job is cut: into tiles that share a line, or into lines that share a tile. One is 1. */
typedef struct fck_cut {
    uint32_t tiles_per_line;
    uint32_t lines_per_tile;
} fck_cut;

/* Lines [first_line, last_line) and items [begin, end) of each of them. */
typedef struct fck_tile {
    uint32_t first_line;
    uint32_t last_line;
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

/* Of a job with `items` items in a line, at least one. */
FCK_FN fck_cut fck_cut_of(int64_t items, int64_t tile_items) {
    fck_cut cut;
    cut.tiles_per_line = items > tile_items ? (uint32_t)fck_ceil_div(items, tile_items) : 1;
    cut.lines_per_tile = items < tile_items ? (uint32_t)(tile_items / items) : 1;
    return cut;
}

/* How many tiles that makes of `lines` lines. */
FCK_FN int64_t fck_tile_count(fck_cut cut, int64_t lines) {
    return fck_ceil_div(lines, cut.lines_per_tile) * cut.tiles_per_line;
}

/* Tile `index` of those counted by fck_tile_count. */
FCK_FN fck_tile fck_tile_at(fck_cut cut, int64_t items, int64_t tile_items, uint32_t lines,
                            uint32_t index) {
    const uint32_t group = index / cut.tiles_per_line;
    fck_tile tile;
    tile.first_line = group * cut.lines_per_tile;
    tile.last_line =
        lines - tile.first_line > cut.lines_per_tile ? tile.first_line + cut.lines_per_tile : lines;
    tile.begin = (int64_t)(index - group * cut.tiles_per_line) * tile_items;
    tile.end = fck_min(tile.begin + tile_items, items);
    return tile;
}

/* How many of a block's `threads` threads (a power of two) work on one line where a tile holds
 * `lines`: all of them are busy where there are as many lines, and several do a line where there
 * are fewer. */
FCK_FN int fck_threads_per_line(int threads, uint32_t lines) {
    int each = threads;
    for (uint32_t held = 1; held < lines && each > 1; held *= 2) {
        each /= 2;
    }
    return each;
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
