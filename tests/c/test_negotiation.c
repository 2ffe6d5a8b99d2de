/* The negotiation about shared memory, between processes. This file implements the functions of the
 * bridge that it calls: an exchange stores its integers in memory that all ranks share. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

#include "transport/negotiation.h"

#include <sched.h>

/* ---- the bridge ---- */

enum { ROUNDS = 4, INTEGERS = 4 };

/* The integers of all rounds, in the memory of all ranks. */
typedef struct exchanged {
    int64_t values[ROUNDS][SHM_RING_MAX_RANKS * INTEGERS];
    int arrived[ROUNDS];
} exchanged;

static exchanged *wire;

struct fct_pg {
    int64_t rank, world;
    bool plain_gloo;
};

struct fct_exchange {
    int round, owners;
};

static struct fct_pg group;
static int rounds, live_exchanges, interruptions, failing_starts, attached;

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
    fct_exchange *exchange = (fct_exchange *)malloc(sizeof *exchange);
    *exchange = (fct_exchange){rounds++, 1};
    live_exchanges++;
    memcpy(&wire->values[exchange->round][(size_t)pg->rank * count], values,
           count * sizeof *values);
    (void)__atomic_fetch_add(&wire->arrived[exchange->round], 1, __ATOMIC_SEQ_CST);
    *out = exchange;
    return 0;
}

int fct_exchange_wait(fct_exchange *exchange, const int64_t **results) {
    if (interruptions > 0) {
        interruptions--;
        return -1;
    }
    while (__atomic_load_n(&wire->arrived[exchange->round], __ATOMIC_SEQ_CST) < (int)group.world) {
        (void)sched_yield();
    }
    *results = wire->values[exchange->round];
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

static bool is_accepted(shm_negotiation *n, fct_use use) {
    bool accepted = false;
    require(shm_negotiation_run(n, &group, use, attach, &accepted) == 0);
    return accepted;
}

/* Runs gathers until one is accepted. Returns the number that the fallback moved. */
static int count_fallback_gathers(shm_negotiation *n) {
    for (int gathers = 0; gathers < 100; gathers++) {
        if (is_accepted(n, FCT_USE_GATHER)) {
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
    wire = (exchanged *)mmap(NULL, sizeof *wire, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    assert_true(wire != MAP_FAILED);
    run_ranks(run, world);
    (void)munmap(wire, sizeof *wire);
}

/* ---- agreement ---- */

/* Rank r has r + 1 parameter groups. The number of fallback gathers is twice the largest number. */
static void accept_after_the_same_gathers(void) {
    shm_negotiation *n = begin();
    for (int i = 0; i <= me.rank; i++) {
        require(shm_negotiation_register_user("group"));
    }
    require(shm_negotiation_register_user("another group"));
    require(shm_negotiation_active_transport(n) == NULL);
    require(count_fallback_gathers(n) == 2 * me.world && rounds == 2 && attached == 1);
    shm_transport *transport = shm_negotiation_active_transport(n);
    require(transport != NULL && is_accepted(n, FCT_USE_REDUCE) && rounds == 2);
    barrier(); /* a peer may map this rank's ring */
    shm_negotiation_close(n);
    require(shm_negotiation_active_transport(n) == NULL && !is_accepted(n, FCT_USE_GATHER));
    float value = 0;
    shm_request request = {.kind = FCT_OP_ALL_REDUCE,
                           .dtype = FCK_FLOAT32,
                           .itemsize = sizeof value,
                           .rank = me.rank,
                           .world = me.world,
                           .bytes = sizeof value,
                           .output = (char *)&value,
                           .timeout_ms = 1000,
                           .dtype_name = name_dtype};
    issued op = {0};
    op.collective = shm_collective_new(&request);
    require(shm_collective_start(op.collective, transport,
                                 (shm_owner){&op.work, complete_work, release_work},
                                 me.error) == SHM_SUBMIT_FAILED);
    require(strcmp(me.error, "the process group has ended") == 0);
    shm_collective_free(op.collective);
    shm_transport_release(transport);
    end(n);
}

static void all_ranks_accept_after_the_same_number_of_gathers(void **state) {
    (void)state;
    run_negotiation(accept_after_the_same_gathers, 2);
    run_negotiation(accept_after_the_same_gathers, 3);
}

static void query_both_rounds(void) {
    shm_negotiation *n = begin();
    require(is_accepted(n, FCT_USE_QUERY) && rounds == 2);
    barrier();
    end(n);
}

static void negotiation_query_waits_for_both_rounds(void **state) {
    (void)state;
    run_negotiation(query_both_rounds, 2);
}

/* A reduce-scatter may wait for round 1, and not for round 2. */
static void reduce_between_the_rounds(void) {
    shm_negotiation *n = begin();
    require(!is_accepted(n, FCT_USE_GATHER) && rounds == 1);
    shm_negotiation_count_gather(n);
    require(!is_accepted(n, FCT_USE_REDUCE) && rounds == 2);
    require(!is_accepted(n, FCT_USE_GATHER) && rounds == 2);
    shm_negotiation_count_gather(n);
    require(is_accepted(n, FCT_USE_GATHER));
    barrier();
    end(n);
}

static void reduce_scatter_issues_the_second_round(void **state) {
    (void)state;
    run_negotiation(reduce_between_the_rounds, 2);
}

static void paused_gathers_are_not_counted(void **state) {
    (void)state;
    shm_negotiation *n = shm_negotiation_new();
    shm_negotiation_set_paused(n, true);
    assert_true(shm_negotiation_is_paused(n));
    for (int i = 0; i < 10; i++) {
        shm_negotiation_count_gather(n);
    }
    shm_negotiation_set_paused(n, false);
    group = (struct fct_pg){0, 2, true};
    bool accepted = true;
    wire = (exchanged *)calloc(1, sizeof *wire);
    rounds = 0;
    assert_int_equal(shm_negotiation_run(n, &group, FCT_USE_GATHER, attach, &accepted), 0);
    assert_false(accepted); /* it would block if the gathers were counted */
    shm_negotiation_release(n);
    free(wire);
}

/* ---- vetoes ---- */

static void veto_on_rank_1(void) {
    if (me.rank == 1) {
        require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    }
    shm_negotiation *n = begin();
    require(count_fallback_gathers(n) == -1 && rounds == 1);
    require(attached == (me.rank == 1 ? 0 : 1));
    end(n);
}

static void veto_of_one_rank_declines_on_all(void **state) {
    (void)state;
    run_negotiation(veto_on_rank_1, 2);
}

static void decline_without_gloo(void) {
    shm_negotiation *n = begin();
    group.plain_gloo = false;
    require(count_fallback_gathers(n) == -1 && rounds == 0);
    end(n);
}

static void other_backends_decline_without_a_round(void **state) {
    (void)state;
    run_negotiation(decline_without_gloo, 2);
}

/* ---- failures ---- */

static void interrupt_each_wait(void) {
    shm_negotiation *n = begin();
    bool accepted = false;
    interruptions = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_QUERY, attach, &accepted) == -1 && rounds == 1);
    interruptions = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_QUERY, attach, &accepted) == -1 && rounds == 1);
    interruptions = 0;
    require(is_accepted(n, FCT_USE_QUERY) && rounds == 2);
    barrier();
    end(n);
}

