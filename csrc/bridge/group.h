/* Process groups: handles, and allocators of their backends. */
#ifndef FSDP_C_BRIDGE_GROUP_H
#define FSDP_C_BRIDGE_GROUP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_pg fct_pg; /* c10d::ProcessGroup, counted */

/* A handle by the group's registered name (pg.group_name). Handles of one group are shared. */
FCT_CHECK int fct_pg_resolve(const char *name, fct_pg **out);
void fct_pg_release(fct_pg *pg); /* NULL is allowed */
/* Registers a parameter group that gathers over the process group `name`, or a bucket that is
 * all-reduced over it. The negotiation needs their number: as many collectives may be in flight
 * before a rank waits. */
FCT_CHECK int fct_pg_register_user(const char *name);
/* Whether ReduceOp.PREMUL_SUM may be passed to the backend of `device`. False only for gloo. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device);

/* allocates: whether the backend of `device` has an allocator (NCCL registers its memory with the
 * network). empty: a new 1-D tensor of `numel` uninitialized elements from it, on the device's
 * current stream. Not an inference tensor, even in inference mode. */
FCT_CHECK int fct_pg_allocates(fct_pg *pg, fct_device device, bool *allocates);
FCT_CHECK int fct_pg_empty(fct_pg *pg, int64_t numel, fct_dtype dtype, fct_device device,
                           fct_tensor **out);

#ifdef __cplusplus
}
#endif

#endif
