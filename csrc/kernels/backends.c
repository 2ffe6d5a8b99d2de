/* Maps a device type to its kernels. Owns the pointers to the kernels compiled at run time and to
 * the kernels that tests install. All threads share these pointers. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdbool.h>

static _Atomic(const fck_backend *) compiled;
static _Atomic(const fck_backend *) simulated;
static atomic_bool hidden;

const fck_backend *fck_backend_of(int device_type) {
    bool visible = !atomic_load_explicit(&hidden, memory_order_relaxed);
    if (visible && device_type == FCK_DEVICE_CPU) {
        return fck_cpu();
    }
    if (visible && device_type == FCK_DEVICE_CUDA) {
        return fck_cuda_built() != 0 ? fck_cuda()
                                     : atomic_load_explicit(&compiled, memory_order_acquire);
    }
    return atomic_load_explicit(&simulated, memory_order_relaxed);
}

int fck_can_cast(int device_type, fck_dtype src, fck_dtype dst) {
    const fck_backend *kernels = fck_backend_of(device_type);
    return src == dst || (kernels != NULL && kernels->can_cast(src, dst) != 0);
}

void fck_set_cuda_backend(const fck_backend *kernels) {
    atomic_store_explicit(&compiled, kernels, memory_order_release);
}

void fck_set_simulated_backend(const fck_backend *kernels) {
    atomic_store_explicit(&simulated, kernels, memory_order_relaxed);
}

void fck_hide_backends(int on) {
    atomic_store_explicit(&hidden, on != 0, memory_order_relaxed);
}
