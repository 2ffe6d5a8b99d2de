/* Device memory functions for check_kernels.py, which imports neither torch nor CUDA bindings.
 * With VISIT_ON_HOST the functions use host memory. */
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#ifdef VISIT_ON_HOST

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void *visit_allocate(size_t bytes) {
    return std::malloc(bytes);
}
EXPORT int visit_free(void *memory) {
    std::free(memory);
    return 0;
}
EXPORT int visit_to_device(void *device, const void *host, size_t bytes) {
    std::memcpy(device, host, bytes);
    return 0;
}
EXPORT int visit_to_host(void *host, const void *device, size_t bytes) {
    std::memcpy(host, device, bytes);
    return 0;
}
EXPORT int visit_synchronize() {
    return 0;
}

#else

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void *visit_allocate(size_t bytes) {
    void *memory = nullptr;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}
EXPORT int visit_free(void *memory) {
    return cudaFree(memory);
}
EXPORT int visit_to_device(void *device, const void *host, size_t bytes) {
    return cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
}
EXPORT int visit_to_host(void *host, const void *device, size_t bytes) {
    return cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
}
EXPORT int visit_synchronize() {
    return cudaDeviceSynchronize();
}

#endif
