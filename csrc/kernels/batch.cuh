/* The arguments of GPU kernel launches. Host code (launcher.cuh) and device code
 * (lines.cuh, checksums.cuh) include this file. */
#ifndef FSDP_C_KERNELS_BATCH_CUH
#define FSDP_C_KERNELS_BATCH_CUH

#include "index.h"
#include "kernels.h"

/* Compilers of CUDA 12 also make code for drivers and GPUs without large arguments. The host's
 * compiler does not define the version. */
#if !defined(__CUDACC_VER_MAJOR__) || __CUDACC_VER_MAJOR__ >= 13
#define FCK_LARGE_ARGUMENTS
#endif

namespace fck {

constexpr int THREADS = 256; /* per thread block */
/* Thread blocks that a multiprocessor must hold at the same time (__launch_bounds__). So ptxas may
 * use up to 64 registers per thread. Without this bound ptxas uses 48 for the casts on sm_90, and
 * spills. */
constexpr int BLOCKS = 4;
/* Bytes of launch arguments that every driver accepts, and bytes that the drivers of CUDA 13
 * accept. */
constexpr size_t ARGUMENT_BYTES = 4096;
constexpr size_t LARGE_ARGUMENT_BYTES = 32764;
/* Jobs per launch: as many as fit in these bytes. */
constexpr int BATCH_JOBS = 78;
constexpr int LARGE_BATCH_JOBS = 629;

/* One copy between a buffer of rank shards and a tensor of `blocks` contiguous blocks. A parameter
 * that is sharded on dim 0 has one block; see fck_gradient. A line is the part that rank shard r
 * and block b share. In block b the line has the items [r * chunk, min((r + 1) * chunk, numel)). In
 * rank shard r the line has the `chunk` items from b * chunk on. Items of the rank shard beyond the
 * end of the block are set to zero.
 *
 * Blocks are contiguous; rank shards are `pitch` bytes apart. line_batch_of::from_rank_shards
 * selects the source. An item is one byte of a move or one element of a conversion. */
struct line_job {
    const unsigned char *src;
    unsigned char *dst;
    int64_t numel;  /* items of one block */
    int64_t chunk;  /* items of one line in a rank shard; not a chunk of core/plan.h */
    uint32_t lines; /* world * blocks */
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
template <int JOBS> struct line_batch_of {
    line_job job[JOBS];
    uint32_t first[JOBS];
    int64_t pitch; /* bytes from one rank shard to the next */
    uint32_t world;
    int32_t count;
    uint32_t tiles;
    bool from_rank_shards;
};
using line_batch = line_batch_of<BATCH_JOBS>;
using large_line_batch = line_batch_of<LARGE_BATCH_JOBS>;

template <class Batch, size_t BYTES> constexpr bool is_full() {
    constexpr size_t next = sizeof(line_job) + sizeof(uint32_t);
    return sizeof(Batch) <= BYTES && sizeof(Batch) + next > BYTES;
}
static_assert(is_full<line_batch, ARGUMENT_BYTES>(), "BATCH_JOBS does not fit");
static_assert(is_full<large_line_batch, LARGE_ARGUMENT_BYTES>(), "LARGE_BATCH_JOBS does not fit");

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
