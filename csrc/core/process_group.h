/* A process group that a parameter group uses, and its collectives. If the backend fails (dead
 * peer, timeout), the message names the operation, the modules, step and pass, and the rank. This
 * file has no access to parameters.
 *
 * Preconditions of the collectives: the struct has a name or a handle, and *work is NULL. The
 * functions over chunks require an open process group; fc_process_group_takes_chunks opens it. */
#ifndef FSDP_C_CORE_PROCESS_GROUP_H
#define FSDP_C_CORE_PROCESS_GROUP_H

#include "../transport/transport.h"
#include "status.h"

typedef struct fc_process_group {
    const char *name; /* name of the process group; borrowed; NULL: none */
    fct_pg *handle;   /* counted; resolved at first use */
    int64_t world;
    int64_t rank;
    uint64_t plan;      /* hash of the plan of the root over this process group, or FCT_PLAN_* */
    uint64_t root;      /* identifies the root on this rank; 0: unknown */
    uint64_t number;    /* number of the root, part of the labels; 0: not numbered yet */
    bool compared;      /* the plan was compared, or need not be */
    fct_op_label label; /* of the next collective; the caller sets all fields but unit and name */
    bool agreeing;      /* this struct has started an agreement and not waited for it */
} fc_process_group;

typedef enum fc_operation { FC_ALL_GATHER, FC_REDUCE_SCATTER, FC_ALL_REDUCE } fc_operation;

/* Releases the handle and sets the process group by name. `name` is borrowed; NULL: no process
 * group. */
void fc_process_group_set(fc_process_group *pg, const char *name, int64_t world, int64_t rank);
/* Releases the handle. The struct refers to no process group afterwards. */
void fc_process_group_fini(fc_process_group *pg);
/* Resolves the process group, unless it is resolved already. */
FC_CHECK fc_status fc_process_group_open(fc_process_group *pg);
/* Registers `more` collectives that may be in flight in addition to one per parameter group. */
FC_CHECK fc_status fc_process_group_register_users(const fc_process_group *pg, size_t more);

/* Sets the hash of the plan, and the root. The next call of fc_process_group_compare_plan numbers
 * the root and compares the plan. Call that function before the next collective. */
void fc_process_group_set_plan(fc_process_group *pg, uint64_t plan, uint64_t root);

/* Numbers the root over this process group, unless that was done. All ranks must number their roots
 * in the same order. No effect without a root, with one rank, or if the process group cannot be
 * resolved. */
FC_CHECK fc_status fc_process_group_number_root(fc_process_group *pg, fct_device device);
/* Numbers the root, and compares the plan with the other ranks before the collective `operation` of
 * `modules`, unless that was done. `waits`: the caller waits for that collective at once. Opens the
 * process group. */
FC_CHECK fc_status fc_process_group_compare_plan(fc_process_group *pg, const char *modules,
                                                 fc_operation operation, fct_device device,
                                                 bool waits, fct_plan_result *result);

/* Adds a checksum of the data that the ranks share after the latest collective of this struct, an
 * all-gather or an all-reduce of `modules`. 0: unknown. No effect if the process group cannot be
 * resolved. */
void fc_process_group_add_checksum(fc_process_group *pg, const char *modules,
                                   fc_operation operation, uint64_t checksum);
/* Writes the tag of such a checksum. Returns false if the process group cannot be resolved. */
bool fc_process_group_describe_checksum(fc_process_group *pg, const char *modules,
                                        fc_operation operation, fct_op_tag *tag);

/* Starts an agreement of the ranks on their collectives, and waits for it; see fct_agree_start.
 * Several structs may refer to one process group: the struct that has started an agreement waits
 * for it. The second function sets an error if the ranks have issued different collectives. An
 * agreement that is not waited for ends at the next start. */
FC_CHECK fc_status fc_process_group_start_agreement(fc_process_group *pg, const char *modules);
FC_CHECK fc_status fc_process_group_await_agreement(fc_process_group *pg, const char *modules,
                                                    fc_error *error);

/* Issue one collective and open the process group if necessary. Tensors and *work are as in
 * transport/transport.h. `modules`: FQNs of the modules, "" or NULL for the root. */
FC_CHECK fc_status fc_process_group_all_gather(fc_process_group *pg, const char *modules,
                                               fct_tensor *output, fct_tensor *input, bool async_op,
                                               fct_work **work);
FC_CHECK fc_status fc_process_group_reduce_scatter(fc_process_group *pg, const char *modules,
                                                   fct_tensor *output, fct_tensor *input,
                                                   fct_reduce_op op, double factor, bool async_op,
                                                   fct_work **work);
FC_CHECK fc_status fc_process_group_all_reduce(fc_process_group *pg, const char *modules,
                                               fct_tensor *tensor, fct_reduce_op op, bool async_op,
                                               fct_work **work);
/* Returns true if an all-gather of `rank_bytes` per rank is CPU-bound: the processors that compute
 * also copy the data. See transport/transport.h. Opens the process group; returns false on failure
 * and preserves a pending exception. */
bool fc_process_group_is_cpu_bound(fc_process_group *pg, int64_t rank_bytes);
/* All-gather and reduce-scatter over separate chunks; see transport/transport.h. takes_chunks opens
 * the process group and writes to *takes whether the transport supports chunks. */
FC_CHECK fc_status fc_process_group_takes_chunks(fc_process_group *pg, fct_device device,
                                                 fc_operation operation, bool *takes);
FC_CHECK fc_status fc_process_group_gather_chunks(fc_process_group *pg, const char *modules,
                                                  fct_tensor *const *chunks, size_t count,
                                                  const fct_chunk_layout *layout, fct_work **work);
FC_CHECK fc_status fc_process_group_reduce_chunks(fc_process_group *pg, const char *modules,
                                                  fct_tensor *output, fct_tensor *const *chunks,
                                                  size_t count, const fct_chunk_layout *layout,
                                                  fct_reduce_op op, fct_work **work);
/* Waits for `work`. Does nothing if it is NULL. */
FC_CHECK fc_status fc_process_group_complete(const fc_process_group *pg, const char *modules,
                                             fc_operation operation, fct_work *work);
/* Waits for *work, releases it and sets it to NULL. After a failure *work is unchanged. */
FC_CHECK fc_status fc_process_group_wait(const fc_process_group *pg, const char *modules,
                                         fc_operation operation, fct_work **work);

#endif
