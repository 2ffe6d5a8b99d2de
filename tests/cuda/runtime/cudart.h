/* Declarations for the files of the substitute of libcudart. */
#ifndef CUDA_SIM_CUDART_H
#define CUDA_SIM_CUDART_H

#include <cuda_runtime_api.h>

#include "sim.h"

/* Returns the error and stores it as the thread's last error. */
static inline cudaError_t done(int error) {
    if (error != 0) {
        sim::thread().last_error = error;
    }
    return static_cast<cudaError_t>(error);
}

#endif
