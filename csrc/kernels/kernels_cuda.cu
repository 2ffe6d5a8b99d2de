/* The CUDA kernels: raw pointers and a stream, no torch header. Work is queued on the caller's
 * stream of the caller's current device; nothing is allocated and nothing is synchronised.
 *
 * Descriptors travel as kernel arguments: each launch takes a batch by value (at most 4 KB, what
 * every driver accepts), so they are copied before the launch returns, no staging buffer exists
 * and a launch may be captured in a graph. Longer lists become several launches in stream order.
 *
 * One block works on one tile (index.h): it finds its job by binary search over the jobs' first
 * tiles, then moves or converts in 16-byte accesses wherever both addresses allow it. Moves are
 * counted in bytes, so any type and any address will do; conversions need element-aligned
 * addresses and are refused otherwise. */
#include "kernels.h"

#include <cuda_runtime.h>

#include "cast.h"
#include "index.h"

namespace {

constexpr int THREADS = 256;
constexpr int UNROLL = 4; /* independent 16-byte loads in flight per thread */
constexpr int BATCH = 78; /* jobs per launch: what fits in ARGUMENT_BYTES */
constexpr size_t ARGUMENT_BYTES = 4096;

const char NO_CAST[] = "these element types can be moved but not converted";
const char MISALIGNED[] = "a conversion needs addresses that are multiples of the element size";
const char TOO_LARGE[] = "a single tensor has more tiles than a CUDA grid has blocks";
const char TOO_MANY[] = "a single tensor has more lines than 32 bits count";

/* ---- element types ---- */

struct half_bits {
    uint16_t bits;
};

struct bfloat16_bits {
    uint16_t bits;
};

/* To the type conversions start from (float, or double as it is), and from there to the target. The
 * 16-bit types always meet float, as in torch. */
__device__ inline float widen(half_bits value) {
    return fck_float_of_half(value.bits);
}
__device__ inline float widen(bfloat16_bits value) {
    return fck_float_of_bfloat16(value.bits);
}
__device__ inline float widen(float value) {
    return value;
}
__device__ inline double widen(double value) {
    return value;
}

template <class T> __device__ inline void narrow(T value, half_bits *out) {
    out->bits = fck_half_of_float(static_cast<float>(value));
}
template <class T> __device__ inline void narrow(T value, bfloat16_bits *out) {
    out->bits = fck_bfloat16_of_float(static_cast<float>(value));
}
template <class T> __device__ inline void narrow(T value, float *out) {
    *out = static_cast<float>(value);
}
template <class T> __device__ inline void narrow(T value, double *out) {
    *out = static_cast<double>(value);
}

/* ---- what a team of threads does to one run of items; thread `lane` of `lanes` calls each ----
 *
 * A run lies within one tile, so its counts fit an int. */

struct team {
    int lane;
    int lanes;
};

template <class T, int N> struct alignas(sizeof(T) * N) pack_of {
    T item[N];
};

__device__ inline int least(int a, int b) {
    return a < b ? a : b;
}

__device__ inline uintptr_t address(const void *pointer) {
    return reinterpret_cast<uintptr_t>(pointer);
}

/* Applies `convert` to each of `count` units, loading several before storing any. */
template <class S, class D, class Convert>
__device__ inline void for_units(const S *src, D *dst, int count, team t, Convert convert) {
    int i = t.lane;
    for (; i + (UNROLL - 1) * t.lanes < count; i += UNROLL * t.lanes) {
        S unit[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            unit[k] = src[i + k * t.lanes];
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            dst[i + k * t.lanes] = convert(unit[k]);
        }
    }
    for (; i < count; i += t.lanes) {
        dst[i] = convert(src[i]);
    }
}

/* The body in words of W, which divides the distance between the two addresses; the ends in
 * bytes. */
template <class W>
__device__ inline void move_words(const unsigned char *src, unsigned char *dst, int bytes, team t) {
    constexpr int size = sizeof(W);
    const int head = least(static_cast<int>(-address(dst) & (size - 1)), bytes);
    const int words = (bytes - head) / size;
    const int tail = head + words * size;
    for (int i = t.lane; i < head; i += t.lanes) {
        dst[i] = src[i];
    }
    for_units(reinterpret_cast<const W *>(src + head), reinterpret_cast<W *>(dst + head), words, t,
              [](W word) { return word; });
    for (int i = tail + t.lane; i < bytes; i += t.lanes) {
        dst[i] = src[i];
    }
}

__device__ inline void move_bytes(const unsigned char *src, unsigned char *dst, int bytes, team t) {
    const uintptr_t distance = address(src) ^ address(dst);
    if ((distance & 15) == 0) {
        move_words<pack_of<uint32_t, 4>>(src, dst, bytes, t);
    } else if ((distance & 7) == 0) {
        move_words<pack_of<uint32_t, 2>>(src, dst, bytes, t);
    } else if ((distance & 3) == 0) {
        move_words<uint32_t>(src, dst, bytes, t);
    } else if ((distance & 1) == 0) {
        move_words<uint16_t>(src, dst, bytes, t);
    } else {
        move_words<unsigned char>(src, dst, bytes, t);
    }
}

__device__ inline void zero_bytes(unsigned char *dst, int bytes, team t) {
    using word = pack_of<uint32_t, 4>;
    const int head = least(static_cast<int>(-address(dst) & 15), bytes);
    const int words = (bytes - head) / 16;
    const int tail = head + words * 16;
    for (int i = t.lane; i < head; i += t.lanes) {
        dst[i] = 0;
    }
    for (int i = t.lane; i < words; i += t.lanes) {
        reinterpret_cast<word *>(dst + head)[i] = word{{0, 0, 0, 0}};
    }
    for (int i = tail + t.lane; i < bytes; i += t.lanes) {
        dst[i] = 0;
    }
}

template <class S, class D> __device__ inline D convert_item(S value) {
    D result;
    narrow(widen(value), &result);
    return result;
}

/* Converts N items at a time, 16 bytes of the wider type, where a common head aligns both
 * addresses. */
template <class S, class D>
__device__ inline void cast_items(const void *from, void *to, int count, team t) {
    constexpr int N = 16 / (sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D));
    using source = pack_of<S, N>;
    using target = pack_of<D, N>;
    const S *src = static_cast<const S *>(from);
    D *dst = static_cast<D *>(to);
    int head = least(static_cast<int>((-address(dst) & (sizeof(target) - 1)) / sizeof(D)), count);
    int packs = (count - head) / N;
    if ((address(src + head) & (sizeof(source) - 1)) != 0) {
        head = count;
        packs = 0;
    }
    const int tail = head + packs * N;
    const auto one = [](S value) { return convert_item<S, D>(value); };
    for_units(src, dst, head, t, one);
    for_units(reinterpret_cast<const source *>(src + head), reinterpret_cast<target *>(dst + head),
              packs, t, [](const source &in) {
                  target out;
#pragma unroll
                  for (int k = 0; k < N; k++) {
                      out.item[k] = convert_item<S, D>(in.item[k]);
                  }
                  return out;
              });
    for_units(src + tail, dst + tail, count - tail, t, one);
}

