/* Negotiations between processes, for the tests of transport/negotiation, transport/agreement and
 * transport/sequence. An exchange of the bridge stores its integers in memory that all ranks share.
 */
#ifndef FSDP_C_TESTS_NEGOTIATION_RANKS_H
#define FSDP_C_TESTS_NEGOTIATION_RANKS_H

#include "transport_ranks.h"

#include "bridge/error.h"
#include "transport/group_users.h"
#include "transport/negotiation.h"

#include <sched.h>

/* ---- the bridge ---- */

enum { ROUNDS = 24, INTEGERS = OP_CHECKSUM_KINDS * OP_CHECKSUMS };

/* The integers of all rounds, in the memory of all ranks. */
typedef struct exchanged {
    int64_t values[ROUNDS][SHM_RING_MAX_RANKS * INTEGERS];
    int arrived[ROUNDS];
} exchanged;

static exchanged *shared_rounds;

struct fct_pg {
    int64_t rank, world;
    bool plain_gloo;
};

struct fct_exchange {
    int round, owners;
};

static struct fct_pg group;
static int rounds; /* exchanges that this rank has started */
static int live_exchanges;
static int interruptions, failing_starts; /* waits and starts that fail from now on */
static int attached;                      /* calls of attach() */
static void (*during_start)(void);        /* runs while a start has released the GIL; NULL: none */

int64_t fct_pg_world_size(const fct_pg *pg) {
    return pg->world;
}

int64_t fct_pg_rank(const fct_pg *pg) {
    return pg->rank;
}

const char *fct_pg_name(const fct_pg *pg) {
    (void)pg;
    return "group";
}

bool fct_pg_has_plain_gloo(const fct_pg *pg) {
    return pg->plain_gloo;
}

bool fct_c10d_is_debugged(void) {
    return false;
}

int fct_exchange_start(fct_pg *pg, const int64_t *values, size_t count, fct_exchange **out) {
    if (failing_starts > 0) {
        failing_starts--;
        return -1;
    }
    require(rounds < ROUNDS && count <= INTEGERS);
    fct_exchange *exchange = (fct_exchange *)malloc(sizeof *exchange);
    *exchange = (fct_exchange){rounds++, 1};
    live_exchanges++;
    memcpy(&shared_rounds->values[exchange->round][(size_t)pg->rank * count], values,
           count * sizeof *values);
    (void)__atomic_fetch_add(&shared_rounds->arrived[exchange->round], 1, __ATOMIC_SEQ_CST);
    if (during_start != NULL) {
        during_start();
    }
    *out = exchange;
    return 0;
}

int fct_exchange_start_distinct(fct_pg *pg, const int64_t *values, size_t count,
                                fct_exchange **out) {
    return fct_exchange_start(pg, values, count, out);
}

int fct_exchange_wait(fct_exchange *exchange, const int64_t **results) {
    if (interruptions > 0) {
        interruptions--;
        return -1;
    }
    while (__atomic_load_n(&shared_rounds->arrived[exchange->round], __ATOMIC_SEQ_CST) <
           (int)group.world) {
        (void)sched_yield();
    }
    *results = shared_rounds->values[exchange->round];
    return 0;
}

void fct_exchange_retain(fct_exchange *exchange) {
    exchange->owners++;
}

void fct_exchange_release(fct_exchange *exchange) {
    if (exchange != NULL && --exchange->owners == 0) {
        live_exchanges--;
        free(exchange);
    }
}

void fct_error_no_memory(void) {}

static char raised[FCT_DIFFERENCE_BYTES]; /* the text of the last RuntimeError */

void fct_error_runtime(const char *text) {
    (void)snprintf(raised, sizeof raised, "%s", text);
}

int fct_pg_stop_waits(fct_pg *pg, const char *text) {
    (void)pg;
    require(text[0] != '\0');
    return 0;
}

static int attach(fct_pg *pg, shm_negotiation *n, bool *added) {
    (void)pg;
    (void)n;
    attached++;
    *added = true;
    return 0;
}

/* ---- helpers ---- */

static shm_negotiation *begin(void) {
    rounds = attached = 0;
    group = (struct fct_pg){me.rank, me.world, true};
    shm_negotiation *n = shm_negotiation_new();
    require(n != NULL);
    return n;
}

/* Runs a negotiation. Returns whether it accepted shared memory. */
__attribute__((unused)) static bool negotiate(shm_negotiation *n, fct_use use) {
    bool accepted = false;
    require(shm_negotiation_run(n, &group, use, attach, &accepted) == 0);
    return accepted;
}

/* Runs gathers until one is accepted. Returns the number that the fallback moved, or -1 if none of
 * 100 gathers is accepted. */
__attribute__((unused)) static int count_fallback_gathers(shm_negotiation *n) {
    for (int gathers = 0; gathers < 100; gathers++) {
        if (negotiate(n, FCT_USE_GATHER)) {
            return gathers;
        }
        shm_negotiation_count_gather(n);
    }
    return -1;
}

static void end(shm_negotiation *n) {
    shm_negotiation_release(n);
    require(live_exchanges == 0);
}

static void run_negotiation(void (*run)(void), int world) {
    shared_rounds = (exchanged *)mmap(NULL, sizeof *shared_rounds, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared_rounds != MAP_FAILED);
    run_ranks(run, world);
    (void)munmap(shared_rounds, sizeof *shared_rounds);
}

static fct_plan_result compare(shm_negotiation *n, uint64_t plan, bool waits) {
    fct_plan_result result;
    require(shm_negotiation_compare_plan(n, &group, plan, waits, attach, &result) == 0);
    return result;
}

#endif
