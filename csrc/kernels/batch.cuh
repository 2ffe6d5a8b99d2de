/* What the host hands to the GPU kernels: jobs, as many as a launch takes. Both sides include
 * it. */
#ifndef FSDP_C_KERNELS_BATCH_CUH
#define FSDP_C_KERNELS_BATCH_CUH

#include "index.h"
#include "kernels.h"

namespace fck {

constexpr int THREADS = 256; /* of a block */
constexpr int BATCH = 78;    /* jobs per launch: what fits in ARGUMENT_BYTES */
constexpr size_t ARGUMENT_BYTES = 4096;

/* What row r and block b have of each other is a line: of block b, items [r * chunk, min((r + 1) *
 * chunk, numel)), and of row r, `chunk` items from b * chunk on. Blocks stand one after the other,
 * rows `pitch` bytes apart; which of the two is the source, the batch says. What is missing to
 * `chunk` items becomes zeros. An item is one byte of a move or one element of a conversion. */
struct line_job {
    const unsigned char *src;
    unsigned char *dst;
    int64_t numel;
    int64_t chunk;
    uint32_t lines; /* rows * blocks */
    fck_cut cut;
    int8_t src_dtype;
    int8_t dst_dtype;
    int8_t src_size;
    int8_t dst_size;
};

FCK_FN int64_t tile_items(const line_job &job) {
    return FCK_TILE_BYTES / (job.src_size > job.dst_size ? job.src_size : job.dst_size);
}

/* One launch's arguments. `first` is each job's first tile; jobs without tiles are left out. */
struct line_batch {
    line_job job[BATCH];
    uint32_t first[BATCH];
    int64_t pitch; /* bytes from row to row */
    uint32_t rows;
    int32_t count;
    uint32_t tiles;
    bool from_rows;
};
static_assert(sizeof(line_batch) <= ARGUMENT_BYTES, "a batch must fit in the kernel arguments");
static_assert(sizeof(line_batch) + sizeof(line_job) + sizeof(uint32_t) > ARGUMENT_BYTES,
              "a batch may be longer");

} // namespace fck

#endif
