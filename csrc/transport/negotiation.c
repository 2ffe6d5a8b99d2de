/* The negotiation of the shared-memory transport; see negotiation.h.
 * The GIL guards most fields of a negotiation. The mutex guards `state`, `transport` and `closed`,
 * because any thread may end the group. */
#include "negotiation.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/error.h"
#include "capabilities.h"
#include "group_users.h"

typedef enum negotiation_state { PENDING = 0, CONNECTING, ACCEPTED, DECLINED } negotiation_state;

/* Integers of round 1. PID is 0 for a veto, or without a ring. PLAN is a hash or FCT_PLAN_*. */
enum { FALLBACK_GATHERS = 0, PID, FD, TOKEN, PLAN, FLAGS, CAPABILITY_INTEGERS };
/* Flags: the rank waits for its gather, and the rank allows agreements. */
enum { WAITS = 1, AGREES = 2 };

/* The integer of round 2: whether a rank mapped all rings, and whether it has fewer than two CPUs
 * for each rank. */
enum { NOT_CONNECTED = 0, CONNECTED, CONNECTED_OVERSUBSCRIBED };

struct shm_negotiation {
    atomic_uint owners;
    pthread_mutex_t mutex; /* guards `state`, `transport` and `closed` */
    negotiation_state state;
    shm_transport *transport; /* NULL if declined */
    bool paused;
    bool attached;   /* a second call of shm_attach would close the negotiation */
    bool closed;     /* shm_negotiation_close was called */
    int64_t gathers; /* number of gathers that gloo has moved */
    /* Gathers that gloo moves after each round. While pending, the number of this rank. */
    int64_t fallback_gathers;
    int64_t connected_after;    /* the value of `gathers` at which round 2 may be waited for */
    fct_exchange *capabilities; /* round 1; NULL: not issued, or read */
    fct_exchange *connection;   /* round 2; NULL: not issued, or read */
    shm_ring_handle *handles;   /* of all ranks, from round 1 until the rings are mapped */
    bool waits;                 /* sent in round 1 */
    bool compares;              /* all ranks have sent a plan in round 1 */
    bool compares_later_plans;  /* and all ranks wait */
    uint64_t first_plan;        /* sent in round 1 */
    fct_plan_result first_result;
    op_plan_list plans; /* later plans */
    uint64_t *roots;    /* [root_count] in the order of their numbers */
    size_t root_count;
    bool agrees; /* on all ranks the guard is on, and agreements are allowed */
    op_agreement agreement;
    op_checksums device_checksums; /* of devices with streams */
    op_sequence sequence;
    char stopped[FCT_DIFFERENCE_BYTES]; /* "": not stopped */
};

/* ---- life ---- */

shm_negotiation *shm_negotiation_new(void) {
    shm_negotiation *n = (shm_negotiation *)calloc(1, sizeof *n);
    if (n != NULL) {
        atomic_init(&n->owners, 1);
        (void)pthread_mutex_init(&n->mutex, NULL);
    }
    return n;
}

void shm_negotiation_retain(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    (void)atomic_fetch_add(&n->owners, 1);
}

void shm_negotiation_release(shm_negotiation *n) {
    assert(n == NULL || atomic_load(&n->owners) > 0);
    if (n == NULL || atomic_fetch_sub(&n->owners, 1) != 1) {
        return;
    }
    fct_exchange_release(n->capabilities);
    fct_exchange_release(n->connection);
    op_plans_fini(&n->plans);
    free(n->roots);
    op_agreement_fini(&n->agreement);
    op_checksums_fini(&n->device_checksums);
    op_sequence_fini(&n->sequence);
    shm_transport_release(n->transport);
    free(n->handles);
    (void)pthread_mutex_destroy(&n->mutex);
    free(n);
}

/* ---- state ---- */

static negotiation_state get_state(shm_negotiation *n) {
    (void)pthread_mutex_lock(&n->mutex);
    const negotiation_state state = n->state;
    (void)pthread_mutex_unlock(&n->mutex);
    return state;
}

