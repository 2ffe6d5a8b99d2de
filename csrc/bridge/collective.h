/* Collectives and their c10d::Work objects ("works"). */
#ifndef FSDP_C_BRIDGE_COLLECTIVE_H
#define FSDP_C_BRIDGE_COLLECTIVE_H

#include "group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_work fct_work; /* a c10d::Work; one owner */

/* Every collective calls the ProcessGroup's method, which calls a dispatcher op of namespace c10d.
 * One collective is one op, even over shared memory. So CommDebugMode, the flight recorder and
 * tests count the same ops. Exception: collectives of chunks (fct_pg_can_pass_chunks). Complex
 * tensors are passed as pairs of real numbers. Gathers pass dtypes that the backend does not
 * support as bytes.
 *
 * A rank shard is the elements of a collective's buffer that belong to one rank.
 */
typedef enum fct_op_kind {
    FCT_OP_ALL_GATHER = 0,
    FCT_OP_REDUCE_SCATTER,
    FCT_OP_ALL_REDUCE,
} fct_op_kind;
typedef enum fct_reduce_op { FCT_SUM = 0, FCT_AVG = 1, FCT_PREMUL_SUM = 2 } fct_reduce_op;

/* Each function issues one collective. csrc/transport calls the functions. `shm` selects the
 * group's shared-memory backend (shm_methods.h) instead of its own backend. `async_op` is that of
 * c10d. *work is new, or NULL if the backend finished at once. The tensors are 1-D and contiguous.
 * The backend keeps references to the tensors until the collective is complete. `factor` is used
 * only for FCT_PREMUL_SUM. */
FCT_CHECK int fct_pg_all_gather(fct_pg *pg, bool shm, fct_tensor *output, fct_tensor *input,
                                bool async_op, fct_work **work);
FCT_CHECK int fct_pg_reduce_scatter(fct_pg *pg, bool shm, fct_tensor *output, fct_tensor *input,
                                    fct_reduce_op op, double factor, bool async_op,
                                    fct_work **work);
/* All-reduces a buffer of gradients. */
FCT_CHECK int fct_pg_all_reduce(fct_pg *pg, bool shm, fct_tensor *tensor, fct_reduce_op op,
                                double factor, bool async_op, fct_work **work);
/* All-reduces other values. Always uses the group's own backend, because peers may issue the same
 * all-reduce through torch. */
FCT_CHECK int fct_sum_over_ranks(fct_pg *pg, fct_tensor *tensor, fct_work **work);

/* Consecutive elements of a rank shard, and their place in this rank's memory. */
typedef struct fct_run {
    size_t chunk;   /* index of the tensor that contains the elements */
    int64_t offset; /* in elements, in each rank's part of that tensor */
    int64_t numel;
} fct_run;
/* A rank shard as a sequence of runs. Chunk k contains equally large parts of all rank shards, in
 * rank order. The layout is private to this rank: the transport sends shards in element order, so
 * peers may have other layouts. */
typedef struct fct_chunk_layout {
    const fct_run *runs;
    size_t count;
    int64_t rank_numel;
    bool checksums; /* of a gather: compute a checksum of each run of each rank */
} fct_chunk_layout;

/* Whether collectives of the group may take separate chunks. Writes false if the group is a Python
 * class, or if an observer of the c10d ops (dispatch mode, profiler) needs one packed buffer. */
FCT_CHECK int fct_pg_can_pass_chunks(fct_pg *pg, bool *can);
/* Collectives of separate chunks on the shared-memory backend; see transport/transport.h. */
FCT_CHECK int fct_pg_gather_chunks(fct_pg *pg, fct_tensor *const *chunks, size_t count,
                                   const fct_chunk_layout *layout, fct_work **work);
FCT_CHECK int fct_pg_reduce_chunks(fct_pg *pg, fct_tensor *output, fct_tensor *const *chunks,
                                   size_t count, const fct_chunk_layout *layout, fct_reduce_op op,
                                   fct_work **work);

/* Waits for a work. On devices with streams the call orders the current stream after the work and
 * returns at once. On the CPU the call blocks with the GIL released, for gloo and shared memory in
 * slices. Signal handlers run between slices, at most 0.2 s after the signal. If a handler raises,
 * the function returns -1 and the work still runs. Waits for other backends run no signal handlers.
 * An error of the collective is raised with torch's exception type. */
FCT_CHECK int fct_work_wait(fct_work *work);
/* Whether the work has completed, with or without an error. Also returns true if the backend cannot
 * be polled. */
bool fct_work_done(fct_work *work);
/* Whether the work takes CPU time from computation. That requires three conditions: the work copies
 * through shared memory, its data is larger than the ring, and the ranks have fewer than two CPUs
 * each. */
bool fct_work_is_cpu_bound(const fct_work *work);
/* Writes the checksum of a rank's elements of a run: a hash (transport/hash.h) of the checksums of
 * its pieces (FCK_CHECKSUM_PIECE in kernels/kernels.h). A piece of this rank is read when it is
 * sent, a piece of another rank after it is received. Returns false unless `work` is a completed
 * gather of chunks with `checksums`. */
bool fct_work_rank_checksum(const fct_work *work, size_t run, int64_t rank, uint64_t *checksum);
void fct_work_release(fct_work *work); /* NULL is allowed */
/* Sets whether all-reduces of this thread reduce buffers of gradients. The shared-memory backend
 * forwards all other all-reduces to gloo. Returns the previous value. */
bool fct_set_gradient_all_reduce(bool gradients);

/* Between enter and leave, collectives that any caller issues on the group use the shared-memory
 * backend. `gradients`: see fct_set_gradient_all_reduce. */
FCT_CHECK int fct_pg_enter_shm(fct_pg *pg, bool gradients, void **entered);
void fct_pg_leave_shm(void *entered); /* NULL is allowed */

#ifdef __cplusplus
}
#endif

#endif
