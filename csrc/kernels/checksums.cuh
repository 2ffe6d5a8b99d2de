/* Checksums of device memory: the device side. A checksum is a sum over all 64-bit words of memory,
 * each combined with its position. So it does not depend on the order in which threads add words.
 * For each position the combination is a bijection: a word that changes changes the checksum.
 *
 * nvcc compiles this file as a part of kernels_cuda.cu. NVRTC compiles this file with rtc.cuh. */
#ifndef FSDP_C_KERNELS_CHECKSUMS_CUH
#define FSDP_C_KERNELS_CHECKSUMS_CUH

#include "batch.cuh"

namespace fck {

__device__ inline uint64_t checksum_word(uint64_t word, int64_t position) {
    uint64_t hash = word + static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
    return hash ^ hash >> 32;
}

/* Returns the word at the end of a range whose size is not a multiple of WORD_BYTES. */
__device__ inline uint64_t last_word(const fck_range &range) {
    const auto *data = static_cast<const unsigned char *>(range.data);
    uint64_t word = 0;
    for (int64_t i = range.bytes - range.bytes % WORD_BYTES; i < range.bytes; i++) {
        word |= static_cast<uint64_t>(data[i]) << (i % WORD_BYTES * 8);
    }
    return word;
}

/* Returns the part of a range's checksum that thread `thread` of `threads` adds. */
__device__ inline uint64_t checksum_part(const fck_range &range, int64_t thread, int64_t threads) {
    const auto *words = static_cast<const uint64_t *>(range.data);
    const int64_t count = range.bytes / WORD_BYTES;
    uint64_t sum = 0;
#pragma unroll 4
    for (int64_t i = thread; i < count; i += threads) {
        sum += checksum_word(words[i], i);
    }
    if (thread == 0 && range.bytes % WORD_BYTES != 0) {
        sum += checksum_word(last_word(range), count);
    }
    return sum * range.factor;
}

/* On a GPU one thread of each warp adds. In tests a processor runs one thread after the other. */
__device__ inline void add_to_sum(uint64_t *target, uint64_t sum) {
#ifdef __CUDA_ARCH__
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, distance);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(reinterpret_cast<unsigned long long *>(target), sum);
    }
#else
    *target += sum;
#endif
}

} // namespace fck

extern "C" __global__ void __launch_bounds__(fck::THREADS, fck::BLOCKS)
    fck_add_checksums(const __grid_constant__ fck::checksum_batch batch) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * fck::THREADS + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(batch.blocks) * fck::THREADS;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < batch.count; i++) {
        sum += fck::checksum_part(batch.range[i], thread, threads);
    }
    fck::add_to_sum(batch.sum, sum);
}

#endif