template <class S>
__device__ inline void cast_from(const void *src, void *dst, fck_dtype dst_dtype, int count,
                                 team t) {
    switch (dst_dtype) {
    case FCK_FLOAT16:
        return cast_items<S, half_bits>(src, dst, count, t);
    case FCK_BFLOAT16:
        return cast_items<S, bfloat16_bits>(src, dst, count, t);
    case FCK_FLOAT32:
        return cast_items<S, float>(src, dst, count, t);
    case FCK_FLOAT64:
        return cast_items<S, double>(src, dst, count, t);
    default:
        return;
    }
}

__device__ inline void cast_run(const void *src, fck_dtype src_dtype, void *dst,
                                fck_dtype dst_dtype, int count, team t) {
    switch (src_dtype) {
    case FCK_FLOAT16:
        return cast_from<half_bits>(src, dst, dst_dtype, count, t);
    case FCK_BFLOAT16:
        return cast_from<bfloat16_bits>(src, dst, dst_dtype, count, t);
    case FCK_FLOAT32:
        return cast_from<float>(src, dst, dst_dtype, count, t);
    case FCK_FLOAT64:
        return cast_from<double>(src, dst, dst_dtype, count, t);
    default:
        return;
    }
}

/* ---- the kernel: lines of items, moved or converted, the end of a line padded with zeros ---- */

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

