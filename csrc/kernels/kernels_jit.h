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

/* The signature of cuCtxSetCurrent. Returns 0 on success. */
typedef int (*fck_bind)(void *context);

/* The signature of cuStreamIsCapturing. Returns 0 on success. */
typedef int (*fck_capture_query)(void *stream, int *status);

/* Addresses in the driver. The functions must stay loaded. */
typedef struct fck_jit_functions {
    fck_launch launch;
    void *moves; /* kernel for batches without casts */
    void *casts; /* kernel for batches with casts */
    /* The same for large batches (batch.cuh). NULL: several batches take their place. */
    void *many_moves;
    void *many_casts;
    void *checksums;
    fck_capture_query capture;
    /* Makes `context` current in a thread that has no context, for example a new thread of
     * autograd. NULL: launches in such a thread fail. */
    fck_bind bind;
    void *context;
} fck_jit_functions;

/* Returns the backend that launches the functions. Each call replaces the functions for the whole
 * process. Precondition: only `many_moves`, `many_casts`, `context` and `bind` may be
 * NULL. */
const fck_backend *fck_jit(const fck_jit_functions *functions);

#ifdef __cplusplus
}
#endif

#endif
