/* The CUDA kernels, compiled by NVRTC. Owns the addresses of the compiled functions. fck_jit() sets
 * the addresses before the first launch, and all threads read them. */
#include "kernels_jit.h"

#include <atomic>
#include <cassert>

#include "launcher.cuh"

static std::atomic<fck_launch> cu_launch_kernel;
static std::atomic<void *> move_lines;
static std::atomic<void *> cast_lines;
static std::atomic<fck_bind> cu_ctx_set_current;
static std::atomic<void *> primary_context;

constexpr int INVALID_CONTEXT = 201; /* CUDA_ERROR_INVALID_CONTEXT: the thread has no context */

static const char *fck::launch_lines(line_batch &batch, bool casts, void *stream) {
    void *arguments[] = {&batch};
    void *function = casts ? cast_lines.load() : move_lines.load();
    const auto launch = [&] {
        return cu_launch_kernel.load()(function, batch.tiles, 1, 1, THREADS, 1, 1, 0, stream,
                                       arguments, nullptr);
    };
    int failed = launch();
    const fck_bind bind = cu_ctx_set_current.load();
    if (failed == INVALID_CONTEXT && bind != nullptr && bind(primary_context.load()) == 0) {
        failed = launch();
    }
    return failed == 0 ? nullptr : "the driver rejected a launch of kernels made by NVRTC";
}

const fck_backend *fck_jit(const fck_jit_functions *functions) {
    assert(functions->launch != nullptr && functions->moves != nullptr &&
           functions->casts != nullptr);
    static const fck_backend jit = {"nvrtc",           fck::gpu_pack,
                                    fck::gpu_unpack,   fck::gpu_pack_gradients,
                                    fck::gpu_can_cast, nullptr};
    cu_launch_kernel = functions->launch;
    move_lines = functions->moves;
    cast_lines = functions->casts;
    primary_context = functions->context;
    cu_ctx_set_current = functions->bind;
    return &jit;
}
