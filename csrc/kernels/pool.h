/* Memory for buffers that come and go with every unit of a step, on the CPU. A fresh mapping costs
 * a page fault for every page that is written, and most of a step's memory is as large as the
 * memory that was given back a moment ago. Blocks that are given back wait here to be taken again.
 *
 * What waits is bounded: what is out and what waits are together never more than an eighth, or 16
 * mebibytes, above what was out at once in the last few rounds, so that a process holds hardly more
 * than its peak. Blocks serve one size, and the sizes of a step are not out at the same time.
 * Any thread may call; there is one pool for each process. */
#ifndef FSDP_C_KERNELS_POOL_H
#define FSDP_C_KERNELS_POOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of at least `bytes` bytes, aligned to a page. Whoever took it gives it back. */
typedef struct fck_block {
    void *data;
    size_t bytes;
    struct fck_block *newer; /* of those that wait; the pool's own */
    struct fck_block *older;
} fck_block;

/* Less is not worth a block: malloc has its own way with it. */
enum { FCK_POOL_LEAST = 1 << 16 };

/* NULL: there is no memory. The contents are whatever was there. */
fck_block *fck_pool_take(size_t bytes);
void fck_pool_give(fck_block *block); /* NULL is fine */
/* A round (an iteration of a model) begins: peaks of long ago count no more. */
void fck_pool_round(void);
/* Gives all that waits back to the system. */
void fck_pool_trim(void);
/* Whether blocks wait at all (as at the start); 0 also trims. For tools that look for uses after
 * free, and whoever wants it so. */
void fck_pool_keep(int on);

typedef struct fck_pool_facts {
    uint64_t out_bytes;     /* taken and not given back */
    uint64_t waiting_bytes; /* given back, and not the system's */
    uint64_t peak_bytes;    /* the highest out_bytes of the last rounds */
    uint64_t taken;         /* calls of take so far, */
    uint64_t mapped;        /* and how many had to ask the system */
} fck_pool_facts;

fck_pool_facts fck_pool_look(void);

#ifdef __cplusplus
}
#endif

#endif
