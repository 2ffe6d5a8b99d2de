/* The CUDA kernels compiled by NVRTC. They run the same jobs as the kernels compiled by nvcc, and
 * the driver's cuLaunchKernel launches them. fsdp_c/_runtime/jit.py compiles and loads the
 * functions. */
#ifndef FSDP_C_KERNELS_KERNELS_JIT_H
#define FSDP_C_KERNELS_KERNELS_JIT_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The signature of cuLaunchKernel. Returns 0 if the launch was queued. */
typedef int (*fck_launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void *stream, void **arguments, void **extra);

/* Returns the backend that launches the loaded functions through `launch`: `moves` for batches
 * without casts and `casts` for batches with casts. Both functions must stay loaded. Each call
 * replaces these three addresses for the whole process. Precondition: no argument is NULL. */
const fck_backend *fck_jit(fck_launch launch, void *moves, void *casts);

#ifdef __cplusplus
}
#endif

#endif
