/* Tensors, their storages and gradients, and the multi-tensor operations of torch. */
#ifndef FSDP_C_BRIDGE_TENSOR_H
#define FSDP_C_BRIDGE_TENSOR_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Properties of a tensor at the time of the call. */
typedef struct fct_facts {
    void *data;            /* address of the first element; NULL if the tensor has no memory */
    int64_t numel;         /* elements */
    int64_t itemsize;      /* bytes per element */
    int64_t offset_bytes;  /* of data inside the storage */
    int64_t storage_bytes; /* size of the storage now (0 while freed) */
    fct_dtype dtype;
    fct_device device;
    bool contiguous; /* and not a lazy conjugate or negative view */
    bool strided;    /* plain dense layout (not sparse, not a wrapper without memory) */
} fct_facts;

/* Whether the tensor has at least `bytes` bytes of contiguous memory inside its storage.
 * Precondition: bytes >= 0. */
static inline bool fct_facts_has_bytes(const fct_facts *facts, int64_t bytes) {
    return facts->strided && facts->contiguous && facts->numel * facts->itemsize >= bytes &&
           facts->offset_bytes <= facts->storage_bytes - bytes &&
           (bytes == 0 || facts->data != NULL);
}

void fct_tensor_retain(fct_tensor *t);
void fct_tensor_release(fct_tensor *t); /* NULL is allowed */
fct_device fct_tensor_device(const fct_tensor *t);
/* Reads the properties. Writes strided=false and data=NULL for a wrapper or a sparse tensor. */
void fct_tensor_facts(const fct_tensor *t, fct_facts *out);
bool fct_tensor_requires_grad(const fct_tensor *t);
/* Whether the caller has the only reference to the tensor, its storage and its memory. */
bool fct_tensor_is_sole(const fct_tensor *t);
/* t._base is not None */
bool fct_tensor_is_view(const fct_tensor *t);
/* Returns the version counter, or 0 for inference tensors. */
uint32_t fct_tensor_version(const fct_tensor *t);
/* Bumps the version after a write through a raw pointer. No-op for inference tensors. */
void fct_tensor_bump(fct_tensor *t);
/* Makes `t` use the version counter of `other`. No-op if one of them is an inference tensor. */
void fct_tensor_share_version(fct_tensor *t, const fct_tensor *other);

/* Whether two tensors have equal sizes, strides, offset, dtype, device, dispatch keys and storage
 * size. */
bool fct_tensor_is_like(const fct_tensor *t, const fct_tensor *other);

/* New 1-D tensor of `numel` uninitialized elements, allocated on the device's current stream. Not
 * an inference tensor, even in inference mode. */
FCT_CHECK int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out);
/* New tensor aliasing base's storage, with base's dtype, its own version counter and no autograd
 * history. `offset` is in elements from the start of the storage. Fails if the alias exceeds the
 * storage. */
FCT_CHECK int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset, fct_tensor **out);
/* fct_tensor_alias of `numel` contiguous elements, as a 1-D tensor. */
FCT_CHECK static inline int fct_tensor_alias_1d(const fct_tensor *base, int64_t numel,
                                                int64_t offset, fct_tensor **out) {
    const int64_t stride = 1;
    return fct_tensor_alias(base, 1, &numel, &stride, offset, out);
}
/* fct_tensor_alias with another dtype. `offset` is in elements of `dtype`. */
FCT_CHECK int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim,
                                  const int64_t *sizes, const int64_t *strides, int64_t offset,
                                  fct_tensor **out);
/* New contiguous copy of t, or a new reference to t if t is contiguous. */
FCT_CHECK int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out);
/* New tensor of `dtype` with t's values, or a new reference to t if it has the dtype. A cast from
 * complex to real takes the real parts. */
FCT_CHECK int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* New tensor of zeros, like t in shape, dtype and device. */
FCT_CHECK int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out);
/* Copies t.narrow(dim, start, length) to new memory, padded with zeros to `padded` elements along
 * `dim`. Writes two new tensors. *local is the copy without padding. It is no view, so users can
 * change it in place like other leaves. *flat is the whole memory, 1-D. The two tensors share one
 * version counter. Unlike the functions above, the call runs through all dispatch keys, with grad
 * mode off. */
