/* The host side of the GPU kernels: turns descriptors into jobs and jobs into batches. A file that
 * includes this file must define the functions that it declares in fck.
 *
 * Each launch takes its batch by value as a kernel argument. The batch is copied before the launch
 * returns, so no staging buffer is needed and a launch may be captured in a CUDA graph. Lists of
 * more than BATCH_JOBS jobs are large batches. If those are rejected, and in captures (as for
 * torch's multi-tensor kernels), the jobs become several launches in stream order. */
#ifndef FSDP_C_KERNELS_LAUNCHER_CUH
#define FSDP_C_KERNELS_LAUNCHER_CUH

#include <atomic>

#include "batch.cuh"

namespace fck {

/* Queue one launch of batch.tiles blocks of THREADS threads. Return NULL, or a message with the
 * reason of the failure. */
static const char *launch_lines(line_batch &batch, bool casts, void *stream);
static const char *launch_lines(large_line_batch &batch, bool casts, void *stream);
/* Queues one launch of batch.blocks blocks of THREADS threads. Result as above. */
static const char *launch_checksums(checksum_batch &batch, void *stream);
/* Returns whether a CUDA graph captures the work of the stream. A failed query counts as a
 * capture. */
static int is_capturing(void *stream);

namespace {

const char NO_CAST[] = "these element types can be moved but not converted";
const char MISALIGNED[] = "a conversion needs addresses that are multiples of the element size";
const char TOO_MANY_TILES[] = "a single tensor has more tiles than a CUDA grid has blocks";
const char TOO_MANY_LINES[] = "a single tensor has more lines than 32 bits count";
const char NOT_WORDS[] = "a checksum needs an address that is a multiple of 8";

/* A large batch has failed where small ones did not. Later batches are small. */
std::atomic<bool> large_rejected;
/* Whether the kernel of small batches was launched, by `casts`. CUDA may load a kernel at its first
 * launch, and must not do so in a capture. So the first batch of a process is never large. */
std::atomic<bool> small_launched[2];

/* Collects jobs and launches a batch whenever it is full. All jobs of a launcher have the same
 * number of ranks, the same pitch and the same direction. */
class launcher {
  public:
    launcher(int64_t world, int64_t pitch, bool from_rank_shards, void *stream) : stream_(stream) {
        batch_.world = static_cast<uint32_t>(world);
        batch_.pitch = pitch;
        batch_.from_rank_shards = from_rank_shards;
        clear();
    }

    const char *add(line_job job, int64_t blocks) {
        const int64_t lines = batch_.world * blocks;
        if (job.chunk <= 0 || lines <= 0) {
            return nullptr;
        }
        if (lines > GRID_MAX) {
            return TOO_MANY_LINES;
        }
        job.lines = static_cast<uint32_t>(lines);
        job.cut = fck_cut_of(job.chunk, tile_items(job.src_shift, job.dst_shift), THREADS);
        const int64_t tiles = fck_tile_count(job.cut, lines);
        if (tiles > GRID_MAX) {
            return TOO_MANY_TILES;
        }
        if (batch_.count == LARGE_BATCH_JOBS || tiles > GRID_MAX - batch_.tiles) {
            if (const char *failure = flush()) {
                return failure;
            }
        }
        batch_.job[batch_.count] = job;
        batch_.first[batch_.count] = batch_.tiles;
        batch_.count += 1;
        batch_.tiles += static_cast<uint32_t>(tiles);
        casts_ |= job.src_dtype != job.dst_dtype;
        return nullptr;
    }

    const char *flush() {
        if (batch_.count == 0) {
            return nullptr;
        }
        const char *failure = launch_all();
        clear();
        return failure;
    }

  private:
    static constexpr int64_t GRID_MAX = INT32_MAX;

    bool can_be_large() const {
        return batch_.count > BATCH_JOBS && !large_rejected.load() &&
               small_launched[casts_].load() && is_capturing(stream_) == 0;
    }

    const char *launch_all() {
        const bool large = can_be_large();
        if (large && launch_lines(batch_, casts_, stream_) == nullptr) {
            return nullptr;
        }
        for (int32_t begin = 0; begin < batch_.count; begin += BATCH_JOBS) {
            if (const char *failure = launch_part(begin)) {
                return failure;
            }
        }
        small_launched[casts_] = true;
        large_rejected = large_rejected.load() || large;
        return nullptr;
    }

    /* Launches the BATCH_JOBS jobs from `begin` on, or as many as there are. */
    const char *launch_part(int32_t begin) {
        const int32_t end = begin + BATCH_JOBS < batch_.count ? begin + BATCH_JOBS : batch_.count;
        line_batch part;
        part.pitch = batch_.pitch;
        part.world = batch_.world;
        part.from_rank_shards = batch_.from_rank_shards;
        part.count = end - begin;
        part.tiles = (end < batch_.count ? batch_.first[end] : batch_.tiles) - batch_.first[begin];
        for (int32_t i = begin; i < end; i++) {
            part.job[i - begin] = batch_.job[i];
            part.first[i - begin] = batch_.first[i] - batch_.first[begin];
        }
        return launch_lines(part, casts_, stream_);
    }

    void clear() {
        batch_.count = 0;
        batch_.tiles = 0;
        casts_ = false;
    }

