/* The CUDA kernels, compiled by NVRTC. Owns the addresses of the compiled functions. fck_jit() sets
 * the addresses before the first launch, and all threads read them. */
#include "kernels_jit.h"

#include <atomic>
#include <cassert>

#include "launcher.cuh"

static std::atomic<fck_launch> cu_launch_kernel;
static std::atomic<void *> move_lines;
static std::atomic<void *> cast_lines;

static const char *fck::launch_lines(line_batch &batch, bool casts, void *stream) {
    void *arguments[] = {&batch};
    void *function = casts ? cast_lines.load() : move_lines.load();
    const int failed = cu_launch_kernel.load()(function, batch.tiles, 1, 1, THREADS, 1, 1, 0,
                                               stream, arguments, nullptr);
    return failed == 0 ? nullptr : "the driver did not take a launch of kernels made by NVRTC";
}

const fck_backend *fck_jit(fck_launch launch, void *moves, void *casts) {
    assert(launch != nullptr && moves != nullptr && casts != nullptr);
    static const fck_backend jit = {"nvrtc", fck::gpu_pack, fck::gpu_unpack,
                                    fck::gpu_pack_gradients, fck::gpu_can_cast};
    cu_launch_kernel = launch;
    move_lines = moves;
    cast_lines = casts;
    return &jit;
}
