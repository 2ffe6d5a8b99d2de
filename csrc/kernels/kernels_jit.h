/* The CUDA kernels compiled by NVRTC. Jobs and launches are the same as with nvcc; the driver's
 * cuLaunchKernel starts them. fsdp_c/_runtime/jit.py compiles and loads the functions. */
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

/* Returns kernels that launch `moves` for moves and `casts` for batches with conversions. Both
 * functions must stay loaded. The setting is global to the process; a later call replaces it.
 * Precondition: no argument is NULL. */
const fck_backend *fck_jit(fck_launch launch, void *moves, void *casts);

#ifdef __cplusplus
}
#endif

#endif
