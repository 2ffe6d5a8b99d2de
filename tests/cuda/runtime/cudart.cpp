/* Substitute of libcudart: the functions of the CUDA runtime that torch calls in a training step.
 * All other functions are generated and return cudaErrorNotSupported (workers/stub_build.py). */
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "cudart.h"

#undef cudaGetDeviceProperties
using sim::Kind;
using sim::Operation;

namespace {

std::unordered_map<const void *, const char *> &kernel_names() {
    static auto *const names = new std::unordered_map<const void *, const char *>;
    return *names;
}

cudaError_t launch_kernel(const void *function, const void *stream) {
    const auto found = kernel_names().find(function);
    const char *const name = found != kernel_names().end() ? found->second : "kernel";
    Operation by;
    const int error =
        sim::is_due(sim::device().settings.fail_operator) ? cudaErrorLaunchOutOfResources : 0;
    return done(error != 0 ? error : sim::launch(sim::stream_of(stream), name, &by));
}

cudaError_t new_event(cudaEvent_t *event) {
    sim::count("event create");
    *event = reinterpret_cast<cudaEvent_t>(sim::new_event());
    return cudaSuccess;
}

} // namespace

extern "C" {

/* ---- device ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *number) {
    *number = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    sim::count("set device");
    sim::thread().bound = true;
    return done(number == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

static cudaError_t get_properties(cudaDeviceProp *p) {
    *p = {};
    std::strcpy(p->name, "simulated CUDA device");
    p->totalGlobalMem = static_cast<size_t>(sim::device().settings.memory_mib) << 20;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 50 << 20;
    p->textureAlignment = 512;
    p->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) { /* CUDA 13 */
    return get_properties(p);
}

cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *p, int) { /* CUDA 12 */
    return get_properties(p);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    cudaDeviceProp p;
    get_properties(&p);
    const std::unordered_map<int, int> values = {
        {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
        {cudaDevAttrComputeCapabilityMajor, p.major},
        {cudaDevAttrComputeCapabilityMinor, p.minor},
        {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
        {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
        {cudaDevAttrWarpSize, p.warpSize},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(p.sharedMemPerBlockOptin)},
    };
    const auto found = values.find(attribute);
    *value = found != values.end() ? found->second : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int) {
    std::strncpy(text, "0000:00:00.0", static_cast<size_t>(length));
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    return done(sim::synchronize_all());
}

cudaError_t cudaGetLastError() {
    return static_cast<cudaError_t>(std::exchange(sim::thread().last_error, 0));
}

cudaError_t cudaPeekAtLastError() {
    return static_cast<cudaError_t>(sim::thread().last_error);
}

const char *cudaGetErrorName(cudaError_t error) {
    static thread_local std::string text;
    text = "cudaError " + std::to_string(error);
    return text.c_str();
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **address, size_t bytes) {
    sim::thread().bound = true;
    if (const int error = sim::check_unsafe_call("cudaMalloc")) {
        return done(error);
    }
    *address = sim::allocate(bytes, Kind::kDevice);
    return done(*address != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address) {
    if (const int error = sim::check_unsafe_call("cudaFree")) {
        return done(error);
    }
    return done(sim::release(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
    if (const int error = sim::check_unsafe_call("cudaHostAlloc")) {
        return done(error);
    }
    *address = sim::allocate(bytes, Kind::kPinned);
    return done(*address != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **address, size_t bytes) {
    return cudaHostAlloc(address, bytes, 0);
}

cudaError_t cudaFreeHost(void *address) {
    if (const int error = sim::check_unsafe_call("cudaFreeHost")) {
        return done(error);
    }
    return done(sim::release(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *, size_t, unsigned) {
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *) {
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    sim::thread().bound = true;
    *total = static_cast<size_t>(sim::device().settings.memory_mib) << 20;
    *free = *total - sim::device().used;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    *attributes = {};
    switch (sim::kind_of(address)) {
    case Kind::kDevice:
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = const_cast<void *>(address);
        break;
    case Kind::kPinned:
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = attributes->devicePointer = const_cast<void *>(address);
        break;
    case Kind::kNone:
        attributes->type = cudaMemoryTypeUnregistered;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    Operation by;
    sim::count("memcpy");
    const int error = sim::begin(sim::stream_of(stream), "memcpy", &by);
    if (error == 0) {
        sim::copy(by, dst, src, bytes);
    }
    return done(error);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t error = cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
    return error != cudaSuccess ? error : done(sim::synchronize(sim::stream_of(nullptr)));
}

cudaError_t cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t stream) {
    Operation by;
    sim::count("memset");
    const int error = sim::begin(sim::stream_of(stream), "memset", &by);
    if (error == 0) {
        sim::access(by, data, bytes, true);
        if (sim::executes()) {
            sim::submit(by, [=] {
                std::memset(data, value, bytes);
                return true;
            });
        } else if (sim::device().settings.copies != 0 &&
                   sim::stream_of(stream).capture == nullptr) {
            std::memset(data, value, bytes);
        }
    }
    return done(error);
}

cudaError_t cudaMemset(void *data, int value, size_t bytes) {
    if (const int error = sim::check_unsafe_call("cudaMemset")) {
        return done(error);
    }
    return cudaMemsetAsync(data, value, bytes, nullptr);
}

cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *) {
    static char symbols[1 << 16];
    *address = symbols;
    return cudaSuccess;
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    const bool blocking = (flags & cudaStreamNonBlocking) == 0;
    *stream = reinterpret_cast<cudaStream_t>(sim::new_stream(priority, blocking));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = sim::stream_of(stream).priority;
    return cudaSuccess;
}

/* The stream's work stays ordered after its end, so its clock is kept. */
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return done(sim::query(sim::stream_of(stream)));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return done(sim::synchronize(sim::stream_of(stream)));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    const sim::Event *const event = sim::event_of(handle);
    return done(event == nullptr ? cudaErrorInvalidResourceHandle
                                 : sim::wait(sim::stream_of(stream), *event,
                                             (flags & cudaEventWaitExternal) != 0));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return new_event(event);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return new_event(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    sim::Event *const event = sim::event_of(handle);
    if (event == nullptr) {
        return done(cudaErrorInvalidResourceHandle);
    }
    sim::destroy_event(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    sim::Event *const event = sim::event_of(handle);
    return done(event == nullptr ? cudaErrorInvalidResourceHandle
                                 : sim::record(*event, sim::stream_of(stream),
                                               (flags & cudaEventRecordExternal) != 0));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const sim::Event *const event = sim::event_of(handle);
    return done(event == nullptr ? cudaErrorInvalidResourceHandle : sim::query(*event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const sim::Event *const event = sim::event_of(handle);
    return done(event == nullptr ? cudaErrorInvalidResourceHandle : sim::synchronize(*event));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1.0F;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    Operation by;
    const int error = sim::begin(sim::stream_of(stream), "host function", &by);
    if (error == 0 && sim::executes()) {
        sim::submit(by, [=] {
            function(data);
            return true;
        });
    } else if (error == 0 && sim::stream_of(stream).capture == nullptr) {
        function(data);
    }
    return done(error);
}

/* ---- kernels ---- */

cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t,
                             cudaStream_t stream) {
    return launch_kernel(function, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **) {
    return launch_kernel(function, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **, size_t,
                                        cudaStream_t stream) {
    return launch_kernel(function, stream);
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = const_cast<void *>(function);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3, dim3, void **, size_t, cudaStream_t stream) {
    return launch_kernel(kernel, stream);
}

static thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *static_cast<void **>(stream) = configuration.stream;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **) {}

char __cudaInitModule(void **) {
    return 1;
}

void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *,
                            void *, void *, void *, int *) {
    kernel_names()[function] = name;
}

void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int,
                                                                   size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

/* torch finds driver functions by name. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    *function = driver != nullptr ? dlsym(driver, name) : nullptr;
    if (result != nullptr) {
        *result =
            *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

cudaError_t cudaProfilerStart() {
    return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
    return cudaSuccess;
}
}
