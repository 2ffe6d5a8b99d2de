/* Index arithmetic of the kernels: which elements of a gradient belong to which rank, and how work
 * is divided into tiles. The CPU loops and the CUDA grid share this code, so one set of tests
 * covers both.
 *
 * A job has `lines` lines of `items` items each. A line is the part that one rank shard and one
 * block share (batch.cuh). Lines longer than `tile_items` are divided into tiles of at most
 * `tile_items` items. Shorter lines share a tile, as many as fit, so that many small shards do not
 * make a grid of nearly empty blocks. Every (line, item) belongs to exactly one tile.
 *
 * Lines and tiles are counted in 32 bits, so that the device code needs no 64-bit division for
 * them. All other sizes are int64. Callers have checked that every extent fits its storage, so no
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

enum { FCK_TILE_BYTES = 16384 }; /* work of one thread block, in bytes of the wider type */

/* Division of a job into tiles. A long line has several tiles, and a tile has several short lines.
 * At least one of the two numbers is 1. `team_bits` divides a block's threads: 2^team_bits threads
 * work on one line. */
typedef struct fck_cut {
    uint32_t tiles_per_line;
    uint16_t lines_per_tile; /* at most FCK_TILE_BYTES */
    uint16_t team_bits;
} fck_cut;

/* The lines [first_line, end_line), and of each the items [begin, end). */
typedef struct fck_tile {
    uint32_t first_line;
    uint32_t end_line;
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

/* Returns the element size in bytes of a castable type, 0 for every other type. For other types,
 * descriptors have an `itemsize`. */
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

/* Returns 1 if the kernels of all devices can convert `src` to `dst`, or if the types are equal. */
FCK_FN int fck_castable(fck_dtype src, fck_dtype dst) {
    return src == dst || (fck_float_size(src) != 0 && fck_float_size(dst) != 0);
}

/* Returns the size of a destination element in bytes: the gradient's itemsize if the types are
 * equal, else the size of `dst_dtype`, which is castable. */
FCK_FN int64_t fck_target_size(const fck_gradient *gradient, fck_dtype dst_dtype) {
    return gradient->src_dtype == dst_dtype ? gradient->itemsize : fck_float_size(dst_dtype);
}

/* Returns how many of the `chunk` elements of `rank` are elements of a gradient of `numel`
 * elements. The others are padding. */
FCK_FN int64_t fck_rank_filled(int64_t numel, int64_t chunk, int64_t rank) {
    return fck_min(fck_max(numel - rank * chunk, 0), chunk);
}

/* Divides a job whose lines have `items` items. items >= 1, tile_items <= FCK_TILE_BYTES. `threads`
 * is the number of a block's threads, a power of two. If a tile has fewer lines than threads,
 * several threads share a line. */
FCK_FN fck_cut fck_cut_of(int64_t items, int64_t tile_items, int threads) {
    const int lines = items < tile_items ? (int)(tile_items / items) : 1;
    int team_bits = 0;
    while (lines << (team_bits + 1) <= threads) {
        team_bits++;
    }
    fck_cut cut;
    cut.tiles_per_line = items > tile_items ? (uint32_t)fck_ceil_div(items, tile_items) : 1;
    cut.lines_per_tile = (uint16_t)lines;
    cut.team_bits = (uint16_t)team_bits;
    return cut;
}

/* Returns the number of tiles of a job with `lines` lines. */
FCK_FN int64_t fck_tile_count(fck_cut cut, int64_t lines) {
    return fck_ceil_div(lines, cut.lines_per_tile) * cut.tiles_per_line;
}

/* Returns tile `index`. 0 <= index < fck_tile_count(). */
FCK_FN fck_tile fck_tile_at(fck_cut cut, int64_t items, int64_t tile_items, uint32_t lines,
                            uint32_t index) {
    const uint32_t group = index / cut.tiles_per_line;
    fck_tile tile;
    tile.first_line = group * cut.lines_per_tile;
    tile.end_line =
        lines - tile.first_line > cut.lines_per_tile ? tile.first_line + cut.lines_per_tile : lines;
    tile.begin = (int64_t)(index - group * cut.tiles_per_line) * tile_items;
    tile.end = fck_min(tile.begin + tile_items, items);
    return tile;
}

/* Returns the job that owns tile `index`: the last i with first[i] <= index. `first` starts at 0
 * and increases strictly. */
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
