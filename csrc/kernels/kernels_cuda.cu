/* The CUDA kernels, compiled by nvcc. They use raw pointers and a stream, and no torch header. Work
 * is queued on the caller's stream of the caller's current device. Nothing is allocated and nothing
 * is synchronized. lines.cuh holds the device code, launcher.cuh the code that turns descriptors
 * into launches. */
#include <cuda_runtime.h>

#include "checksums.cuh"
#include "launcher.cuh"
#include "lines.cuh"

#include <string>

/* Launches `blocks` blocks of a kernel. */
template <class Batch>
static const char *launch(void (*kernel)(Batch), Batch &batch, uint32_t blocks, void *stream) {
    void *arguments[] = {&batch};
    /* Reads a pending error without clearing it, because the caller of the failed CUDA call must
     * report that error. */
    const cudaError_t earlier = cudaPeekAtLastError();
    const cudaError_t launched = cudaLaunchKernel(kernel, dim3(blocks), dim3(fck::THREADS),
                                                  arguments, 0, static_cast<cudaStream_t>(stream));
    if (launched == cudaSuccess) {
        return nullptr;
    }
    thread_local std::string failure;
    failure = launched == earlier ? "an operation before it has failed: " : "";
    failure += cudaGetErrorString(launched);
    if (launched != earlier) {
        cudaGetLastError(); /* clears the error, so that torch does not report it again */
    }
    return failure.c_str();
}

static const char *fck::launch_lines(line_batch &batch, bool casts, void *stream) {
    return launch(casts ? fck_cast_lines : fck_move_lines, batch, batch.tiles, stream);
}

static const char *fck::launch_lines(large_line_batch &batch, bool casts, void *stream) {
#ifdef FCK_LARGE_ARGUMENTS
    return launch(casts ? fck_cast_many_lines : fck_move_many_lines, batch, batch.tiles, stream);
#else
    return "this compiler makes no kernels with large arguments";
#endif
}

static const char *fck::launch_checksums(checksum_batch &batch, void *stream) {
    return launch(fck_add_checksums, batch, batch.blocks, stream);
}

/* The error of a failed query is cleared, but not an earlier one. */
static int fck::is_capturing(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t earlier = cudaPeekAtLastError();
    const cudaError_t failed = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
    if (failed != cudaSuccess) {
        if (failed != earlier) {
            cudaGetLastError();
        }
        return 1;
    }
    return status != cudaStreamCaptureStatusNone;
}

const fck_backend *fck_cuda(void) {
    static const fck_backend cuda = {"cuda",
                                     fck::gpu_pack,
                                     fck::gpu_unpack,
                                     fck::gpu_pack_gradients,
                                     fck::gpu_can_cast,
                                     nullptr,
                                     fck::gpu_add_checksums,
                                     fck::is_capturing};
    return &cuda;
}

int fck_cuda_built(void) {
    return 1;
}