FCT_CHECK int fct_tensor_cut(fct_tensor *t, int32_t dim, int64_t start, int64_t length,
                             int64_t padded, fct_tensor **local, fct_tensor **flat);
/* dst.copy_(src). Casts. */
FCT_CHECK int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src);
/* dst.add_(src). Bumps dst's version. */
FCT_CHECK int fct_tensor_add(fct_tensor *dst, const fct_tensor *src);
/* t.div_(divisor). */
FCT_CHECK int fct_tensor_div(fct_tensor *t, double divisor);
/* dst.copy_(src, non_blocking=True) from the host to a device, or within a device. Pinned memory of
 * src must not change before the copy is done. Releases the GIL. */
FCT_CHECK int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src);
/* t.to("cpu", non_blocking=...): a new CPU tensor. With non_blocking the tensor is pinned, and the
 * copy is only queued. Releases the GIL. */
FCT_CHECK int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out);
/* requires_grad_() of a leaf. */
FCT_CHECK int fct_tensor_set_requires_grad(fct_tensor *t, bool value);
/* t.grad_dtype = dtype of a leaf: autograd casts the leaf's gradients to it. FCT_NO_DTYPE (None in
 * Python): gradients keep the dtype that they are computed in. */
FCT_CHECK int fct_tensor_set_grad_dtype(fct_tensor *t, fct_dtype dtype);

/* dst[i].copy_(src[i]) for all i. Launches one kernel if the device has a kernel for the list. That
 * requires one source dtype, one destination dtype, and equal shapes and strides. */
FCT_CHECK int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count);
/* dst[i].add_(src[i]) for all i. Bumps no version. Launches one kernel if the device has a kernel
 * for the list and all tensors have one dtype. */
FCT_CHECK int fct_foreach_add(fct_tensor *const *dst, fct_tensor *const *src, size_t count);
/* Splits a 2-D tensor along dim 1 into parts of `sizes` and copies them to out[i]. Each out[i] is
 * [src.size(0), sizes[i]], contiguous, of the same dtype. */
FCT_CHECK int fct_split_copy(const fct_tensor *src, const int64_t *sizes, fct_tensor *const *out,
                             size_t count);
/* torch._chunk_cat along dim 0: row c of out holds chunk c of each tensor, padded with zeros. The
 * tensors are 2-D and not empty, and have one dtype. The shape of out is [chunks, sum of padded
 * sizes]. Casts. */
FCT_CHECK int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks,
                            fct_tensor *out);

/* CPU buffers come from a pool (kernels/pool.h), which keeps freed memory. fct_memory_begin_round
 * marks the beginning of a model's iteration. fct_memory_trim returns the free memory to the
 * system. */
void fct_memory_begin_round(void);
void fct_memory_trim(void);

/* Allocates `nbytes` bytes of uninitialized memory for the empty storage of t, from the storage's
 * own allocator. No-op if the storage has that size. */
FCT_CHECK int fct_storage_alloc(fct_tensor *t, int64_t nbytes);
/* Frees the storage's memory. The size becomes 0. No-op if the size is 0. */
void fct_storage_free(fct_tensor *t);
/* Whether fct_storage_free is allowed: false if an array (numpy()) or another process shares the
 * memory. */
bool fct_storage_can_free(const fct_tensor *t);
/* Whether the storage of t has other references, usually of tensors. */
bool fct_storage_is_shared(const fct_tensor *t);
/* Moves the memory of the storage of `from` to the empty storage of `to`, on the same device. */
void fct_storage_move(fct_tensor *from, fct_tensor *to);

/* .grad of a leaf. has: whether the leaf has a gradient. identity: the address of the gradient, for
 * comparison only. take: moves the gradient to *out (new; NULL if there is none) and sets .grad to
 * None. put: sets .grad to `grad`, which it borrows. */
bool fct_grad_has(const fct_tensor *t);
const void *fct_grad_identity(const fct_tensor *t);
void fct_grad_take(fct_tensor *t, fct_tensor **out);
void fct_grad_put(fct_tensor *t, fct_tensor *grad);

bool fct_dtype_is_floating(fct_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
