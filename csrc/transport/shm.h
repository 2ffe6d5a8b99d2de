/* The transport over the shared memory of one host. */
#ifndef FSDP_C_TRANSPORT_SHM_H
#define FSDP_C_TRANSPORT_SHM_H

#include "table.h"

extern const fct_transport fct_shm_transport;

/* See shm_negotiation_compare_plan. Precondition: `pg` is not NULL. */
FCT_CHECK int fct_shm_compare_plan(fct_pg *pg, uint64_t plan, bool waits, fct_plan_result *result);

#endif
