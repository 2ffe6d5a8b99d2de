/* The device side of the GPU kernels. One thread block works on one tile (index.h). The block finds
 * its job by binary search over the first tiles of the jobs.
 *
 * Moves count bytes, so they support any type and any address. The addresses modulo 16 and the
 * length select the size of the accesses (move_bytes). Conversions require element-aligned
 * addresses, which the host side has checked. They use 16-byte accesses if both addresses allow it.
 *
 * nvcc compiles this file as a part of kernels_cuda.cu. NVRTC compiles this file with rtc.cuh. */
#ifndef FSDP_C_KERNELS_LINES_CUH
#define FSDP_C_KERNELS_LINES_CUH

#include "batch.cuh"
#include "cast.h"

namespace fck {

constexpr int UNROLL = 4; /* independent 16-byte loads in flight per thread */
/* move_shifted() moves up to 46 bytes of a run one by one. A shorter run has too few threads for
 * them, and moves in words of at most 8 bytes. */
constexpr int SHIFTED_BYTES = 512;

/* ---- element types ---- */

struct half_bits {
    uint16_t bits;
};

struct bfloat16_bits {
    uint16_t bits;
};

/* widen() converts to the intermediate type: double for double, else float. narrow() converts from
 * the intermediate type to the target. The 16-bit types always go through float, as in torch. */
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

/* ---- operations of a team of threads on one run of items ----
 *
 * All threads of a team call each function; a thread is number `lane` of `lanes`. A run lies within
 * one tile, so its counts fit an int. */

struct team {
    int lane;
    int lanes;
};

template <class T, int N> struct alignas(sizeof(T) * N) pack_of {
    T item[N];
};

__device__ inline int min_int(int a, int b) {
    return a < b ? a : b;
}

__device__ inline uintptr_t address(const void *pointer) {
    return reinterpret_cast<uintptr_t>(pointer);
}

/* Calls store(i, load(i)) for each i in [0, count). A thread loads UNROLL units before it stores
 * any. At the end it loads the last unit again in place of missing units. Single loads there would
 * wait for each other. */
template <class Load, class Store>
__device__ inline void for_units(int count, team t, Load load, Store store) {
    for (int first = t.lane; first < count; first += UNROLL * t.lanes) {
        decltype(load(0)) unit[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            unit[k] = load(min_int(first + k * t.lanes, count - 1));
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (first + k * t.lanes < count) {
                store(first + k * t.lanes, unit[k]);
            }
        }
    }
}

/* Moves the bytes outside of [head, tail). */
__device__ inline void move_ends(const unsigned char *src, unsigned char *dst, int head, int tail,
                                 int bytes, team t) {
    const auto position = [=](int i) { return i < head ? i : i - head + tail; };
    for_units(
        head + bytes - tail, t, [=](int i) { return src[position(i)]; },
        [=](int i, unsigned char byte) { dst[position(i)] = byte; });
}

/* Moves the body in words of W and the two ends in bytes. Precondition: both addresses are equal
 * modulo sizeof(W). */
template <class W>
__device__ inline void move_words(const unsigned char *src, unsigned char *dst, int bytes, team t) {
    constexpr int size = sizeof(W);
    const int head = min_int(static_cast<int>(-address(dst) & (size - 1)), bytes);
    const int words = (bytes - head) / size;
    const W *from = reinterpret_cast<const W *>(src + head);
    W *to = reinterpret_cast<W *>(dst + head);
    for_units(
        words, t, [=](int i) { return from[i]; }, [=](int i, const W &word) { to[i] = word; });
    move_ends(src, dst, head, head + words * size, bytes, t);
}

using quad = pack_of<uint32_t, 4>;

struct quad_pair {
    quad low;
    quad high;
};

/* Returns the 16 bytes of `pair` from byte `offset` on. 0 <= offset < 16. */
__device__ inline quad extract_quad(const quad_pair &pair, int offset) {
    uint32_t part[8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        part[k] = pair.low.item[k];
        part[k + 4] = pair.high.item[k];
    }
#pragma unroll
    for (int k = 0; k < 6; k++) {
        part[k] = (offset & 8) != 0 ? part[k + 2] : part[k];
    }
#pragma unroll
    for (int k = 0; k < 5; k++) {
        part[k] = (offset & 4) != 0 ? part[k + 1] : part[k];
    }
    quad result;
#pragma unroll
    for (int k = 0; k < 4; k++) { /* one funnel shift each */
        const uint64_t both = static_cast<uint64_t>(part[k + 1]) << 32 | part[k];
        result.item[k] = static_cast<uint32_t>(both >> (offset % 4 * 8));
    }
    return result;
}

/* Moves the body in aligned 16-byte words, each from the two aligned words of the source that
 * contain it. The second load of a word hits the L1 cache. All loads are within [src, src + bytes).
 * Preconditions: the addresses differ modulo 16, and bytes >= SHIFTED_BYTES. */
__device__ inline void move_shifted(const unsigned char *src, unsigned char *dst, int bytes,
                                    team t) {
    const int offset = static_cast<int>((address(src) - address(dst)) & 15);
    int head = static_cast<int>(-address(dst) & 15);
    head += head < offset ? 16 : 0; /* the first load begins at src + head - offset */
    const int words = (bytes - head + offset) / 16 - 1;
    const quad *from = reinterpret_cast<const quad *>(src + head - offset);
    quad *to = reinterpret_cast<quad *>(dst + head);
    for_units(
        words, t, [=](int i) { return quad_pair{from[i], from[i + 1]}; },
        [=](int i, const quad_pair &pair) { to[i] = extract_quad(pair, offset); });
    move_ends(src, dst, head, head + words * 16, bytes, t);
}

__device__ inline void move_bytes(const unsigned char *src, unsigned char *dst, int bytes, team t) {
    const uintptr_t differing_bits = address(src) ^ address(dst);
    if ((differing_bits & 15) == 0) {
        move_words<quad>(src, dst, bytes, t);
    } else if ((differing_bits & 7) == 0) {
        move_words<pack_of<uint32_t, 2>>(src, dst, bytes, t); /* on an H100 faster than shifted */
    } else if (bytes >= SHIFTED_BYTES) {
        move_shifted(src, dst, bytes, t);
    } else if ((differing_bits & 3) == 0) {
        move_words<uint32_t>(src, dst, bytes, t);
    } else if ((differing_bits & 1) == 0) {
        move_words<uint16_t>(src, dst, bytes, t);
    } else {
        move_words<unsigned char>(src, dst, bytes, t);
    }
}

__device__ inline void zero_bytes(unsigned char *dst, int bytes, team t) {
    using word = pack_of<uint32_t, 4>;
    const int head = min_int(static_cast<int>(-address(dst) & 15), bytes);
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

template <class S, class D, int N>
__device__ inline pack_of<D, N> convert_pack(const pack_of<S, N> &in) {
    pack_of<D, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        out.item[k] = convert_item<S, D>(in.item[k]);
    }
    return out;
}

template <class S, class D, class Convert>
__device__ inline void convert_units(const S *src, D *dst, int count, team t, Convert convert) {
    for_units(
        count, t, [=](int i) { return src[i]; },
        [=](int i, const S &unit) { dst[i] = convert(unit); });
}

/* Converts N items at a time (16 bytes of the wider type) if one head length aligns both addresses,
 * else item by item. */
template <class S, class D>
__device__ inline void cast_items(const void *from, void *to, int count, team t) {
    constexpr int N = 16 / (sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D));
    using source = pack_of<S, N>;
    using target = pack_of<D, N>;
    const S *src = static_cast<const S *>(from);
    D *dst = static_cast<D *>(to);
    int head = min_int(static_cast<int>((-address(dst) & (sizeof(target) - 1)) / sizeof(D)), count);
    int packs = (count - head) / N;
    if ((address(src + head) & (sizeof(source) - 1)) != 0) {
        head = count;
        packs = 0;
    }
    const int tail = head + packs * N;
    convert_units(src, dst, head, t, convert_item<S, D>);
    convert_units(reinterpret_cast<const source *>(src + head),
                  reinterpret_cast<target *>(dst + head), packs, t, convert_pack<S, D, N>);
    convert_units(src + tail, dst + tail, count - tail, t, convert_item<S, D>);
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

/* ---- the kernels ---- */

/* The lines of a tile are distributed over teams of threads. CASTS is false for batches that
 * contain moves only. The kernel for such batches does not need the registers of the conversions.
 */
template <bool CASTS, class Batch> __device__ inline void copy_lines(const Batch &batch) {
    const int32_t job_index = fck_find_job(batch.first, batch.count, blockIdx.x);
    const line_job &job = batch.job[job_index];
    const int src_shift = CASTS ? job.src_shift : 0;
    const int dst_shift = CASTS ? job.dst_shift : 0;
    const fck_tile tile = fck_tile_at(job.cut, job.chunk, tile_items(src_shift, dst_shift),
                                      job.lines, blockIdx.x - batch.first[job_index]);
    const uint32_t thread = threadIdx.x;
    const int lanes = 1 << job.cut.team_bits;
    const team t = {static_cast<int>(thread) & (lanes - 1), lanes};

    for (uint32_t line = tile.first_line + (thread >> job.cut.team_bits); line < tile.end_line;
         line += THREADS >> job.cut.team_bits) {
        const uint32_t block = line / batch.world;
        const int64_t rank = line - block * batch.world;
        const int64_t in_blocks = block * job.numel + rank * job.chunk + tile.begin;
        const int64_t in_rank_shard = block * job.chunk + tile.begin;
        const int64_t filled = fck_rank_filled(job.numel, job.chunk, rank);
        const int count = static_cast<int>(fck_max(fck_min(filled, tile.end) - tile.begin, 0));
        const int items = static_cast<int>(tile.end - tile.begin);
        unsigned char *dst =
            job.dst + (batch.from_rank_shards ? in_blocks << dst_shift
                                              : rank * batch.pitch + (in_rank_shard << dst_shift));
        if (count > 0) {
            const unsigned char *src =
                job.src + (batch.from_rank_shards
                               ? rank * batch.pitch + (in_rank_shard << src_shift)
                               : in_blocks << src_shift);
            if (!CASTS || job.src_dtype == job.dst_dtype) {
                move_bytes(src, dst, count, t);
            } else {
                cast_run(src, job.src_dtype, dst, job.dst_dtype, count, t);
            }
        }
        if (count < items) {
            zero_bytes(dst + (count << dst_shift), (items - count) << dst_shift, t);
        }
    }
}

} // namespace fck

extern "C" __global__ void __launch_bounds__(fck::THREADS, fck::BLOCKS)
    fck_move_lines(const __grid_constant__ fck::line_batch batch) {
    fck::copy_lines<false>(batch);
}

extern "C" __global__ void __launch_bounds__(fck::THREADS, fck::BLOCKS)
    fck_cast_lines(const __grid_constant__ fck::line_batch batch) {
    fck::copy_lines<true>(batch);
}

#ifdef FCK_LARGE_ARGUMENTS
extern "C" __global__ void __launch_bounds__(fck::THREADS, fck::BLOCKS)
    fck_move_many_lines(const __grid_constant__ fck::large_line_batch batch) {
    fck::copy_lines<false>(batch);
}

extern "C" __global__ void __launch_bounds__(fck::THREADS, fck::BLOCKS)
    fck_cast_many_lines(const __grid_constant__ fck::large_line_batch batch) {
    fck::copy_lines<true>(batch);
}
#endif

#endif
