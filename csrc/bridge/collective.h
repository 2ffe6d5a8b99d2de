/* Collectives and their works. */
#ifndef FSDP_C_BRIDGE_COLLECTIVE_H
#define FSDP_C_BRIDGE_COLLECTIVE_H

#include "group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_work fct_work; /* c10d::Work, counted */

/* Every collective goes through the ProcessGroup's method, and so through the dispatcher ops of
 * namespace c10d. One call is one op, also over shared memory (direct.hpp), so CommDebugMode, the
 * flight recorder and tests count the same ops. Complex tensors are passed as pairs of real
 * numbers. Gathers pass dtypes that the backend does not support as bytes.
 *
 * A rank shard ("row" in names) is the elements of a collective's buffer that belong to one rank.
 */
typedef enum fct_reduce_op { FCT_SUM = 0, FCT_AVG = 1, FCT_PREMUL_SUM = 2 } fct_reduce_op;

/* Each issues one asynchronous collective. *work is new, or NULL if the backend finished at once.
 * The tensors are 1-D and contiguous. The backend keeps references to them until it is done.
 * `factor` is used only for FCT_PREMUL_SUM. */
FCT_CHECK int fct_all_gather(fct_pg *pg, fct_tensor *output, fct_tensor *input, bool async_op,
                             fct_work **work);
FCT_CHECK int fct_reduce_scatter(fct_pg *pg, fct_tensor *output, fct_tensor *input,
                                 fct_reduce_op op, double factor, bool async_op, fct_work **work);
/* All-reduces a buffer of gradients, which may use shared memory. */
FCT_CHECK int fct_all_reduce(fct_pg *pg, fct_tensor *tensor, fct_reduce_op op, double factor,
                             bool async_op, fct_work **work);
/* All-reduces other values. Always uses the group's backend, because peers may call it through
 * torch. */
FCT_CHECK int fct_sum_over_ranks(fct_pg *pg, fct_tensor *tensor, fct_work **work);

/* Consecutive elements of a rank shard, and their place in this rank's memory. */
typedef struct fct_run {
    size_t chunk;   /* index of the tensor that holds them */
    int64_t offset; /* in elements, in each rank's part of that tensor */
    int64_t numel;
} fct_run;
/* A rank shard as a sequence of runs. Chunk k holds parts of all rank shards, in rank order, of one
 * size. The layout is private to this rank: the transport sends shards in element order, so peers
 * may have other layouts. */
typedef struct fct_chunk_layout {
    const fct_run *runs;
    size_t count;
    int64_t row_numel;
} fct_chunk_layout;

/* Whether the transport of `device` supports separate chunks, and no observer of the c10d ops
 * (dispatch mode, profiler) needs one packed buffer. `gathers`: for an all-gather. The first
 * all-gathers of a group use packed buffers. The result may differ between ranks. */
FCT_CHECK int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes);
/* An in-place all-gather. Chunks are 1-D and contiguous, and contain this rank's parts. The work is
 * new and keeps references to the chunks. `layout` is not used after the call. */
FCT_CHECK int fct_gather_chunks(fct_pg *pg, fct_tensor *const *chunks, size_t count,
                                const fct_chunk_layout *layout, fct_work **work);
/* A reduce-scatter (FCT_SUM, FCT_AVG) of chunks into `output`, which holds one rank shard. Does not
 * write to the chunks. The work is new and keeps references to all tensors. */
FCT_CHECK int fct_reduce_chunks(fct_pg *pg, fct_tensor *output, fct_tensor *const *chunks,
                                size_t count, const fct_chunk_layout *layout, fct_reduce_op op,
                                fct_work **work);

/* Waits for a work. On devices with streams this orders the current stream after it and returns at
 * once. On the CPU it blocks with the GIL released, in slices. Signal handlers run between slices,
 * at most 0.2 s after the signal. If a handler raises, the function returns -1 and the work still
 * runs. An error of the collective is raised with torch's exception type. */
FCT_CHECK int fct_work_wait(fct_work *work);
/* Whether the work has completed, with or without an error. True if the backend cannot be polled.
 */
bool fct_work_done(fct_work *work);
/* Whether the work takes CPU time from computation: it copies through shared memory, is larger than
 * the ring, and the ranks have fewer than two CPUs each. */
bool fct_work_is_cpu_bound(const fct_work *work);
/* Whether a gather of rank shards of `row_bytes` bytes, issued now, would be such a work. Returns
 * the same on all ranks at the same point of their collectives. */
bool fct_gather_is_cpu_bound(const fct_pg *pg, int64_t row_bytes);
void fct_work_release(fct_work *work); /* NULL is allowed */
/* Sets whether all-reduces of this thread reduce buffers of gradients, as between enter and leave
 * of FCT_USE_ALL_REDUCE. Returns the previous value. */
bool fct_set_gradient_all_reduce(bool rows);

#ifdef __cplusplus
}
#endif

#endif
