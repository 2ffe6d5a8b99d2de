/* Substitute of libcuda: contexts, and the launches of kernels that NVRTC compiled. A thread must
 * have a current context: a call of the runtime that uses the device binds the primary context.
 * fsdp_c's kernels declare their accesses by their descriptors. */
#include <cuda.h>

#include <cstring>
#include <string>
#include <utility>

#include "kernels/batch.cuh"
#include "kernels_on_host.h"
#include "sim.h"

namespace {

struct Kernel {
    std::string name;
};

/* Returns the kernel of this name, which lives until the process ends. */
Kernel *kernel_of(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    static auto *const kernels = new std::map<std::string, Kernel>;
    Kernel &kernel = (*kernels)[name];
    kernel.name = name;
    return &kernel;
}

/* Declares the accesses of one job: blocks are contiguous, rank shards are `pitch` bytes apart. */
template <class Batch>
void access_job(const sim::Operation &by, const Batch &batch, const fck::line_job &job) {
    const int64_t blocks = job.lines / batch.world;
    const bool from_rank_shards = batch.from_rank_shards;
    const int64_t shard_size = int64_t{1} << (from_rank_shards ? job.src_shift : job.dst_shift);
    const int64_t block_size = int64_t{1} << (from_rank_shards ? job.dst_shift : job.src_shift);
    const unsigned char *const block_data = from_rank_shards ? job.dst : job.src;
    const unsigned char *const shard_data = from_rank_shards ? job.src : job.dst;
    for (uint32_t r = 0; r < batch.world; r++) {
        sim::access(by, shard_data + r * batch.pitch,
                    static_cast<size_t>(blocks * job.chunk * shard_size), !from_rank_shards);
    }
    sim::access(by, block_data, static_cast<size_t>(blocks * job.numel * block_size),
                from_rank_shards);
}

/* Declares the accesses of a launch of copies, and submits its work. */
template <class Batch> void submit_lines(const sim::Operation &by, const Batch &batch, bool casts) {
    for (int32_t i = 0; sim::device().settings.checks != 0 && i < batch.count; i++) {
        access_job(by, batch, batch.job[i]);
    }
    if (sim::executes()) {
        sim::submit(by, [batch, casts] {
            sim::run_lines(batch, casts);
            return true;
        });
    }
}

/* The same for fck_add_checksums. */
void submit_checksums(const sim::Operation &by, const fck::checksum_batch &batch) {
    for (uint32_t i = 0; i < batch.count; i++) {
        sim::access(by, batch.range[i].data, static_cast<size_t>(batch.range[i].bytes), false);
    }
    sim::access(by, batch.sum, sizeof *batch.sum, true);
    if (sim::executes()) {
        sim::submit(by, [batch] {
            sim::run_checksums(batch);
            return true;
        });
    }
}

int launch(CUfunction function, CUstream stream, void **arguments) {
    const auto *const kernel = reinterpret_cast<const Kernel *>(function);
    if (!sim::thread().bound) {
        sim::count("launch without context");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (sim::is_due(sim::device().settings.fail_launch)) {
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    const bool own = kernel->name.rfind("fck_", 0) == 0;
    sim::Operation by;
    /* on_launch declares the accesses of torch's operators; own kernels declare theirs below. */
    auto *const observer =
        std::exchange(sim::device().on_launch, own ? nullptr : sim::device().on_launch);
    const int error = sim::launch(sim::stream_of(stream), kernel->name.c_str(), &by);
    sim::device().on_launch = observer;
    if (error != 0) {
        return error;
    }
    if (own) {
        sim::count("launch of fsdp_c");
        if (kernel->name == "fck_add_checksums") {
            submit_checksums(by, *static_cast<const fck::checksum_batch *>(arguments[0]));
        } else if (kernel->name == "fck_move_many_lines" || kernel->name == "fck_cast_many_lines") {
            submit_lines(by, *static_cast<const fck::large_line_batch *>(arguments[0]),
                         kernel->name == "fck_cast_many_lines");
        } else {
            submit_lines(by, *static_cast<const fck::line_batch *>(arguments[0]),
                         kernel->name == "fck_cast_lines");
        }
    }
    return CUDA_SUCCESS;
}

CUcontext primary() {
    static int context;
    return reinterpret_cast<CUcontext>(&context);
}

} // namespace

extern "C" {

CUresult cuInit(unsigned) {
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = sim::thread().bound ? primary() : nullptr;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    sim::thread().bound = context != nullptr;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
    *context = primary();
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *, void **, unsigned,
                           CUlibraryOption *, void **, unsigned) {
    static int loaded;
    if (std::memcmp(code, "\177ELF", 4) != 0) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *library = reinterpret_cast<CUlibrary>(&loaded);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *name) {
    *kernel = reinterpret_cast<CUkernel>(kernel_of(name));
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = sim::stream_of(stream).capture != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                        : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *) {
    static int loaded;
    *module = reinterpret_cast<CUmodule>(&loaded);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
    *function = reinterpret_cast<CUfunction>(kernel_of(name));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char **text) {
    *text = "error of the simulated driver";
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute, CUdeviceptr) {
    *static_cast<unsigned *>(data) = 0;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void **arguments, void **) {
    return static_cast<CUresult>(launch(function, stream, arguments));
}
}