    large_line_batch batch_;
    void *stream_;
    bool casts_;
};

bool aligned(const void *pointer, int32_t size) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(size) == 0;
}

int gpu_can_cast(fck_dtype src, fck_dtype dst) {
    return fck_castable(src, dst);
}

/* Returns NULL if elements can be copied from src to dst, else a message with the reason. */
const char *check_copy(const void *src, fck_dtype src_dtype, const void *dst, fck_dtype dst_dtype) {
    if (gpu_can_cast(src_dtype, dst_dtype) == 0) {
        return NO_CAST;
    }
    if (src_dtype != dst_dtype &&
        !(aligned(src, fck_float_size(src_dtype)) && aligned(dst, fck_float_size(dst_dtype)))) {
        return MISALIGNED;
    }
    return nullptr;
}

line_job move_job(const void *src, void *dst, int64_t numel, int64_t chunk) {
    line_job job = {};
    job.src = static_cast<const unsigned char *>(src);
    job.dst = static_cast<unsigned char *>(dst);
    job.numel = numel;
    job.chunk = chunk;
    job.src_dtype = job.dst_dtype = FCK_UINT8;
    return job;
}

/* Returns the binary logarithm of the element size. Precondition: `dtype` is castable. */
int8_t shift_of(fck_dtype dtype) {
    const int32_t size = fck_float_size(dtype);
    return size == 8 ? 3 : size == 4 ? 2 : 1;
}

line_job cast_job(const void *src, fck_dtype src_dtype, void *dst, fck_dtype dst_dtype,
                  int64_t numel, int64_t chunk) {
    line_job job = move_job(src, dst, numel, chunk);
    job.src_dtype = static_cast<int8_t>(src_dtype);
    job.dst_dtype = static_cast<int8_t>(dst_dtype);
    job.src_shift = shift_of(src_dtype);
    job.dst_shift = shift_of(dst_dtype);
    return job;
}

const char *gpu_pack(const fck_segment *segments, size_t count, void *stream) {
    for (size_t i = 0; i < count; i++) {
        const fck_segment &s = segments[i];
        if (const char *reason = check_copy(s.src, s.src_dtype, s.dst, s.dst_dtype)) {
            return reason;
        }
    }
    launcher queue(1, 0, true, stream);
    for (size_t i = 0; i < count; i++) {
        const fck_segment &s = segments[i];
        const int64_t bytes = s.count * s.itemsize;
        const line_job job = s.src_dtype == s.dst_dtype ? move_job(s.src, s.dst, bytes, bytes)
                                                        : cast_job(s.src, s.src_dtype, s.dst,
                                                                   s.dst_dtype, s.count, s.count);
        if (const char *failure = queue.add(job, 1)) {
            return failure;
        }
    }
    return queue.flush();
}

const char *gpu_unpack(const void *gathered, int64_t rank_bytes, int64_t world,
                       const fck_slot *slots, size_t count, void *stream) {
    launcher queue(world, rank_bytes, true, stream);
    for (size_t i = 0; i < count; i++) {
        const fck_slot &slot = slots[i];
        const unsigned char *src = static_cast<const unsigned char *>(gathered) + slot.offset;
        const line_job job = move_job(src, slot.dst, world * slot.bytes, slot.bytes);
        if (const char *failure = queue.add(job, slot.blocks)) {
            return failure;
        }
    }
    return queue.flush();
}

line_job gradient_job(const fck_gradient &g, unsigned char *dst, fck_dtype dst_dtype) {
    const int64_t size = fck_target_size(&g, dst_dtype);
    unsigned char *to = dst + g.offset * size;
    if (g.src_dtype == dst_dtype) {
        return move_job(g.src, to, g.numel * size, g.chunk * size);
    }
    return cast_job(g.src, g.src_dtype, to, dst_dtype, g.numel, g.chunk);
}

const char *gpu_pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                               void *dst, int64_t rank_numel, fck_dtype dst_dtype, void *stream) {
    for (size_t i = 0; i < count; i++) {
        const fck_gradient &g = gradients[i];
        if (const char *reason = check_copy(g.src, g.src_dtype, dst, dst_dtype)) {
            return reason;
        }
    }
    /* The size of a destination element is equal for all gradients. */
    const int64_t size = count > 0 ? fck_target_size(&gradients[0], dst_dtype) : 0;
    launcher queue(world, rank_numel * size, false, stream);
    for (size_t i = 0; i < count; i++) {
        const fck_gradient &g = gradients[i];
        const line_job job = gradient_job(g, static_cast<unsigned char *>(dst), dst_dtype);
        if (const char *failure = queue.add(job, g.blocks)) {
            return failure;
        }
    }
    return queue.flush();
}

const char *gpu_add_checksums(const fck_range *ranges, size_t count, uint64_t *sum, void *stream) {
    checksum_batch batch = {};
    int64_t words = 0;
    for (size_t i = 0; i < count && i < FCK_RANGES; i++) {
        if (!aligned(ranges[i].data, WORD_BYTES)) {
            return NOT_WORDS;
        }
        batch.range[i] = ranges[i];
        words = fck_max(words, fck_ceil_div(ranges[i].bytes, WORD_BYTES));
    }
    batch.sum = sum;
    batch.count = static_cast<uint32_t>(count);
    batch.blocks = static_cast<uint32_t>(
        fck_min(fck_ceil_div(words, int64_t{THREADS}), int64_t{CHECKSUM_BLOCKS}));
    return words > 0 ? launch_checksums(batch, stream) : nullptr;
}

} // namespace

} // namespace fck

#endif
