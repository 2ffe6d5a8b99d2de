/* The negotiation between the ranks of a process group about shared memory.
 *
 * Precondition of the functions: the caller owns a reference to the negotiation. */
#ifndef FSDP_C_TRANSPORT_NEGOTIATION_H
#define FSDP_C_TRANSPORT_NEGOTIATION_H

#include <stdbool.h>
#include <stdint.h>

#include "../bridge/group.h"
#include "agreement.h"
#include "plans.h"
#include "sequence.h"
#include "shm_transport.h"

/* Whether the collectives of one process group use shared memory. The ranks negotiate once, in two
 * rounds. All users of the group share the object, which is reference-counted.
 *
 *     pending     The results of round 1 are not read yet. In round 1 each rank sends whether it
 *                 accepts shared memory, and the handle of its ring. It also sends its number of
 *                 users of the process group (group_negotiation.h), the hash of its plan, and
 *                 flags.
 *     connecting  All ranks accept. In round 2 each rank sends whether it mapped all rings. A rank
 *                 issues round 2 before its first gather or reduction after round 1, which is the
 *                 same collective on all ranks.
 *     accepted    All ranks have mapped all rings.
 *     declined    The fallback backend, gloo, moves the data.
 *
 * A rank does not wait where it issues a round, because its peers may be anywhere in their
 * programs. Exceptions: the rank waits for its gather anyway, or it issues its first all-reduce
 * (shm_negotiation_compare_plan). If a rank does not wait in round 1, gloo moves the
 * `fallback_gathers` gathers that follow a round. `fallback_gathers` is the largest number of users
 * on any rank. Before a rank issues one more gather, it has waited for one of these gathers. So its
 * peers have issued that gather, and the round before it. */
typedef struct shm_negotiation shm_negotiation;

/* The collective for which a transport is requested. A reduce-scatter may wait for round 1, because
 * it follows a gather that has been waited for. All-reduces count as gathers, because replicated
 * groups issue no others. A query is not a collective. A query waits for both rounds, so all ranks
 * must make it at the same point. */
typedef enum fct_use {
    FCT_USE_GATHER = 0,
    FCT_USE_REDUCE,
    FCT_USE_ALL_REDUCE,
    FCT_USE_QUERY,
} fct_use;

shm_negotiation *shm_negotiation_new(void); /* NULL: no memory */
void shm_negotiation_retain(shm_negotiation *n);
void shm_negotiation_release(shm_negotiation *n); /* NULL is allowed */

/* Registers the negotiation with the process group, so that the group's end calls
 * shm_negotiation_close. Writes false to *attached if the process group does not support a
 * negotiation. Returns -1 with a Python exception. */
typedef int (*shm_attach)(fct_pg *pg, shm_negotiation *n, bool *attached);

/* Writes to *accepted whether the next collective of `pg` uses shared memory. Issues the rounds.
 * Declines without a round if the group has one rank, or if the backend is not torch's gloo. Waits
 * run signal handlers. A call that a signal handler interrupted may be repeated. A rank offers its
 * ring only if `attach` succeeds. Idempotent until the caller counts a gather. Needs the GIL.
 * Precondition: the negotiation is not paused. */
FCT_CHECK int shm_negotiation_run(shm_negotiation *n, fct_pg *pg, fct_use use, shm_attach attach,
                                  bool *accepted);
/* Compares the hash of this rank's plan with those of all ranks, before a gather or an all-reduce.
 * Without a hash no comparison takes place. Round 1 carries the first hash of a process group.
 * Shared memory carries later hashes in the labels of messages (op_tag.h), and gloo in one exchange
 * per hash if all ranks wait in round 1. `waits`: the caller waits for its collective at once, so
 * the call waits for the answers, too. If all ranks wait in round 1, the call also completes round
 * 2, and the fallback moves no gather. Errors and repetition as in shm_negotiation_run. */
FCT_CHECK int shm_negotiation_compare_plan(shm_negotiation *n, fct_pg *pg, uint64_t plan,
                                           bool waits, shm_attach attach, fct_plan_result *result);
