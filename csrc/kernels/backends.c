/* Whose kernels serve which device. Owns the only state of this folder: what tests have put in the
 * place of kernels, for all threads. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdbool.h>

static _Atomic(const fck_backend *) simulated;
static atomic_bool hidden;

const fck_backend *fck_backend_of(int device_type) {
    if (atomic_load_explicit(&hidden, memory_order_relaxed)) {
        return NULL;
    }
    if (device_type == FCK_DEVICE_CPU) {
        return fck_cpu();
    }
    if (device_type == FCK_DEVICE_CUDA && fck_cuda_built() != 0) {
        return fck_cuda();
    }
    return atomic_load_explicit(&simulated, memory_order_relaxed);
}

void fck_simulate(const fck_backend *kernels) {
    atomic_store_explicit(&simulated, kernels, memory_order_relaxed);
}

void fck_hide(int on) {
    atomic_store_explicit(&hidden, on != 0, memory_order_relaxed);
}