/* A tile of several short lines is shared out line by line to teams of threads. CASTS is false for
 * batches of moves alone, which spares them the registers of the conversions. */
template <bool CASTS>
__global__ void __launch_bounds__(THREADS) copy_lines(const __grid_constant__ line_batch batch) {
    const int thread = static_cast<int>(threadIdx.x);
    const int32_t which = fck_find_job(batch.first, batch.count, blockIdx.x);
    const line_job &job = batch.job[which];
    const fck_tile tile = fck_tile_at(job.cut, job.chunk, tile_items(job), job.lines,
                                      blockIdx.x - batch.first[which]);
    const int lanes = fck_threads_per_line(THREADS, job.cut.lines_per_tile);
    const team t = {thread & (lanes - 1), lanes};

    for (uint32_t line = tile.first_line + static_cast<uint32_t>(thread / lanes);
         line < tile.last_line; line += static_cast<uint32_t>(THREADS / lanes)) {
        const uint32_t block = line / batch.rows;
        const int64_t row = line - block * batch.rows;
        const int64_t in_blocks = block * job.numel + row * job.chunk;
        const int64_t in_row = block * job.chunk;
        const int64_t filled = fck_row_filled(job.numel, job.chunk, row);
        const int64_t stop = fck_max(tile.begin, fck_min(filled, tile.end));
        unsigned char *dst =
            job.dst + (batch.from_rows ? in_blocks * job.dst_size
                                       : row * batch.pitch + in_row * job.dst_size);
        if (stop > tile.begin) {
            const int64_t start = batch.from_rows ? row * batch.pitch + in_row * job.src_size
                                                  : in_blocks * job.src_size;
            const unsigned char *from = job.src + start + tile.begin * job.src_size;
            unsigned char *to = dst + tile.begin * job.dst_size;
            const int count = static_cast<int>(stop - tile.begin);
            if (!CASTS || job.src_dtype == job.dst_dtype) {
                move_bytes(from, to, count, t);
            } else {
                cast_run(from, job.src_dtype, to, job.dst_dtype, count, t);
            }
        }
        if (stop < tile.end) {
            zero_bytes(dst + stop * job.dst_size, static_cast<int>(tile.end - stop) * job.dst_size,
                       t);
        }
    }
}

/* ---- batching and launching ---- */

/* Collects jobs and launches them whenever a batch is full. All jobs of one launcher have the same
 * rows, `pitch` bytes apart, on the same side. */
class launcher {
  public:
    launcher(int64_t rows, int64_t pitch, bool from_rows, void *stream)
        : stream_(static_cast<cudaStream_t>(stream)) {
        batch_.rows = static_cast<uint32_t>(rows);
        batch_.pitch = pitch;
        batch_.from_rows = from_rows;
        clear();
    }

    const char *add(line_job job, int64_t blocks) {
        const int64_t lines = batch_.rows * blocks;
        if (job.chunk <= 0 || lines <= 0) {
            return nullptr;
        }
        if (lines > GRID_MAX) {
            return TOO_MANY;
        }
        job.lines = static_cast<uint32_t>(lines);
        job.cut = fck_cut_of(job.chunk, tile_items(job));
        const int64_t tiles = fck_tile_count(job.cut, lines);
        if (tiles > GRID_MAX) {
            return TOO_LARGE;
        }
        if (batch_.count == BATCH || tiles > GRID_MAX - batch_.tiles) {
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
        void *arguments[] = {&batch_};
        const auto kernel = casts_ ? copy_lines<true> : copy_lines<false>;
        const cudaError_t launched =
            cudaLaunchKernel(kernel, dim3(batch_.tiles), dim3(THREADS), arguments, 0, stream_);
        const cudaError_t last =
            cudaGetLastError(); /* taken, so that torch does not report it again */
        clear();
        const cudaError_t error = launched != cudaSuccess ? launched : last;
        return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
    }

  private:
    static constexpr int64_t GRID_MAX = INT32_MAX;

    void clear() {
        batch_.count = 0;
        batch_.tiles = 0;
        casts_ = false;
    }

    line_batch batch_;
    cudaStream_t stream_;
    bool casts_;
};

bool aligned(const void *pointer, int32_t size) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(size) == 0;
}

