/* The CUDA kernels, compiled by NVRTC. Owns the addresses of the compiled functions. fck_jit() sets
 * the addresses before the first launch, and all threads read them. */
#include "kernels_jit.h"

#include <atomic>
#include <cassert>

#include "launcher.cuh"

static std::atomic<fck_launch> cu_launch_kernel;
static std::atomic<void *> move_lines;
static std::atomic<void *> cast_lines;
static std::atomic<void *> move_many_lines; /* null: not compiled */
static std::atomic<void *> cast_many_lines; /* null: not compiled */
static std::atomic<void *> add_checksums;
static std::atomic<fck_capture_query> cu_stream_is_capturing;
static std::atomic<fck_bind> cu_ctx_set_current;
static std::atomic<void *> primary_context;

constexpr int INVALID_CONTEXT = 201; /* CUDA_ERROR_INVALID_CONTEXT: the thread has no context */

/* Calls a function of the driver. If the thread has no context, binds one and repeats the call. */
template <class Call> static int call_with_context(Call call) {
    const int failed = call();
    const fck_bind bind = cu_ctx_set_current.load();
    const bool repeats =
        failed == INVALID_CONTEXT && bind != nullptr && bind(primary_context.load()) == 0;
    return repeats ? call() : failed;
}

/* Launches a kernel. Returns an error message, or NULL. */
static const char *launch(void *function, void *batch, uint32_t blocks, void *stream) {
    void *arguments[] = {batch};
    const int failed = call_with_context([&] {
        return cu_launch_kernel.load()(function, blocks, 1, 1, fck::THREADS, 1, 1, 0, stream,
                                       arguments, nullptr);
    });
    return failed == 0 ? nullptr : "the driver rejected a launch of kernels made by NVRTC";
}

static const char *fck::launch_lines(line_batch &batch, bool casts, void *stream) {
    return launch(casts ? cast_lines.load() : move_lines.load(), &batch, batch.tiles, stream);
}

static const char *fck::launch_lines(large_line_batch &batch, bool casts, void *stream) {
    void *kernel = casts ? cast_many_lines.load() : move_many_lines.load();
    return kernel == nullptr ? "NVRTC has made no kernels with large arguments"
                             : launch(kernel, &batch, batch.tiles, stream);
}

static const char *fck::launch_checksums(checksum_batch &batch, void *stream) {
    return launch(add_checksums.load(), &batch, batch.blocks, stream);
}

static int fck::is_capturing(void *stream) {
    int status = 0;
    const int failed =
        call_with_context([&] { return cu_stream_is_capturing.load()(stream, &status); });
    return failed != 0 || status != 0;
}

const fck_backend *fck_jit(const fck_jit_functions *functions) {
    assert(functions->launch != nullptr && functions->moves != nullptr &&
           functions->casts != nullptr && functions->checksums != nullptr &&
           functions->capture != nullptr);
    static const fck_backend jit = {
        "nvrtc",           fck::gpu_pack, fck::gpu_unpack,        fck::gpu_pack_gradients,
        fck::gpu_can_cast, nullptr,       fck::gpu_add_checksums, fck::is_capturing};
    cu_launch_kernel = functions->launch;
    move_lines = functions->moves;
    cast_lines = functions->casts;
    move_many_lines = functions->many_moves;
    cast_many_lines = functions->many_casts;
    fck::large_rejected = false;
    fck::small_launched[0] = fck::small_launched[1] = false;
    add_checksums = functions->checksums;
    cu_stream_is_capturing = functions->capture;
    primary_context = functions->context;
    cu_ctx_set_current = functions->bind;
    return &jit;
}
