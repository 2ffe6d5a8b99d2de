/* The part of the CUDA runtime that csrc/kernels/kernels_cuda.cu needs to compile as ordinary C++.
 * It runs the kernels on the CPU, one thread of the grid after the other, under the sanitizers:
 *
 *     g++ -std=c++17 -x c++ -Wno-unknown-pragmas -Itests/c/fake_cuda \
 *         -fsanitize=address,undefined -c csrc/kernels/kernels_cuda.cu
 *
 * The tests of the kernels (CUDA_TESTS in the Makefile) are built with -DFCK_TEST_CUDA_ON_HOST and
 * linked with the result. They check the CUDA kernels against the specification of the CPU's: grid,
 * tiles, alignment cases, batches, padding. The kernels neither share memory nor synchronize, so
 * threads may run in order. Not covered: rounding instructions of a GPU, streams, and misaligned
 * vector accesses that UBSan does not detect. */
#ifndef FSDP_C_TESTS_FAKE_CUDA_RUNTIME_H
#define FSDP_C_TESTS_FAKE_CUDA_RUNTIME_H

#include <cstddef>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

struct dim3 {
    unsigned int x, y, z;
    explicit dim3(unsigned int width = 1) : x(width), y(1), z(1) {}
};

typedef void *cudaStream_t;
typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorLaunchFailure = 719
} cudaError_t;

typedef enum {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1
} cudaStreamCaptureStatus;

/* Test controls: an asynchronous error of an earlier operation, which every later call returns;
 * whether all launches are rejected, or those with more than 4 KB of arguments; whether streams
 * capture; the number of launches, and of calls of cudaGetLastError(), which clears errors. */
extern "C" {
inline int fake_cuda_earlier_error = cudaSuccess;
inline int fake_cuda_rejects_launches = 0;
inline int fake_cuda_rejects_large = 0;
inline int fake_cuda_captures = 0;
inline int fake_cuda_launches = 0;
inline int fake_cuda_errors_read = 0;
}

static dim3 blockIdx;
static dim3 threadIdx;

/* Rejects an empty or oversized grid, as the driver does. */
template <class Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments), dim3 grid, dim3 block, void **arguments,
                             size_t, cudaStream_t) {
    if (fake_cuda_earlier_error != cudaSuccess) {
        return static_cast<cudaError_t>(fake_cuda_earlier_error);
    }
    if (fake_cuda_rejects_launches != 0 || grid.x == 0 || grid.x > 0x7fffffffu || block.x == 0 ||
        block.x > 1024 || sizeof(Arguments) > (fake_cuda_rejects_large != 0 ? 4096 : 32764)) {
        return cudaErrorInvalidConfiguration;
    }
    fake_cuda_launches++;
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++) {
            kernel(*static_cast<Arguments *>(arguments[0]));
        }
    }
    return cudaSuccess;
}

static inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = fake_cuda_captures != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return static_cast<cudaError_t>(fake_cuda_earlier_error);
}

static inline cudaError_t cudaGetLastError() {
    fake_cuda_errors_read++;
    return static_cast<cudaError_t>(fake_cuda_earlier_error);
}

static inline cudaError_t cudaPeekAtLastError() {
    return static_cast<cudaError_t>(fake_cuda_earlier_error);
}

static inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorLaunchFailure ? "unspecified launch failure"
                                           : "invalid configuration argument";
}

#endif
