/* Random schedules of two to four ranks in one process, with faults. SIMULATE_COUNT sets the number
 * of schedules, and SIMULATE_SEED the first seed. A failure prints its seed: SIMULATE_SEED=7
 * SIMULATE_COUNT=1 repeats that schedule. */
#include "many_ranks_program.h"

enum { SHORT_COUNT = 4000, BUG_COUNT = 400 };

static void begin_ranks(void) {
    for (int i = 0; i < many.world; i++) {
        coroutine *rank = &many.ranks[i];
        char *stack = rank->stack != NULL ? rank->stack : (char *)aligned_alloc(64, STACK_BYTES);
        memset(rank, 0, sizeof *rank);
        rank->stack = stack;
        rank->heap.next = rank->heap.previous = &rank->heap;
    }
}

/* RAISES_ON_ALL comes before the last step, which then completes the abandoned collectives. */
static fault random_fault(int world) {
    fault f = {.kind = (fault_kind)random_below(FAULT_KINDS),
               .rank = (int)random_below((uint32_t)world),
               .step = (int)random_below(STEPS),
               .action = (int)random_below(ACTIONS)};
    f.step = f.kind == RAISES_ON_ALL && f.step == STEPS - 1 ? 0 : f.step;
    return f;
}

/* Applies the faults that begin with the schedule. */
static void apply_faults(void) {
    memset(kernel.refuses_open, 0, sizeof kernel.refuses_open);
    many.allocations = many.events = 0;
    for (int i = 0; i < 2; i++) {
        const fault f = simulated.faults[i];
        if (f.kind == OTHER_PLAN && simulated.ranks[f.rank].plan != 0) {
            simulated.ranks[f.rank].plan = 8;
            simulated.plan_differs = simulated.diverged = true;
        }
        kernel.refuses_open[f.rank] = kernel.refuses_open[f.rank] || f.kind == CANNOT_CONNECT;
        if (f.kind == DIES) {
            many.dying_rank = f.rank;
            many.events = 1 + random_below(1500);
        }
    }
    if (simulated.faults[0].kind == OTHER_PLAN && simulated.faults[1].kind == OTHER_PLAN &&
        many.world == 2 && simulated.faults[0].rank != simulated.faults[1].rank) {
        simulated.plan_differs = false; /* both ranks have the same other plan */
    }
}

static int refuse(fct_pg *pg, shm_negotiation *n, bool *attached) {
    (void)pg, (void)n, (void)attached;
    return -1;
}

/* Removes the registered users of ranks that died before their first collective. */
static void forget_users(void) {
    for (int rank = 0; rank < many.world; rank++) {
        bool accepted = false;
        shm_negotiation *n = shm_negotiation_new();
        simulated.ranks[rank].rank = rank;
        (void)!shm_negotiation_run(n, &simulated.ranks[rank], FCT_USE_GATHER, refuse, &accepted);
        shm_negotiation_release(n);
    }
}

/* Runs one schedule. Returns the number of violated invariants. */
static int run_one(uint64_t seed, known_bug bug, bool with_faults) {
    many.random = seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    many.current = -1;
    many.clock_ns = 1;
    many.stuck = false;
    many.program = run_rank;
    many.world = 2 + (int)random_below(RANKS_MAX - 1);
    many.preemption = random_below(3) == 0 ? 0 : 2 + random_below(30);
    begin_ranks();
    memset(&simulated, 0, sizeof simulated);
    simulated.world = many.world;
    simulated.bug = bug;
    simulated.all_wait = true;
    const bool mixed = random_below(3) == 0;
    for (int rank = 0; rank < many.world; rank++) {
        struct fct_pg *pg = &simulated.ranks[rank];
        pg->waits = !mixed || random_below(2) == 0;
        pg->more_users = mixed ? (int)random_below(2) : 0;
        pg->plan = 7;
        simulated.all_wait = simulated.all_wait && pg->waits;
    }
    if (with_faults && random_below(8) == 0) {
        simulated.guard_is_off = true;
        simulated.ranks[random_below((uint32_t)many.world)].plan = 0;
    }
    for (int i = 0; i < 2 && with_faults; i++) {
        simulated.faults[i] = random_fault(many.world);
    }
    if (bug == RESET_FORGETS_GATHER) {
        simulated.faults[0] = (fault){.kind = RAISES_ON_ALL, .action = 9};
    }
    apply_faults();
    compute_expected();
    run_schedule();
    many.current = -1;
    many.allocations = 0;
    check_outcomes();
    forget_users();
    for (int rank = 0; rank < many.world; rank++) {
        if (free_heap(&many.ranks[rank]) > 0 && !many.ranks[rank].dead && !many.stuck) {
            report("a rank that ended has not freed its memory", rank);
        }
    }
    return simulated.failures;
}