static void interrupted_wait_may_be_repeated(void **state) {
    (void)state;
    run_negotiation(interrupt_each_wait, 2);
}

static void fail_to_issue_round_1(void) {
    shm_negotiation *n = begin();
    bool accepted = false;
    failing_starts = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_GATHER, attach, &accepted) == -1 && rounds == 0);
    require(is_accepted(n, FCT_USE_QUERY) && rounds == 2);
    barrier();
    end(n);
}

static void negotiation_round_is_issued_again_after_failed_issue(void **state) {
    (void)state;
    run_negotiation(fail_to_issue_round_1, 2);
}

static void close_while_connecting(void) {
    shm_negotiation *n = begin();
    require(!is_accepted(n, FCT_USE_GATHER));
    shm_negotiation_count_gather(n);
    require(!is_accepted(n, FCT_USE_REDUCE) && rounds == 2);
    barrier(); /* all ranks have mapped the rings */
    shm_negotiation_close(n);
    require(count_fallback_gathers(n) == -1);
    end(n);
}

static void end_of_the_group_during_the_negotiation_declines(void **state) {
    (void)state;
    run_negotiation(close_while_connecting, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_accept_after_the_same_number_of_gathers),
        cmocka_unit_test(negotiation_query_waits_for_both_rounds),
        cmocka_unit_test(reduce_scatter_issues_the_second_round),
        cmocka_unit_test(paused_gathers_are_not_counted),
        cmocka_unit_test(veto_of_one_rank_declines_on_all),
        cmocka_unit_test(other_backends_decline_without_a_round),
        cmocka_unit_test(interrupted_wait_may_be_repeated),
        cmocka_unit_test(negotiation_round_is_issued_again_after_failed_issue),
        cmocka_unit_test(end_of_the_group_during_the_negotiation_declines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
