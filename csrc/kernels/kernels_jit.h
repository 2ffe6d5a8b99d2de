/* The CUDA kernels where NVRTC has compiled them: the same jobs and launches as with nvcc, by way
 * of the driver's cuLaunchKernel. fsdp_c/jit.py has compiled and loaded them. */
#ifndef FSDP_C_KERNELS_KERNELS_JIT_H
#define FSDP_C_KERNELS_KERNELS_JIT_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cuLaunchKernel: function, grid and block in three dims each, shared bytes, stream, arguments,
 * NULL. 0: queued. */
typedef int (*fck_launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void *stream, void **arguments, void **extra);

/* The kernels over these functions, which have to stay: what moves, what converts as well. For the
 * whole process; a later call takes their place. */
const fck_backend *fck_jit(fck_launch launch, void *moves, void *casts);

#ifdef __cplusplus
}
#endif

#endif
