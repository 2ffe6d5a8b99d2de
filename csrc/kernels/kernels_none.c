/* Defines the functions of kernels_cuda.cu for an extension that was built without nvcc.
 * fck_backend_of() does not return this backend. Every launch fails with a message that names the
 * remedy. */
#include "kernels.h"

static const char not_built[] = "fsdp_c was built without its CUDA kernels: rebuild it where nvcc "
                                "is found, with FSDP_C_NO_CUDA unset";

static const char *none_pack(const fck_segment *segments, size_t count, void *stream) {
    (void)segments;
    (void)count;
    (void)stream;
    return not_built;
}

static const char *none_unpack(const void *gathered, int64_t rank_bytes, int64_t world,
                               const fck_slot *slots, size_t count, void *stream) {
    (void)gathered;
    (void)rank_bytes;
    (void)world;
    (void)slots;
    (void)count;
    (void)stream;
    return not_built;
}

static const char *none_pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                                       void *dst, int64_t rank_numel, fck_dtype dst_dtype,
                                       void *stream) {
    (void)gradients;
    (void)count;
    (void)world;
    (void)dst;
    (void)rank_numel;
    (void)dst_dtype;
    (void)stream;
    return not_built;
}

static int none_can_cast(fck_dtype src, fck_dtype dst) {
    return src == dst;
}

const fck_backend *fck_cuda(void) {
    static const fck_backend none = {.name = "cuda",
                                     .pack = none_pack,
                                     .unpack = none_unpack,
                                     .pack_gradients = none_pack_gradients,
                                     .can_cast = none_can_cast};
    return &none;
}

int fck_cuda_built(void) {
    return 0;
}