/* Writes the number that a root has in this process group: 1 for the root that is numbered first.
 * Roots with equal plans therefore have different labels. `root` identifies the root on this rank;
 * for 0 (no root) the number is 0. Returns -1 with a Python exception. */
FCT_CHECK int shm_negotiation_number_root(shm_negotiation *n, uint64_t root, uint64_t *number);
/* Counts a gather or all-reduce that the fallback has moved, unless the negotiation is paused. */
void shm_negotiation_count_gather(shm_negotiation *n);
/* Whether the ranks compare the sizes of the next collective. The condition is that of agreements:
 * see shm_negotiation_start_agreement. The ranks begin at the same collective, where all of them
 * have read the rounds and the negotiation is declined. */
bool shm_negotiation_compares_sizes(shm_negotiation *n);
/* Before the fallback moves a collective: raises a Python exception if another rank issues one of
 * another kind or size; see sequence.h. `signature` 0 or `tag` NULL: unknown. Compares nothing
 * unless shm_negotiation_compares_sizes. Errors and repetition as in shm_negotiation_run. */
FCT_CHECK int shm_negotiation_compare_size(shm_negotiation *n, fct_pg *pg, uint64_t signature,
                                           const fct_op_tag *tag);
/* Records a collective that the fallback has moved, for later comparisons. */
void shm_negotiation_record(shm_negotiation *n, uint64_t signature, const fct_op_tag *tag);
/* Records a collective of a device with streams. Needs no GIL. */
void shm_negotiation_record_of_device(shm_negotiation *n, const fct_op_tag *tag);
/* Returns the checksums of the data of completed collectives, on the CPU or on devices with
 * streams. The negotiation owns them. */
op_checksums *shm_negotiation_checksums(shm_negotiation *n);
op_checksums *shm_negotiation_device_checksums(shm_negotiation *n);
/* Starts an agreement and waits for it; see op_agreement_start and op_agreement_await. The ranks
 * agree if the guard of all of them is on, and none requests torch's flight recorder
 * (fct_requests_flight_recorder), which would show the agreements. Precondition of the first
 * function: this rank has waited for a recorded collective, if there is one. */
FCT_CHECK int shm_negotiation_start_agreement(shm_negotiation *n, fct_pg *pg, bool *issued);
bool shm_negotiation_agreement_waits(shm_negotiation *n); /* whether the start would wait */
FCT_CHECK int shm_negotiation_await_agreement(shm_negotiation *n, fct_pg *pg,
                                              fct_difference *difference);
/* Ends the waits for collectives of the process group, because the ranks issue different ones. The
 * waits and later collectives raise RuntimeError(text). */
FCT_CHECK int shm_negotiation_stop(shm_negotiation *n, fct_pg *pg, const char *text);
/* Raises RuntimeError(text) if the collectives are stopped. Needs no GIL. */
FCT_CHECK int shm_negotiation_check_stopped(const shm_negotiation *n);
/* Copies the latest recorded collectives; see op_agreement_copy. An agreement in flight follows as
 * one more entry, so `entries` has space for OP_ENTRIES + 1. */
size_t shm_negotiation_copy_entries(const shm_negotiation *n, op_entry *entries, uint64_t *first);
uint64_t shm_negotiation_recorded_count(const shm_negotiation *n); /* collectives */
/* Returns the hashes of the labels of collectives of devices with streams. The negotiation owns
 * them. */
const op_label_blocks *shm_negotiation_blocks(const shm_negotiation *n);
/* Returns the signature of a compared collective by its number among these, or 0. */
uint64_t shm_negotiation_signature_at(const shm_negotiation *n, uint64_t number);
/* While a negotiation is paused, the fallback moves all data. All ranks must call the setter at the
 * same point of their programs. */
void shm_negotiation_set_paused(shm_negotiation *n, bool paused);
bool shm_negotiation_is_paused(const shm_negotiation *n);

/* Returns a new reference to the transport of the next collective, or NULL if the fallback moves
 * its data. Any thread may call it. */
shm_transport *shm_negotiation_active_transport(shm_negotiation *n);
/* Called at the end of the group, by any thread. Aborts the transport. Later collectives use the
 * fallback, which reports the end. */
void shm_negotiation_close(shm_negotiation *n);

#endif
