/* The arguments of GPU kernel launches. Host code (launcher.cuh) and device code
 * (lines.cuh, checksums.cuh) include this file. */
#ifndef FSDP_C_KERNELS_BATCH_CUH
#define FSDP_C_KERNELS_BATCH_CUH

#include "index.h"
#include "kernels.h"

namespace fck {

constexpr int THREADS = 256; /* per thread block */
/* Thread blocks of a multiprocessor: limits a thread to 64 registers. Without a limit ptxas chooses
 * 48 for the casts on sm_90, and spills. */
constexpr int BLOCKS = 4;
constexpr int BATCH_JOBS = 78; /* jobs per launch: as many as fit in ARGUMENT_BYTES */
constexpr size_t ARGUMENT_BYTES = 4096;

/* One copy between a buffer of rows (one row per rank) and a tensor of `blocks` contiguous blocks
 * (one block for a parameter that is sharded on dim 0; see fck_gradient). A line is the part that
 * row r and block b share. In block b the line has the items [r * chunk, min((r + 1) * chunk,
 * numel)). In row r the line has the `chunk` items from b * chunk on. Items of the row beyond the
 * end of the block are set to zero.
 *
 * Blocks are contiguous; rows are `pitch` bytes apart. line_batch.from_rows selects the source. An
 * item is one byte of a move or one element of a conversion. */
struct line_job {
    const unsigned char *src;
    unsigned char *dst;
    int64_t numel;  /* items of one block */
    int64_t chunk;  /* items of one line in a row; not a chunk of core/plan.h */
    uint32_t lines; /* rows * blocks */
    fck_cut cut;    /* division into tiles; see index.h */
    int8_t src_dtype;
    int8_t dst_dtype;
    int8_t src_shift; /* an item of the source has 2^src_shift bytes */
    int8_t dst_shift;
};

FCK_FN int64_t tile_items(int src_shift, int dst_shift) {
    return FCK_TILE_BYTES >> (src_shift > dst_shift ? src_shift : dst_shift);
}

/* The arguments of one launch. first[i] is the first tile (tiles: index.h) of job i. Jobs without
 * tiles are not in the batch. */
struct line_batch {
    line_job job[BATCH_JOBS];
    uint32_t first[BATCH_JOBS];
    int64_t pitch; /* bytes from one row to the next */
    uint32_t rows;
    int32_t count;
    uint32_t tiles;
    bool from_rows;
};
static_assert(sizeof(line_batch) <= ARGUMENT_BYTES, "a batch must fit in the kernel arguments");
static_assert(sizeof(line_batch) + sizeof(line_job) + sizeof(uint32_t) > ARGUMENT_BYTES,
              "BATCH_JOBS can be larger");

constexpr int CHECKSUM_BLOCKS = 512; /* per launch; each warp adds to the sum once */
constexpr int WORD_BYTES = 8;

/* The arguments of a launch of fck_add_checksums. */
struct checksum_batch {
    fck_range range[FCK_RANGES];
    uint64_t *sum;
    uint32_t count;
    uint32_t blocks;
};

} // namespace fck

#endif
