/* Device memory functions for check_kernels.py, which imports neither torch nor CUDA bindings.
 * With GPU_CHECK_ON_HOST the functions use host memory. */
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef GPU_CHECK_ON_HOST

EXPORT void *device_allocate(size_t bytes) {
    return std::malloc(bytes);
}
EXPORT int device_free(void *memory) {
    std::free(memory);
    return 0;
}
EXPORT int copy_to_device(void *device, const void *host, size_t bytes) {
    std::memcpy(device, host, bytes);
    return 0;
}
EXPORT int copy_to_host(void *host, const void *device, size_t bytes) {
    std::memcpy(host, device, bytes);
    return 0;
}
EXPORT int device_synchronize() {
    return 0;
}

#else

EXPORT void *device_allocate(size_t bytes) {
    void *memory = nullptr;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}
EXPORT int device_free(void *memory) {
    return cudaFree(memory);
}
EXPORT int copy_to_device(void *device, const void *host, size_t bytes) {
    return cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
}
EXPORT int copy_to_host(void *host, const void *device, size_t bytes) {
    return cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
}
EXPORT int device_synchronize() {
    return cudaDeviceSynchronize();
}

#endif
