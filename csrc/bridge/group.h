/* Handles of process groups, and the functions that csrc/transport needs. */
#ifndef FSDP_C_BRIDGE_GROUP_H
#define FSDP_C_BRIDGE_GROUP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_pg fct_pg; /* c10d::ProcessGroup, reference-counted */

/* Writes a new reference to the handle of the group with this registered name (pg.group_name). A
 * group has one handle, which its users share. */
FCT_CHECK int fct_pg_resolve(const char *name, fct_pg **out);
void fct_pg_retain(fct_pg *pg);  /* adds an owner of the handle; needs no GIL */
void fct_pg_release(fct_pg *pg); /* NULL is allowed */
/* Whether ReduceOp.PREMUL_SUM may be passed to the backend of `device`. False only for gloo. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device);

/* ---- for csrc/transport ---- */

int64_t fct_pg_world_size(const fct_pg *pg);
int64_t fct_pg_rank(const fct_pg *pg);
const char *fct_pg_name(const fct_pg *pg); /* valid while the caller owns the handle */
/* Whether the name of the CPU backend is gloo. False for a group of a Python subclass. */
bool fct_pg_is_gloo(fct_pg *pg);
/* Whether the CPU backend is torch's gloo and not a wrapper with the same name. */
bool fct_pg_has_plain_gloo(const fct_pg *pg);
/* Whether TORCH_DISTRIBUTED_DEBUG is set to a level above OFF. */
bool fct_c10d_is_debugged(void);

/* Ends the waits of all threads for collectives of the CPU backend, now and later, with
 * RuntimeError(text). */
FCT_CHECK int fct_pg_stop_waits(fct_pg *pg, const char *text);

/* An object of csrc/transport that the ProcessGroup keeps. A ProcessGroup may outlive its handle.
 * fct_pg_attachment returns NULL if there is none. fct_pg_attach takes ownership of `object` and
 * releases the former object. After the group has ended, the first call of fct_pg_attachment
 * for another handle releases the object. `release` is called with the GIL held. */
void *fct_pg_attachment(fct_pg *pg);
void fct_pg_attach(fct_pg *pg, void *object, void (*release)(void *object));

/* An all-gather of integers over the group's own CPU backend, reference-counted. It is issued below
 * the dispatcher, so nothing observes it. start does not wait. wait runs signal handlers. If a
 * handler raised, wait may be called again. wait writes the integers of all ranks, in rank order,
 * to *results, which is valid while the caller owns a reference. */
typedef struct fct_exchange fct_exchange;
FCT_CHECK int fct_exchange_start(fct_pg *pg, const int64_t *values, size_t count,
                                 fct_exchange **out);
/* Like fct_exchange_start, but up to 64 ranks gloo does not match the messages with those of
 * gathers, reduce-scatters and all-reduces. If a peer issues one of these instead, both ranks wait.
 * With matching messages, gloo would end the process that receives a message of another size. Above
 * 64 ranks the function equals fct_exchange_start. */
FCT_CHECK int fct_exchange_start_distinct(fct_pg *pg, const int64_t *values, size_t count,
                                          fct_exchange **out);
FCT_CHECK int fct_exchange_wait(fct_exchange *exchange, const int64_t **results);
void fct_exchange_retain(fct_exchange *exchange);
void fct_exchange_release(fct_exchange *exchange); /* NULL is allowed */

#ifdef __cplusplus
}
#endif

#endif