static uint64_t number_of(const char *variable, uint64_t value) {
    const char *text = __real_getenv(variable);
    return text != NULL ? strtoull(text, NULL, 10) : value;
}

static void random_schedules_keep_the_invariants(void **state) {
    (void)state;
    const uint64_t first = number_of("SIMULATE_SEED", 1);
    const uint64_t count = number_of("SIMULATE_COUNT", SHORT_COUNT);
    uint64_t failed = 0, raised = 0, shared = 0;
    const clock_t begin = clock();
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (run_one(seed, NO_BUG, true) > 0 && failed++ < 10) {
            print_error("seed %llu: %s; faults %d and %d of ranks %d and %d\n",
                        (unsigned long long)seed, simulated.failure, simulated.faults[0].kind,
                        simulated.faults[1].kind, simulated.faults[0].rank,
                        simulated.faults[1].rank);
        }
        shared += simulated.used_shm;
        for (int rank = 0, any = 0; rank < many.world && !any; rank++) {
            any = simulated.ranks[rank].raised != COMPLETED;
            raised += (uint64_t)any;
        }
    }
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    print_message("%llu schedules, %.0f per second of CPU; a rank raised in %llu; shared memory in "
                  "%llu\n",
                  (unsigned long long)count, (double)count / seconds, (unsigned long long)raised,
                  (unsigned long long)shared);
    assert_int_equal(failed, 0);
    assert_true(count < SHORT_COUNT || (raised > 0 && shared > 0));
}

/* A bug is found if an invariant is violated, or, except for OMITS_LABELS, if a rank raises. */
static void random_schedules_find_the_known_bugs(void **state) {
    (void)state;
    static const char *const names[KNOWN_BUGS] = {
        "no bug",
        "gather buffer reused before its copy-out",
        "reductions in another order on one rank",
        "reduction buffer reused without a wait",
        "prefetch of another unit on one rank",
        "reset that forgets a pending gather on one rank",
        "collectives without labels",
    };
    for (int bug = NO_BUG; bug < KNOWN_BUGS; bug++) {
        int found = 0;
        for (uint64_t seed = 1; seed <= BUG_COUNT; seed++) {
            const bool with_faults = bug == OMITS_LABELS;
            bool is_found = run_one(seed, (known_bug)bug, with_faults) > 0;
            for (int rank = 0; rank < many.world && bug != OMITS_LABELS; rank++) {
                is_found = is_found || simulated.ranks[rank].raised != COMPLETED;
            }
            found += is_found;
        }
        print_message("%s: found in %d of %d schedules\n", names[bug], found, BUG_COUNT);
        assert_true(bug == NO_BUG ? found == 0 : found > 0);
    }
}

static void seed_repeats_its_random_schedule(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        (void)run_one(seed, NO_BUG, true);
        const uint64_t digest = simulated.digest;
        const int64_t clock_ns = many.clock_ns;
        (void)run_one(seed, NO_BUG, true);
        assert_true(simulated.digest == digest && many.clock_ns == clock_ns);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_schedules_keep_the_invariants),
        cmocka_unit_test(random_schedules_find_the_known_bugs),
        cmocka_unit_test(seed_repeats_its_random_schedule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
