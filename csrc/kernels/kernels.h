/* The foreach kernels: pack shards into a gather buffer, unpack gathered rows into parameters,
 * pack gradients into a reduce buffer. Raw pointers and a stream handle, nothing else: no torch,
 * no Python.
 *
 * Every function works on memory the caller owns and has already checked (offset + extent <=
 * storage bytes); kernels keep no pointer after they return (CPU) or after the work queued on
 * `stream` is done (CUDA: descriptor arrays are copied before the launch returns, so the caller
 * may reuse them at once).
 *
 * Casts round to nearest even, as torch's own do. NaN stays NaN. CUDA's refuse addresses that are
 * no multiples of the element size; moves take any. */
#ifndef FSDP_C_KERNELS_H
#define FSDP_C_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types; the numbers are torch's ScalarType numbers (asserted in csrc/torch). Types that
 * are not listed can be moved (same type on both sides) but not cast. */
typedef int32_t fck_dtype;
enum {
    FCK_UINT8 = 0,
    FCK_FLOAT16 = 5,
    FCK_FLOAT32 = 6,
    FCK_FLOAT64 = 7,
    FCK_BFLOAT16 = 15,
};

/* One shard to pack: `count` elements of `src_dtype` at `src` become `count` elements of
 * `dst_dtype` at `dst`. src and dst do not overlap. `itemsize` is the size of a source element
 * in bytes (used when the two types are equal, so that any type can be moved). */
typedef struct fck_segment {
    const void *src;
    void *dst;
    int64_t count;
    int32_t itemsize;
    fck_dtype src_dtype;
    fck_dtype dst_dtype;
} fck_segment;

/* One parameter to unpack, `blocks` blocks of it: for every row r in [0, world) and block b, the
 * `bytes` bytes at rows + r*row_bytes + offset + b*bytes go to dst + (b*world + r)*bytes. It is one
 * block where the parameter is cut on its first dim. */
typedef struct fck_column {
    void *dst;
    int64_t offset;
    int64_t bytes;
    int64_t blocks;
} fck_column;

/* One gradient to pack for a reduce-scatter, `blocks` blocks of it, one after the other, of `numel`
 * contiguous elements of `src_dtype` each. Row r of the destination gets elements [r*chunk,
 * min((r+1)*chunk, numel)) of block b at element offset `offset` + b*chunk of that row, cast to the
 * destination type; the rest of the `chunk` slots are filled with zeros. `itemsize` as above. */
typedef struct fck_gradient {
    const void *src;
    int64_t numel;
    int64_t chunk;
    int64_t offset;
    int64_t blocks;
    int32_t itemsize;
    fck_dtype src_dtype;
} fck_gradient;

/* One device's kernels. Every launch returns NULL on success, else a static message that says
 * what failed. */
typedef struct fck_backend {
    const char *name;
    const char *(*pack)(const fck_segment *segments, size_t count, void *stream);
    const char *(*unpack)(const void *rows, int64_t row_bytes, int64_t world,
                          const fck_column *columns, size_t count, void *stream);
    /* dst holds world rows of `row_numel` elements of dst_dtype. */
    const char *(*pack_gradients)(const fck_gradient *gradients, size_t count, int64_t world,
                                  void *dst, int64_t row_numel, fck_dtype dst_dtype, void *stream);
} fck_backend;

/* 1 if elements of `src` can be packed as `dst` (equal types always can). */
int fck_can_cast(fck_dtype src, fck_dtype dst);

/* The CPU kernels (always there) and the CUDA kernels. Without nvcc at build time the CUDA
 * backend is still there, but each of its functions fails with a message that says so, and
 * fck_cuda_built() is 0. */
const fck_backend *fck_cpu(void);
const fck_backend *fck_cuda(void);
int fck_cuda_built(void);

/* The kernels for a device of torch's type `device_type`; NULL where nobody has any, and torch's
 * own multi-tensor operations do the work. */
enum { FCK_DEVICE_CPU = 0, FCK_DEVICE_CUDA = 1 };
const fck_backend *fck_backend_of(int device_type);

/* CUDA's kernels that were compiled at run time, for an extension that was built without nvcc;
 * NULL: none. */
void fck_provide(const fck_backend *kernels);

/* For tests. The kernels of a simulated accelerator, which devices have that have none of their
 * own; NULL (as at the start): no kernels. And whether all others are hidden, the CPU's, too. */
void fck_simulate(const fck_backend *kernels);
void fck_hide(int on);

#ifdef __cplusplus
}
#endif

#endif
