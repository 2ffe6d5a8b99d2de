/* Process groups: handles, and what csrc/transport needs of them. */
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
/* Whether ReduceOp.PREMUL_SUM may be passed to the backend of `device`. False only for gloo. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device);

/* ---- for csrc/transport ---- */

int64_t fct_pg_world_size(const fct_pg *pg);
int64_t fct_pg_rank(const fct_pg *pg);
const char *fct_pg_name(const fct_pg *pg); /* valid while the caller owns the handle */
/* Whether the CPU backend calls itself gloo. */
bool fct_pg_is_gloo(fct_pg *pg);
/* Whether the CPU backend is torch's gloo and not a wrapper with the same name. */
bool fct_pg_has_plain_gloo(const fct_pg *pg);
/* Whether a debug level of torch.distributed is set. */
bool fct_c10d_is_debugged(void);

/* An object of csrc/transport that lives as long as the ProcessGroup, which may be longer than its
 * handle. get returns NULL if there is none. attach takes `object`; `release` is called with the
 * GIL some time after the end of the group. */
void *fct_pg_attachment(fct_pg *pg);
void fct_pg_attach(fct_pg *pg, void *object, void (*release)(void *object));

/* An all-gather of integers over the group's own CPU backend, counted. It is issued below the
 * dispatcher, so nothing observes it. start does not wait. wait runs signal handlers, and may be
 * called again after one raised. It writes the integers of all ranks, in rank order, to *results,
 * which is valid while the caller owns a reference. */
typedef struct fct_exchange fct_exchange;
FCT_CHECK int fct_exchange_start(fct_pg *pg, const int64_t *values, size_t count,
                                 fct_exchange **out);
FCT_CHECK int fct_exchange_wait(fct_exchange *exchange, const int64_t **results);
void fct_exchange_retain(fct_exchange *exchange);
void fct_exchange_release(fct_exchange *exchange); /* NULL is allowed */

#ifdef __cplusplus
}
#endif

#endif
