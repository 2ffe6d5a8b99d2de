/* The transport over the shared memory of one host. */
#ifndef FSDP_C_TRANSPORT_SHM_H
#define FSDP_C_TRANSPORT_SHM_H

#include "table.h"

extern const fct_transport fct_shm_transport;

/* Writes to *accepted whether all ranks use shared memory for the next collective of the group.
 * Precondition: `pg` is not NULL. */
FCT_CHECK int fct_shm_negotiate(fct_pg *pg, fct_use use, bool *accepted);

/* Whether the group uses shared memory, and an all-gather of rank shards of `shard_bytes` bytes
 * takes CPU time from computation. Precondition: `pg` is not NULL. */
bool fct_shm_is_cpu_bound(fct_pg *pg, size_t shard_bytes);

/* See shm_negotiation_compare_plan. Precondition: `pg` is not NULL. */
FCT_CHECK int fct_shm_compare_plan(fct_pg *pg, uint64_t plan, bool waits, fct_plan_result *result);

#endif
