/* Memory pool for CPU buffers that are allocated and freed for every unit of a step. A fresh
 * mapping costs a page fault for every page that is written. The pool keeps freed blocks and reuses
 * a block for a request of about the same size.
 *
 * Bound: bytes in use plus cached bytes exceed the recent peak of bytes in use by at most the
 * larger of an eighth and 16 MiB. The memory of a process therefore stays close to its peak. Any
 * thread may call these functions. There is one pool per process. */
#ifndef FSDP_C_KERNELS_POOL_H
#define FSDP_C_KERNELS_POOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Page-aligned memory of at least the requested size. The caller of fck_pool_take owns the block
 * and returns it with fck_pool_give. */
typedef struct fck_block {
    void *data;
    size_t bytes;
    struct fck_block *newer; /* list of cached blocks; private to the pool */
    struct fck_block *older;
} fck_block;

/* Smallest request in bytes. Callers allocate smaller buffers with torch's default allocator. */
enum { FCK_POOL_LEAST = 1 << 16 };

/* Returns NULL if no memory is available. The contents are unspecified. */
fck_block *fck_pool_take(size_t bytes);
/* NULL is allowed. Precondition: the block was taken and not given back. */
void fck_pool_give(fck_block *block);
/* Begins a round (an iteration of a model). Only the peaks of the latest rounds count. */
void fck_pool_begin_round(void);
/* Returns all cached blocks to the system. */
void fck_pool_trim(void);
/* For tests. Enables (1, the default) or disables (0) caching. Disabling also trims the pool. A
 * build with AddressSanitizer disables caching, so that the tool detects a use after free. */
void fck_pool_set_caching(int on);

typedef struct fck_pool_facts {
    uint64_t used_bytes;   /* in use: taken and not given back */
    uint64_t cached_bytes; /* cached: given back by callers, not returned to the system */
    uint64_t peak_bytes;   /* the highest used_bytes of the recent rounds */
    uint64_t taken;        /* calls of fck_pool_take */
    uint64_t mapped;       /* calls of fck_pool_take that mapped new memory */
} fck_pool_facts;

fck_pool_facts fck_pool_stats(void);

#ifdef __cplusplus
}
#endif

#endif