/* NULL if `count` elements can go from src to dst, else why not. */
const char *refusal(const void *src, fck_dtype src_dtype, const void *dst, fck_dtype dst_dtype) {
    if (!fck_castable(src_dtype, dst_dtype)) {
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
    job.src_size = job.dst_size = 1;
    return job;
}

line_job cast_job(const void *src, fck_dtype src_dtype, void *dst, fck_dtype dst_dtype,
                  int64_t numel, int64_t chunk) {
    line_job job = move_job(src, dst, numel, chunk);
    job.src_dtype = static_cast<int8_t>(src_dtype);
    job.dst_dtype = static_cast<int8_t>(dst_dtype);
    job.src_size = static_cast<int8_t>(fck_float_size(src_dtype));
    job.dst_size = static_cast<int8_t>(fck_float_size(dst_dtype));
    return job;
}

const char *cuda_pack(const fck_segment *segments, size_t count, void *stream) {
    for (size_t i = 0; i < count; i++) {
        const fck_segment &s = segments[i];
        if (const char *why = refusal(s.src, s.src_dtype, s.dst, s.dst_dtype)) {
            return why;
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

const char *cuda_unpack(const void *rows, int64_t row_bytes, int64_t world,
                        const fck_column *columns, size_t count, void *stream) {
    launcher queue(world, row_bytes, true, stream);
    for (size_t i = 0; i < count; i++) {
        const fck_column &c = columns[i];
        const unsigned char *src = static_cast<const unsigned char *>(rows) + c.offset;
        const line_job job = move_job(src, c.dst, world * c.bytes, c.bytes);
        if (const char *failure = queue.add(job, c.blocks)) {
            return failure;
        }
    }
    return queue.flush();
}

line_job gradient_job(const fck_gradient &g, unsigned char *dst, fck_dtype dst_dtype) {
    const int64_t size = fck_target_size(&g, dst_dtype);
    unsigned char *slots = dst + g.offset * size;
    if (g.src_dtype == dst_dtype) {
        return move_job(g.src, slots, g.numel * size, g.chunk * size);
    }
    return cast_job(g.src, g.src_dtype, slots, dst_dtype, g.numel, g.chunk);
}

const char *cuda_pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                                void *dst, int64_t row_numel, fck_dtype dst_dtype, void *stream) {
    for (size_t i = 0; i < count; i++) {
        const fck_gradient &g = gradients[i];
        if (const char *why = refusal(g.src, g.src_dtype, dst, dst_dtype)) {
            return why;
        }
    }
    /* The row's element, which is the same for each gradient. */
    const int64_t size = count > 0 ? fck_target_size(&gradients[0], dst_dtype) : 0;
    launcher queue(world, row_numel * size, false, stream);
    for (size_t i = 0; i < count; i++) {
        const fck_gradient &g = gradients[i];
        const line_job job = gradient_job(g, static_cast<unsigned char *>(dst), dst_dtype);
        if (const char *failure = queue.add(job, g.blocks)) {
            return failure;
        }
    }
    return queue.flush();
}

} // namespace

const fck_backend *fck_cuda(void) {
    static const fck_backend cuda = {"cuda", cuda_pack, cuda_unpack, cuda_pack_gradients};
    return &cuda;
}

int fck_cuda_built(void) {
    return 1;
}
