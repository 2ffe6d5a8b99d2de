/* Norms and scaling of float32 arrays, for gradient clipping on the CPU. Functions take raw
 * pointers, like those of kernels.h, and keep no state. */
#ifndef FSDP_C_KERNELS_NORM_H
#define FSDP_C_KERNELS_NORM_H

#include <stddef.h>
#include <stdint.h>

typedef struct fck_floats {
    float *values; /* may be NULL if count is 0 */
    int64_t count;
} fck_floats;

/* Sets norms[i] to the 2-norm of arrays[i], summed in the order of torch.linalg.vector_norm. */
void fck_norms(const fck_floats *arrays, size_t count, float *norms);
/* Multiplies every element by `factor`. */
void fck_scale(const fck_floats *array, float factor);

#endif
