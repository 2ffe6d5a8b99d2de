/* The kernels pack shards into an all-gather buffer, unpack gathered shards into parameters, and
 * pack gradients into a reduce-scatter buffer. A rank shard is one rank's part of such a buffer.
 * Rank shards follow each other in the order of ranks. Kernels take raw pointers and a stream
 * handle; they use neither torch nor Python.
 *
 * The caller owns all memory and has checked all extents (offset + extent <= storage bytes). CPU
 * kernels keep no pointer after they return. CUDA kernels use the memory until the work queued on
 * `stream` is done. CUDA kernels copy the descriptor arrays before the launch returns, so the
 * caller may reuse the arrays at once.
 *
 * Casts round to nearest even, as torch's casts do. NaN stays NaN. CUDA casts reject addresses that
 * are not multiples of the element size. Moves accept any address. */
#ifndef FSDP_C_KERNELS_KERNELS_H
#define FSDP_C_KERNELS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types, with torch's ScalarType numbers. Elements of any other type can be moved (equal
 * source and destination type) but not cast. */
typedef int32_t fck_dtype;
enum {
    FCK_UINT8 = 0,
    FCK_FLOAT16 = 5,
    FCK_FLOAT32 = 6,
    FCK_FLOAT64 = 7,
    FCK_BFLOAT16 = 15,
};

/* One shard to pack: `count` elements of `src_dtype` at `src` become `count` elements of
 * `dst_dtype` at `dst`. src and dst do not overlap. `itemsize` is the size of a source element in
 * bytes. Packing uses `itemsize` if the two types are equal, so that any type can be moved. */
typedef struct fck_segment {
    const void *src;
    void *dst;
    int64_t count;
    int32_t itemsize;
    fck_dtype src_dtype;
    fck_dtype dst_dtype;
} fck_segment;

/* One parameter to unpack. For every rank r in [0, world) and block b in [0, blocks), the kernel
 * copies `bytes` bytes. Source: gathered + r*rank_bytes + offset + b*bytes. Destination: dst +
 * (b*world + r)*bytes. A parameter that is sharded on dim 0 has one block. */
typedef struct fck_slot {
    void *dst;
    int64_t offset;
    int64_t bytes;
    int64_t blocks;
} fck_slot;

/* One gradient to pack for a reduce-scatter: `blocks` contiguous blocks of `numel` elements of
 * `src_dtype`. Rank shard r of the destination receives elements [r*chunk, min((r+1)*chunk, numel))
 * of block b, cast to the destination type. These elements start at element `offset` + b*chunk of
 * that rank shard. The kernel fills the rest of the `chunk` elements with zeros. `itemsize` is as
 * in fck_segment. */
typedef struct fck_gradient {
    const void *src;
    int64_t numel;
    int64_t chunk;
    int64_t offset;
    int64_t blocks;
    int32_t itemsize;
    fck_dtype src_dtype;
} fck_gradient;

/* Memory of a device, whose checksum counts `factor` times. `data` is a multiple of 8. */
typedef struct fck_range {
    const void *data;
    int64_t bytes;
    uint64_t factor;
} fck_range;

enum { FCK_RANGES = 2 }; /* per launch */

/* Callers read long memory of the host in pieces of this size, which fit in a processor's L2 cache.
 * It is a multiple of the size of each dtype. The last piece may be shorter. */
enum { FCK_CHECKSUM_PIECE = 1 << 16 };

/* The kernels of one device type. Functions that return a string return NULL on success, else a
 * message with the reason of the failure. The message is valid until the next call of this thread.
 */
typedef struct fck_backend {
    const char *name;
    const char *(*pack)(const fck_segment *segments, size_t count, void *stream);
    const char *(*unpack)(const void *gathered, int64_t rank_bytes, int64_t world,
                          const fck_slot *slots, size_t count, void *stream);
    /* dst holds world rank shards of `rank_numel` elements of dst_dtype. */
    const char *(*pack_gradients)(const fck_gradient *gradients, size_t count, int64_t world,
                                  void *dst, int64_t rank_numel, fck_dtype dst_dtype, void *stream);
    /* Returns 1 if elements of `src` can be packed as `dst`. Returns 1 for equal types. */
    int (*can_cast)(fck_dtype src, fck_dtype dst);
    /* fck_checksum (checksum.h). NULL: the host cannot read the memory of the device. */
    uint64_t (*checksum)(const void *data, size_t bytes);
    /* Adds the checksums of at most FCK_RANGES ranges to *sum, in the memory of the device
     * (checksums.cuh). NULL: the device cannot. */
    const char *(*add_checksums)(const fck_range *ranges, size_t count, uint64_t *sum,
                                 void *stream);
    /* Returns 1 if a CUDA graph captures the work of the stream, or if the query fails. NULL: a
     * graph never does. */
    int (*is_capturing)(void *stream);
} fck_backend;

/* The CPU kernels and the CUDA kernels; neither returns NULL. If the extension was built without
 * nvcc, fck_cuda_built() is 0 and each CUDA function fails with a message that names the remedy. */
const fck_backend *fck_cpu(void);
const fck_backend *fck_cuda(void);
int fck_cuda_built(void);

/* torch's DeviceType numbers. */
enum { FCK_DEVICE_CPU = 0, FCK_DEVICE_CUDA = 1 };
/* Returns the kernels for a device of torch's type `device_type`, or NULL if there are none.
 * Callers then use torch's multi-tensor operations. */
const fck_backend *fck_backend_of(int device_type);
/* Returns the alignment of slots and rank shards in bytes, on devices of torch's type
 * `device_type`. On CUDA the alignment is the largest vector load of a thread. The alignment does
 * not depend on the available kernels. */
static inline int64_t fck_slot_alignment(int device_type) {
    return device_type == FCK_DEVICE_CUDA ? 16 : 1;
}

/* Returns 1 if the kernels of the device type can pack elements of `src` as `dst`. Without kernels,
 * returns 1 for equal types only. */
int fck_can_cast(int device_type, fck_dtype src, fck_dtype dst);

/* Sets the CUDA kernels that were compiled at run time, for an extension that was built without
 * nvcc. NULL removes them. */
void fck_set_cuda_backend(const fck_backend *kernels);

/* For tests. fck_set_simulated_backend sets the kernels of all device types other than CPU and
 * CUDA; NULL (the default) removes these kernels. After fck_hide_backends(1) CPU and CUDA have the
 * simulated kernels, too, or none. */
void fck_set_simulated_backend(const fck_backend *kernels);
void fck_hide_backends(int on);

#ifdef __cplusplus
}
#endif

#endif