/* Sets the state and the transport, and takes the reference to the transport. After the end of the
 * group the state remains DECLINED. Returns the reference that the caller must release. */
static shm_transport *set_state(shm_negotiation *n, negotiation_state state,
                                shm_transport *transport) {
    (void)pthread_mutex_lock(&n->mutex);
    shm_transport *released = n->transport;
    if (n->closed) {
        released = transport;
    } else {
        n->state = state;
        n->transport = transport;
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return released;
}

static void decline(shm_negotiation *n) {
    shm_transport_release(set_state(n, DECLINED, NULL));
}

shm_transport *shm_negotiation_active_transport(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    (void)pthread_mutex_lock(&n->mutex);
    shm_transport *transport = n->state == ACCEPTED ? n->transport : NULL;
    if (transport != NULL) {
        shm_transport_retain(transport);
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return transport;
}

void shm_negotiation_close(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    (void)pthread_mutex_lock(&n->mutex);
    shm_transport *transport = n->transport;
    n->transport = NULL;
    n->state = DECLINED;
    n->closed = true;
    (void)pthread_mutex_unlock(&n->mutex);
    if (transport != NULL) {
        shm_transport_abort(transport, "the process group has ended");
        shm_transport_release(transport);
    }
}

void shm_negotiation_count_gather(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    n->gathers += n->paused ? 0 : 1;
}

void shm_negotiation_set_paused(shm_negotiation *n, bool paused) {
    assert(atomic_load(&n->owners) > 0);
    n->paused = paused;
}

bool shm_negotiation_is_paused(const shm_negotiation *n) {
    return n->paused;
}

/* ---- rounds ---- */

/* Waits for the round of *exchange. Writes the integers of all ranks to *results, valid while the
 * returned reference is held. Returns NULL with a Python exception. */
static fct_exchange *wait_for_round(fct_exchange *exchange, const int64_t **results) {
    fct_exchange_retain(exchange); /* another thread may read the round meanwhile */
    if (fct_exchange_wait(exchange, results) != 0) {
        fct_exchange_release(exchange);
        return NULL;
    }
    return exchange;
}

static void end_round(fct_exchange **round) {
    fct_exchange_release(*round);
    *round = NULL;
}

/* Reads an agreement whose wait an exception has interrupted. If the ranks differ, the other ranks
 * search for the first difference, and this rank must take part before it issues anything else. */
static int finish_agreement(shm_negotiation *n, fct_pg *pg) {
    fct_difference difference;
    if (n->agreement.round == NULL) {
        return 0;
    }
    if (op_agreement_await(&n->agreement, pg, &difference) != 0) {
        return -1;
    }
    if (difference.text[0] != '\0') {
        fct_error_runtime(difference.text);
        return -1;
    }
    return 0;
}

/* Opens this rank's ring and issues round 1. */
static int start_negotiation(shm_negotiation *n, fct_pg *pg, shm_attach attach) {
    if (fct_pg_world_size(pg) < 2 || !fct_pg_has_plain_gloo(pg)) {
        decline(n);
        return 0;
    }
    const int64_t count = fct_group_users_take(fct_pg_name(pg));
    n->fallback_gathers = count > n->fallback_gathers ? count : n->fallback_gathers;
    int64_t values[CAPABILITY_INTEGERS] = {0};
    values[FALLBACK_GATHERS] = n->fallback_gathers;
    values[PLAN] = (int64_t)n->first_plan;
    values[FLAGS] = (n->waits ? WAITS : 0) | (fct_requests_flight_recorder() ? 0 : AGREES);
    if (fct_accepts_shared_memory()) {
        if (!n->attached && attach(pg, n, &n->attached) != 0) {
            return -1;
        }
        shm_transport *transport = n->attached ? shm_transport_open() : NULL;
        if (transport != NULL) {
            const shm_ring_handle handle = shm_transport_handle(transport);
            values[PID] = handle.pid;
            values[FD] = handle.fd;
            values[TOKEN] = handle.token;
        }
        shm_transport_release(set_state(n, PENDING, transport));
    }
    return fct_exchange_start(pg, values, CAPABILITY_INTEGERS, &n->capabilities);
}

/* Waits for round 1 and applies its results, unless another thread has applied them during the
 * wait. */
static int read_capabilities(shm_negotiation *n, fct_pg *pg) {
    const int64_t *results = NULL;
    fct_exchange *round = wait_for_round(n->capabilities, &results);
    if (round == NULL) {
        return -1;
    }
    if (get_state(n) == PENDING && n->capabilities == round) {
        const int64_t world = fct_pg_world_size(pg);
        bool all_accept = true, all_wait = true, all_agree = true;
        n->compares = true;
        n->handles = (shm_ring_handle *)malloc((size_t)world * sizeof *n->handles);
        for (int64_t rank = 0; rank < world; rank++) {
            const int64_t *values = results + rank * CAPABILITY_INTEGERS;
            const int64_t gathers = values[FALLBACK_GATHERS];
            n->fallback_gathers = gathers > n->fallback_gathers ? gathers : n->fallback_gathers;
            all_accept = all_accept && values[PID] != 0;
            all_wait = all_wait && (values[FLAGS] & WAITS) != 0;
            all_agree = all_agree && (values[FLAGS] & AGREES) != 0 && values[PLAN] != FCT_PLAN_OFF;
            n->compares = n->compares && op_is_plan(values[PLAN]);
            if (n->handles != NULL) {
                n->handles[rank] = (shm_ring_handle){values[PID], values[FD], values[TOKEN]};
            }
        }
        n->fallback_gathers = all_wait ? 0 : n->fallback_gathers;
        n->compares_later_plans = n->compares && all_wait;
        n->agrees = all_agree;
        n->first_result = op_plans_compare(results + PLAN, world, CAPABILITY_INTEGERS);
        end_round(&n->capabilities);
        if (all_accept) {
            (void)pthread_mutex_lock(&n->mutex);
            n->state = n->closed ? DECLINED : CONNECTING;
            (void)pthread_mutex_unlock(&n->mutex);
        } else {
            decline(n);
        }
    }
    fct_exchange_release(round);
    return 0;
}

/* Maps the peers' rings and issues round 2. */
static int connect_ranks(shm_negotiation *n, fct_pg *pg) {
    shm_ring_handle *handles = n->handles;
    n->handles = NULL;
    /* The state stays DECLINED if the round cannot be issued. */
    shm_transport *transport = set_state(n, DECLINED, NULL);
    const int world = (int)fct_pg_world_size(pg);
    const bool connected = transport != NULL && handles != NULL &&
                           shm_transport_connect(transport, (int)fct_pg_rank(pg), world, handles);
    const bool oversubscribed = fct_available_cpus() < 2 * world;
    const int64_t value = !connected       ? NOT_CONNECTED
                          : oversubscribed ? CONNECTED_OVERSUBSCRIBED
                                           : CONNECTED;
    free(handles);
    n->connected_after = n->gathers + n->fallback_gathers;
    if (fct_exchange_start(pg, &value, 1, &n->connection) != 0) {
        shm_transport_release(transport);
        return -1;
    }
    shm_transport_release(set_state(n, CONNECTING, transport));
    return 0;
}

/* Waits for round 2 and applies its results, unless another thread has applied them during the
 * wait. */
static int read_connection(shm_negotiation *n, fct_pg *pg) {
    const int64_t *results = NULL;
    fct_exchange *round = wait_for_round(n->connection, &results);
    if (round == NULL) {
        return -1;
    }
    if (get_state(n) == CONNECTING && n->connection == round) {
        const int64_t world = fct_pg_world_size(pg);
        int64_t smallest = CONNECTED_OVERSUBSCRIBED, largest = NOT_CONNECTED;
        for (int64_t rank = 0; rank < world; rank++) {
            smallest = results[rank] < smallest ? results[rank] : smallest;
            largest = results[rank] > largest ? results[rank] : largest;
        }
        end_round(&n->connection);
        if (smallest == NOT_CONNECTED) {
            decline(n);
        } else {
            (void)pthread_mutex_lock(&n->mutex);
            if (n->transport != NULL && largest == CONNECTED_OVERSUBSCRIBED) {
                shm_transport_set_oversubscribed(n->transport);
            }
            n->state = n->closed ? DECLINED : ACCEPTED;
            (void)pthread_mutex_unlock(&n->mutex);
        }
    }
    fct_exchange_release(round);
    return 0;
}

int shm_negotiation_run(shm_negotiation *n, fct_pg *pg, fct_use use, shm_attach attach,
                        bool *accepted) {
    assert(!n->paused && attach != NULL);
    if (finish_agreement(n, pg) != 0) {
        return -1;
    }
    const bool is_gather = use == FCT_USE_GATHER || use == FCT_USE_ALL_REDUCE;
    negotiation_state state = get_state(n);
    if (state == PENDING && n->capabilities == NULL && start_negotiation(n, pg, attach) != 0) {
        return -1;
    }
    state = get_state(n);
    if (state == PENDING && !(is_gather && n->gathers < n->fallback_gathers) &&
        read_capabilities(n, pg) != 0) {
        return -1;
    }
    state = get_state(n);
    if (state == CONNECTING && n->connection == NULL &&
        !(is_gather && n->gathers < n->fallback_gathers) && connect_ranks(n, pg) != 0) {
        return -1;
    }
    state = get_state(n);
    if (state == CONNECTING && n->connection != NULL && use != FCT_USE_REDUCE &&
        !(is_gather && n->gathers < n->connected_after) && read_connection(n, pg) != 0) {
        return -1;
    }
    *accepted = get_state(n) == ACCEPTED;
    return 0;
}

/* ---- comparison of sizes ---- */

bool shm_negotiation_compares_sizes(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    return n->agrees && n->gathers >= n->fallback_gathers && get_state(n) == DECLINED;
}

int shm_negotiation_check_stopped(const shm_negotiation *n) {
    if (n->stopped[0] != '\0') {
        fct_error_runtime(n->stopped);
        return -1;
    }
    return 0;
}

/* `kind`: of an op_entry. */
static int compare_size(shm_negotiation *n, fct_pg *pg, uint64_t kind, uint64_t signature,
                        const fct_op_tag *tag) {
    if (shm_negotiation_check_stopped(n) != 0 || finish_agreement(n, pg) != 0) {
        return -1;
    }
    if (!shm_negotiation_compares_sizes(n) || op_sequence_expects(&n->sequence, signature)) {
        return 0;
    }
    op_entry entry = {.hash = 1, .kind = kind};
    fct_difference difference;
    if (tag != NULL) {
        entry.label = tag->label;
        entry.hash = tag->label.unit != 0 ? 1 : 0;
    }
    if (op_sequence_compare(&n->sequence, pg, signature, &entry, &difference) != 0) {
        return -1;
    }
    if (difference.text[0] != '\0') {
        fct_error_runtime(difference.text);
        return -1;
    }
    return 0;
}

/* Compares an exchange of fsdp_c as a collective before its issue. `kind`: of its op_entry. */
static int compare_exchange(shm_negotiation *n, fct_pg *pg, uint64_t kind) {
    return compare_size(n, pg, kind, op_signature(kind, 0), NULL);
}

/* Adds a collective that was issued. */
static void add_signature(shm_negotiation *n, uint64_t signature) {
    if (shm_negotiation_compares_sizes(n)) {
        op_sequence_add(&n->sequence, signature);
    }
}

/* ---- comparison of plans ---- */

/* Waits for the exchange of a plan. `hash` identifies the entry, because another thread may add
 * plans during the wait. */
static int read_plan(shm_negotiation *n, fct_pg *pg, uint64_t hash) {
    const int64_t *hashes = NULL;
    fct_exchange *round = wait_for_round(op_plans_find(&n->plans, hash)->round, &hashes);
    if (round == NULL) {
        return -1;
    }
    op_plan *plan = op_plans_find(&n->plans, hash);
    if (plan->round == round) {
        plan->result = op_plans_compare(hashes, fct_pg_world_size(pg), 1);
        end_round(&plan->round);
    }
    fct_exchange_release(round);
    return 0;
}

/* Compares a plan that round 1 did not carry, if all ranks sent a plan in round 1 and waited. This
 * condition is equal on all ranks, so either all of them or none issue the exchange. */
static int compare_later_plan(shm_negotiation *n, fct_pg *pg, uint64_t hash, bool waits,
                              fct_plan_result *result) {
    const bool labels_are_compared = get_state(n) == ACCEPTED && !n->paused;
    if (!n->compares_later_plans || labels_are_compared) {
        return 0;
    }
    const int64_t value = (int64_t)hash;
    op_plan *plan = op_plans_find(&n->plans, hash);
    plan = plan != NULL ? plan : op_plans_add(&n->plans, hash);
    if (plan == NULL) {
        fct_error_no_memory();
        return -1;
    }
    if (plan->round == NULL && plan->result.state == FCT_PLANS_UNKNOWN) {
        fct_exchange *round = NULL;
        if (compare_exchange(n, pg, OP_PLAN_COMPARISON) != 0 ||
            fct_exchange_start(pg, &value, 1, &round) != 0) {
            return -1;
        }
        op_plans_find(&n->plans, hash)->round = round;
        add_signature(n, op_signature(OP_PLAN_COMPARISON, 0));
    }
    plan = op_plans_find(&n->plans, hash);
    if (plan->round != NULL && waits && read_plan(n, pg, hash) != 0) {
        return -1;
    }
    *result = op_plans_find(&n->plans, hash)->result;
    return 0;
}

/* Completes round 1. If all ranks wait, also completes round 2. */
static int settle_rounds(shm_negotiation *n, fct_pg *pg) {
    if (get_state(n) == PENDING && read_capabilities(n, pg) != 0) {
        return -1;
    }
    if (get_state(n) != CONNECTING || n->fallback_gathers != 0) {
        return 0;
    }
    if (n->connection == NULL && connect_ranks(n, pg) != 0) {
        return -1;
    }
    return n->connection != NULL ? read_connection(n, pg) : 0;
}

int shm_negotiation_compare_plan(shm_negotiation *n, fct_pg *pg, uint64_t plan, bool waits,
                                 shm_attach attach, fct_plan_result *result) {
    assert(attach != NULL && result != NULL);
    *result = (fct_plan_result){.state = FCT_PLANS_EQUAL};
    if (get_state(n) == PENDING && n->capabilities == NULL) {
        if (n->paused) {
            return 0;
        }
        n->waits = waits;
        n->first_plan = plan;
        if (start_negotiation(n, pg, attach) != 0) {
            return -1;
        }
    }
    const bool is_first = plan == n->first_plan;
    if (n->capabilities != NULL && !waits && is_first) {
        *result = n->first_result; /* unknown */
        return 0;
    }
    if (!is_first && !n->waits) {
        return 0; /* a wait for round 1 could deadlock with gathers of another process group */
    }
    if (settle_rounds(n, pg) != 0) {
        return -1;
    }
    if (plan > FCT_PLAN_UNKNOWN && !is_first) {
        return compare_later_plan(n, pg, plan, waits, result);
    }
    *result = is_first && n->compares ? n->first_result : *result;
    return 0;
}

int shm_negotiation_number_root(shm_negotiation *n, uint64_t root, uint64_t *number) {
    assert(atomic_load(&n->owners) > 0);
    size_t i = 0;
    while (root != 0 && i < n->root_count && n->roots[i] != root) {
        i++;
    }
    if (root != 0 && i == n->root_count) {
        uint64_t *roots = (uint64_t *)realloc(n->roots, (i + 1) * sizeof *roots);
        if (roots == NULL) {
            fct_error_no_memory();
            return -1;
        }
        n->roots = roots;
        n->roots[n->root_count++] = root;
    }
    *number = root != 0 ? i + 1 : 0;
    return 0;
}

/* ---- collectives of the fallback ---- */

int shm_negotiation_compare_size(shm_negotiation *n, fct_pg *pg, uint64_t signature,
                                 const fct_op_tag *tag) {
    assert(atomic_load(&n->owners) > 0);
    return compare_size(n, pg, tag != NULL ? (uint64_t)tag->kind : OP_OF_TORCH, signature, tag);
}

void shm_negotiation_record(shm_negotiation *n, uint64_t signature, const fct_op_tag *tag) {
    assert(atomic_load(&n->owners) > 0);
    op_agreement_add(&n->agreement, tag);
    add_signature(n, signature);
}

void shm_negotiation_record_of_device(shm_negotiation *n, const fct_op_tag *tag) {
    assert(atomic_load(&n->owners) > 0);
    op_agreement_add_of_device(&n->agreement, tag);
}

op_checksums *shm_negotiation_checksums(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    return &n->agreement.checksums;
}

op_checksums *shm_negotiation_device_checksums(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    return &n->device_checksums;
}

int shm_negotiation_start_agreement(shm_negotiation *n, fct_pg *pg, bool *issued) {
    assert(atomic_load(&n->owners) > 0);
    *issued = false;
    const bool needed = op_agreement_is_needed(&n->agreement);
    if (needed && n->capabilities != NULL && read_capabilities(n, pg) != 0) {
        return -1;
    }
    if (n->agrees && needed) {
        if (compare_exchange(n, pg, OP_AGREEMENT) != 0 ||
            op_agreement_start(&n->agreement, pg, issued) != 0) {
            return -1;
        }
        add_signature(n, op_signature(OP_AGREEMENT, 0));
    }
    return 0;
}

bool shm_negotiation_agreement_waits(shm_negotiation *n) {
    assert(atomic_load(&n->owners) > 0);
    const bool finishes = n->agreement.round != NULL; /* an agreement that was interrupted */
    const bool compares = shm_negotiation_compares_sizes(n) &&
                          !op_sequence_expects(&n->sequence, op_signature(OP_AGREEMENT, 0));
    return op_agreement_is_needed(&n->agreement) && (finishes || compares);
}

int shm_negotiation_await_agreement(shm_negotiation *n, fct_pg *pg, fct_difference *difference) {
    assert(atomic_load(&n->owners) > 0);
    return op_agreement_await(&n->agreement, pg, difference);
}

int shm_negotiation_stop(shm_negotiation *n, fct_pg *pg, const char *text) {
    assert(text != NULL && text[0] != '\0');
    (void)snprintf(n->stopped, sizeof n->stopped, "%s", text);
    return fct_pg_stop_waits(pg, n->stopped);
}

size_t shm_negotiation_copy_entries(const shm_negotiation *n, op_entry *entries, uint64_t *first) {
    size_t count = op_agreement_copy(&n->agreement, entries, first);
    if (n->agreement.round != NULL) {
        entries[count++] = (op_entry){.hash = 1, .kind = OP_AGREEMENT};
    }
    return count;
}

const op_label_blocks *shm_negotiation_blocks(const shm_negotiation *n) {
    return &n->agreement.blocks;
}

uint64_t shm_negotiation_recorded_count(const shm_negotiation *n) {
    return n->agreement.total;
}

uint64_t shm_negotiation_signature_at(const shm_negotiation *n, uint64_t number) {
    return op_prediction_at(&n->sequence.prediction, number);
}
