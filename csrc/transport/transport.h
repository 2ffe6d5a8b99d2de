/* Transports move the data of collectives between ranks. The core calls the functions of this
 * header; each call selects the transport of the process group and calls its table.
 *
 * Every collective is one op of namespace c10d, with every transport. So CommDebugMode, the flight
 * recorder and tests count the same ops. Exception: collectives of chunks, which are issued only if
 * nothing observes the ops. All functions need the GIL, except that collectives and
 * fct_compare_plan of devices with streams may run in a scope of bridge/gil.h. The conventions of
 * bridge/types.h apply. Precondition: `pg` is not NULL. */
#ifndef FSDP_C_TRANSPORT_TRANSPORT_H
#define FSDP_C_TRANSPORT_TRANSPORT_H

#include "../bridge/collective.h"
#include "agreement.h"
#include "group_negotiation.h"
#include "hash.h"
#include "pg.h"
#include "shm.h"

/* Compares the hash of this rank's plan, or FCT_PLAN_*, with those of all ranks of the process
 * group; see shm_negotiation_compare_plan, also for `waits`. On devices other than the CPU, and if
 * the CPU backend is not gloo, the result is FCT_PLANS_EQUAL without a comparison. */
FCT_CHECK int fct_compare_plan(fct_pg *pg, fct_device device, uint64_t plan, bool waits,
                               fct_plan_result *result);

/* Writes the number of a root over the process group; see shm_negotiation_number_root. The number
 * is 0 on devices other than the CPU, if the CPU backend is not gloo, and if `root` is 0. */
FCT_CHECK int fct_number_root(fct_pg *pg, fct_device device, uint64_t root, uint64_t *number);

/* Adds a checksum of the data of a completed all-gather or all-reduce, which the next agreement
 * compares; see checksums.h. 0: unknown, never a mismatch. */
void fct_add_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum);
/* The same for devices with streams, on which no agreement takes place. add adds a checksum to the
 * open interval. end closes that interval under `number`. Without checksums since the last end, end
 * has no effect. */
void fct_add_device_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum);
void fct_end_checksum_interval(fct_pg *pg, uint64_t number);
/* Returns a new number for an interval, which is equal on all ranks that have recorded equal
 * numbers of collectives and of intervals. */
uint64_t fct_number_checksum_interval(fct_pg *pg);
/* Drops the checksums since the last agreement; see op_checksums_drop. */
void fct_drop_checksums(fct_pg *pg);

/* Starts an agreement of all ranks on the collectives that the group's own backend has moved since
 * the last agreement, and on the checksums. Messages over shared memory carry labels instead.
 * Writes false to *issued if nothing is to be compared, or if agreements are off for this group;
 * see shm_negotiation_start_agreement. Does not wait for the agreement; waits for the other ranks
 * only where fct_agree_start_waits returns true. */
FCT_CHECK int fct_agree_start(fct_pg *pg, bool *issued);
/* Whether fct_agree_start would wait for the other ranks: to compare its size (sequence.h), or to
 * finish an interrupted agreement. */
bool fct_agree_start_waits(fct_pg *pg);
/* Waits for the agreement. Writes the first difference, or "". */
FCT_CHECK int fct_agree_await(fct_pg *pg, fct_difference *difference);

/* ---- collectives ---- */

/* Each function issues one collective. `async_op` is that of c10d. `tag` is not used after the
 * call; NULL is allowed. *work is new, or NULL if the backend finished at once. The tensors are 1-D
 * and contiguous. The backend keeps references to the tensors until the collective is complete.
 * `factor` is used only for FCT_PREMUL_SUM. */
FCT_CHECK int fct_all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                             fct_tensor *input, bool async_op, fct_work **work);
FCT_CHECK int fct_reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                                 fct_tensor *input, fct_reduce_op op, double factor, bool async_op,
                                 fct_work **work);
/* All-reduces a buffer of gradients. fct_sum_over_ranks (bridge/collective.h) reduces other values.
 */
FCT_CHECK int fct_all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor,
                             fct_reduce_op op, double factor, bool async_op, fct_work **work);

/* Writes to *takes whether the next all-gather (`gathers`) or reduce-scatter may take separate
 * chunks. That requires a transport with chunks, and no observer of the c10d ops (dispatch mode,
 * profiler) that needs one packed buffer. All-gathers before the end of the negotiation use packed
 * buffers. The result may differ between ranks. */
FCT_CHECK int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes);
/* An in-place all-gather. Chunks are 1-D and contiguous, and contain this rank's parts. The work is
 * new and keeps references to the chunks. `layout` is not used after the call. Requires that
 * fct_pg_takes_chunks wrote true. */
FCT_CHECK int fct_gather_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks,
                                size_t count, const fct_chunk_layout *layout, fct_work **work);
/* A reduce-scatter (FCT_SUM, FCT_AVG) of chunks into `output`, which holds one rank shard. Does not
 * write to the chunks. The work is new and keeps references to all tensors. */
FCT_CHECK int fct_reduce_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                                fct_tensor *const *chunks, size_t count,
                                const fct_chunk_layout *layout, fct_reduce_op op, fct_work **work);
/* Whether a gather that is issued now, with rank shards of `rank_bytes` bytes, takes CPU time from
 * computation; see fct_work_is_cpu_bound. The result is equal on all ranks after the same
 * collectives. */
bool fct_gather_is_cpu_bound(fct_pg *pg, int64_t rank_bytes);

/* ---- selection ---- */

/* Returns the transport of the next collective, or NULL with a Python exception. */
const fct_transport *fct_transport_select(fct_pg *pg, fct_device device, fct_use use);

/* ---- for csrc/python ---- */

/* Between enter and leave, collectives that any caller issues on the group use the selected
 * transport. `use` is the collective that follows, and `bytes` the size of this rank's input; 0:
 * unknown, not compared. *entered is the argument of fct_pg_leave_shm, NULL if the group uses its
 * own backend. Precondition: `use` is not FCT_USE_QUERY. */
FCT_CHECK int fct_transport_enter(fct_pg *pg, fct_use use, int64_t bytes, void **entered);
/* Pauses or resumes shared memory for a group. All ranks must call the function at the same point
 * of their programs. */
FCT_CHECK int fct_transport_pause(fct_pg *pg, bool paused);

#endif
