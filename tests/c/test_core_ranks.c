/* Random schedules of two to four instances of the core in one process, with faults. SIMULATE_COUNT
 * sets the number of schedules, and SIMULATE_SEED the first seed. A failure prints its seed:
 * SIMULATE_SEED=7 SIMULATE_COUNT=1 repeats that schedule.
 *
 * A rank trains STEPS steps of a scenario of sim_scenarios.c. If a rank raises, all living ranks
 * reset and repeat the step, except after a death or with wrong tags. */
#include "core_ranks.h"

#include <time.h>

#include "sim_break.h"

enum { SHORT_COUNT = 2000, BUG_COUNT = 200, STEPS = 2, SCENARIOS_MAX = 512 };

typedef enum fault_kind {
    NO_FAULT,
    CALL_FAILS,    /* an allocation, a call of the boundary, a callback or a launch on one rank */
    RAISES,        /* the user's code on one rank */
    RAISES_ON_ALL, /* the user's code on all ranks, at the same place */
    DIES,
    /* From here on: one rank has wrong tags. */
    SWAPS_LAYERS,
    SKIPS_LAYER,
    OMITS_GRADIENT, /* of one parameter */
    FAULT_KINDS
} fault_kind;

typedef struct fault {
    fault_kind kind;
    int rank;
    int step;
    uint32_t n; /* number of the call, the computation or the parameter */
} fault;

typedef enum known_bug {
    NO_BUG,
    DROPS_EVENT_WAIT,
    DROPS_WORK_WAIT,
    ISSUES_TWICE,
    PREFETCHES_IN_OTHER_ORDER,
    REDUCES_WITHOUT_PARAMETER,
    OMITS_LABELS,
    RESET_WITHOUT_WAITS,
    LEAVES_OUT_RESET,
    KNOWN_BUGS
} known_bug;

static struct {
    fault faults[2];
    int fault_count;
    known_bug bug;
    const char *device;
    bool has_faults; /* or a bug; the ranks then meet after each step */
    bool has_wrong_tags;
    size_t recovered, deaths, time_outs, mismatches; /* sums over schedules */
} test;

static struct {
    sim_scenario scenario;
    const char *device;
} scenarios[SCENARIOS_MAX];
static uint32_t scenario_count;
static uint64_t running_seed; /* 0: no schedule runs */

static int world_of(const sim_scenario *s) {
    return (int)(s->world * (s->replicas > 0 ? s->replicas : 1));
}

/* Leaves out scenarios with device checksums: all contexts of a process share the ended intervals
 * (device_checksums.c), and here each rank stands for a process. */
static void add_scenario(const sim_scenario *s, const char *device) {
    const bool is_shared = s->checksums && s->device.streams;
    if (world_of(s) >= 2 && world_of(s) <= RANKS_MAX && !is_shared) {
        assert_true(scenario_count < SCENARIOS_MAX);
        scenarios[scenario_count].scenario = *s;
        scenarios[scenario_count++].device = device;
    }
}

/* ---- the program of a rank ---- */

static void set_plans(sim_model *m) {
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            fc_group_base *base = &m->layers[i].groups[k].core.base;
            fc_process_group *const groups[] = {&base->shard, &base->scatter, &base->replicate,
                                                &base->post_forward};
            for (size_t j = 0; j < sizeof groups / sizeof groups[0]; j++) {
                fc_process_group_set_plan(groups[j], 7, 1);
            }
        }
    }
}

static void reverse_prefetches(sim_model *m) {
    for (size_t i = 0; i < m->layer_count; i++) {
        fc_state *s = &m->layers[i].core;
        if (s->forward_prefetch_count > 1) {
            fc_state *first = s->forward_prefetch[0];
            s->forward_prefetch[0] = s->forward_prefetch[1];
            s->forward_prefetch[1] = first;
        }
    }
}

/* Arms the faults of this rank that begin with the step. */
static void arm_faults(sim_model *m, int step) {
    for (int i = 0; i < 2; i++) {
        const fault f = test.faults[i];
        const bool is_own = f.rank == self->number && f.step == step;
        if (f.kind == CALL_FAILS && is_own) {
            sim_fault_arm(f.n, SIM_ONCE);
        } else if ((f.kind == RAISES && is_own) || (f.kind == RAISES_ON_ALL && f.step == step)) {
            m->raises_in = 1 + f.n % 12;
        } else if (f.kind == DIES && is_own) {
            self->events = f.n;
        }
    }
    if (self->number == 0 && step == 0) {
        sim_wait_drop(SIM_EVENT_WAIT, test.bug == DROPS_EVENT_WAIT ? 1 + random_below(60) : 0);
        /* On the CPU the collective would read freed memory, which ends the test under ASan. */
        const bool drops_work = test.bug == DROPS_WORK_WAIT && self->scenario.device.streams;
        sim_wait_drop(SIM_WORK_WAIT, drops_work ? 1 + random_below(8) : 0);
        self->twice = test.bug == ISSUES_TWICE ? 1 + random_below(8) : 0;
    }
}

/* Waits until the device is idle. All memory of the failed step is then released. */
static void settle(sim_model *m, size_t live_bytes) {
    sim_drain();
    fc_comm_collect(&m->comm);
    if (sim_count_alive().works > 0 && !self->dead) {
        report("a work is not released after the reset");
    }
    if (sim_live_bytes() > live_bytes && !self->dead) {
        report("memory is not released after the reset");
    }
}

/* Resets this rank. A fault can make the reset itself fail, so it is repeated. */
static void reset(sim_model *m, size_t live_bytes) {
    fc_status status = FC_ERAISED;
    const bool is_buggy = self->number == 0;
    sim_discard_error();
    sim_wait_drop(SIM_EVENT_WAIT, test.bug == RESET_WITHOUT_WAITS && is_buggy ? -1 : 0);
    for (int i = 0; i < 3 && status != FC_OK; i++) {
        status =
            test.bug == LEAVES_OUT_RESET && is_buggy ? FC_OK : fc_state_reset(&m->layers[0].core);
        sim_discard_error();
    }
    sim_wait_drop(SIM_EVENT_WAIT, 0);
    if (status != FC_OK && !self->dead) {
        report("the reset fails");
    }
    if (!self->dead && sim_fault_fired(NULL) != SIM_NO_FAULT) {
        sim_fault_arm(0, SIM_ONCE);
    }
    sim_model_discard_step(m);
    sim_model_zero_grad(m);
    sim_check_reset(m);
    if (!self->by_user || !self->scenario.device.streams) {
        settle(m, live_bytes);
    }
}

/* Runs a step until its last collective is complete. Returns whether it raised. */
static bool run_step(sim_model *m) {
    const bool can_raise = m->raises_in > 0;
    self->meets_failure = false;
    sim_data_is_lost = false;
    const fc_status status = sim_model_step(m);
    self->by_user = status != FC_OK && can_raise && m->raises_in == 0;
    m->raises_in = 0;
    if (status == FC_OK) {
        sim_drain();
        if (sim_data_is_lost && !self->scenario.device.streams && !self->dead) {
            report("a step completes with a failed collective");
        }
        return sim_data_is_lost; /* found by the watchdog of the backend */
    }
    if (status == FC_ERAISED && !sim_error_pending()) {
        report("the exception of a failed step is lost");
    }
    if (!self->by_user && sim_fault_fired(NULL) == SIM_NO_FAULT) {
        if (!self->meets_failure) {
            report("a step raises without a fault");
        } else if (strstr(sim_error_explanation(), " failed on rank ") == NULL) {
            report("the error of a failed collective does not name the collective");
        }
    }
    return true;
}

static void train(sim_model *m) {
    int step = 0, armed = -1;
    const size_t live_bytes = sim_live_bytes();
    for (int attempt = 0; step < STEPS && attempt < STEPS + test.fault_count; attempt++) {
        if (step > armed) {
            arm_faults(m, step);
            armed = step;
        }
        self->raised = run_step(m);
        if (self->raised) {
            reset(m, live_bytes);
        }
        if (test.has_faults && !self->dead) {
            reach_barrier(false);
        }
        const outcome o = test.has_faults ? many.result : (outcome){.any_raised = self->raised};
        if (self->dead || o.any_dead) {
            return;
        }
        if (!o.any_raised) {
            sim_model_check(m, "after a step");
            sim_model_optimize(m);
            step++;
            continue;
        }
        if (!self->raised) {
            reset(m, live_bytes);
        }
        if (test.has_wrong_tags || !test.has_faults) {
            return;
        }
        const bool restarts = !o.all_by_user || o.any_failed;
        if (restarts) {
            settle(m, live_bytes);
        }
        reach_barrier(restarts);
        test.recovered += self->number == 0;
    }
    if (step < STEPS) {
        report("a fault makes more than one step fail");
    }
    sim_model_check_shards(m);
}

static void run_rank(void) {
    sim_begin(self->scenario.device);
    sim_model *m = sim_model_new(&self->scenario);
    set_plans(m);
    if (test.bug == PREFETCHES_IN_OTHER_ORDER && self->number == 0) {
        reverse_prefetches(m);
    }
    train(m);
    sim_model_free(m);
    self->failures = sim_finish(self->failure, sizeof self->failure);
}

/* ---- one schedule ---- */

static bool communicates(const sim_scenario *s) {
    int64_t numel = 0;
    for (size_t i = 0; i < s->shape_count; i++) {
        const sim_shape *shape = &s->shapes[i];
        numel += shape->sizes[0] * (shape->ndim > 1 ? shape->sizes[1] : 1) *
                 (shape->ndim > 2 ? shape->sizes[2] : 1) * (shape->frozen ? 0 : 1);
    }
    return numel > 0;
}

/* Returns whether the ranks issue other collectives with the fault. */
static bool set_wrong_tags(fault f) {
    sim_scenario *s = &many.ranks[f.rank].scenario;
    const bool has_shape = communicates(s) && s->shape_count > 0;
    sim_shape *shape = has_shape ? &s->shapes[f.n % s->shape_count] : NULL;
    if (f.kind == SWAPS_LAYERS && s->layers >= 2) {
        s->swaps_layers = true;
        return has_shape;
    }
    if (f.kind == SKIPS_LAYER && s->layers >= 1) {
        s->skips_layer = true;
        return has_shape;
    }
    if (f.kind == OMITS_GRADIENT && shape != NULL && !shape->frozen && !shape->unused &&
        shape->sizes[0] > 0 && !s->reduce_unused) {
        shape->unused = true;
        return true;
    }
    return false;
}

static fault random_fault(void) {
    return (fault){.kind = (fault_kind)random_below(FAULT_KINDS),
                   .rank = (int)random_below((uint32_t)many.world),
                   .step = (int)random_below(STEPS),
                   .n = 1 + random_below(random_below(3) == 0 ? 1500 : 300)};
}

static void choose_faults(bool with_faults) {
    memset(test.faults, 0, sizeof test.faults);
    for (uint32_t i = 0, count = with_faults ? random_below(3) : 0; i < count; i++) {
        test.faults[i] = random_fault();
    }
    if (test.bug == RESET_WITHOUT_WAITS || test.bug == LEAVES_OUT_RESET) {
        test.faults[0] = (fault){.kind = RAISES_ON_ALL, .n = random_below(100)};
    } else if (test.bug == REDUCES_WITHOUT_PARAMETER || test.bug == OMITS_LABELS) {
        test.faults[0] = (fault){.kind = OMITS_GRADIENT, .n = random_below(100)};
    }
    many.omits_labels = test.bug == OMITS_LABELS;
}

/* Returns the number of violated invariants. */
static size_t run_one(uint64_t seed, known_bug bug, bool with_faults) {
    int wrong_tags = 0; /* faults that change the collectives of a rank */
    running_seed = seed;
    begin_schedule(seed, RANKS_MAX);
    const uint32_t picked = random_below(scenario_count);
    const sim_scenario *s = &scenarios[picked].scenario;
    many.world = world_of(s);
    many.preemption = random_below(3) == 0 ? 0 : 5 + random_below(200);
    test.device = scenarios[picked].device;
    test.bug = bug;
    choose_faults(with_faults);
    for (int i = 0; i < many.world; i++) {
        many.ranks[i].scenario = *s;
        many.ranks[i].scenario.rank = i % s->world;
        many.ranks[i].scenario.replica = i / s->world;
        many.ranks[i].scenario.device.seed = random_bits();
    }
    test.has_faults = bug != NO_BUG;
    test.has_wrong_tags = false;
    test.fault_count = 0;
    for (int i = 0; i < 2; i++) {
        const fault f = test.faults[i];
        test.fault_count += f.kind != NO_FAULT;
        test.has_faults = test.has_faults || f.kind != NO_FAULT;
        test.has_wrong_tags = test.has_wrong_tags || f.kind >= SWAPS_LAYERS;
        wrong_tags += f.kind >= SWAPS_LAYERS && set_wrong_tags(f);
    }
    run_schedule();
    bool any_dead = false;
    size_t failures = 0;
    for (int i = 0; i < many.world; i++) {
        const rank *r = &many.ranks[i];
        any_dead = any_dead || r->dead;
        if (r->failures > 0 && !r->dead) {
            self = &many.ranks[i];
            report(r->failure);
            self = NULL;
            failures += r->failures;
        }
    }
    if (wrong_tags == 1 && (test.faults[0].kind == NO_FAULT || test.faults[1].kind == NO_FAULT) &&
        many.time_outs == 0 && many.mismatches == 0 && !any_dead && bug == NO_BUG) {
        report("no rank finds the wrong tags");
    }
    if (!test.has_faults && outcome_of_step().any_raised) {
        report("a rank raises without a fault");
    }
    test.deaths += any_dead;
    test.time_outs += many.time_outs > 0;
    test.mismatches += many.mismatches > 0;
    running_seed = 0;
    return failures + (many.failure[0] != '\0');
}

/* ---- tests ---- */

static void print_running_seed(void) {
    if (running_seed != 0) {
        print_error("the schedule of SIMULATE_SEED=%llu ends the test\n",
                    (unsigned long long)running_seed);
    }
}

static uint64_t number_of(const char *variable, uint64_t value) {
    const char *text = getenv(variable);
    return text != NULL ? strtoull(text, NULL, 10) : value;
}

static void random_schedules_keep_the_invariants(void **state) {
    (void)state;
    const uint64_t first = number_of("SIMULATE_SEED", 1);
    const uint64_t count = number_of("SIMULATE_COUNT", SHORT_COUNT);
    uint64_t failed = 0;
    const clock_t begin = clock();
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (run_one(seed, NO_BUG, true) > 0 && failed++ < 10) {
            print_error("seed %llu, %s on %s: %s; faults %d and %d of ranks %d and %d\n",
                        (unsigned long long)seed, many.ranks[0].scenario.name, test.device,
                        many.failure, (int)test.faults[0].kind, (int)test.faults[1].kind,
                        test.faults[0].rank, test.faults[1].rank);
        }
    }
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    print_message(
        "%llu schedules, %.0f per second of CPU; %zu with a mismatch, %zu with a time-out, "
        "%zu with a death; %zu steps were repeated\n",
        (unsigned long long)count, (double)count / seconds, test.mismatches, test.time_outs,
        test.deaths, test.recovered);
    assert_int_equal(failed, 0);
    if (count >= SHORT_COUNT) { /* each kind of fault has happened */
        assert_true(test.mismatches > 0 && test.time_outs > 0);
        assert_true(test.deaths > 0 && test.recovered > 0);
    }
}

/* A bug is found if an invariant is violated, if labels differ, or if all ranks wait. */
static void random_schedules_find_the_known_bugs(void **state) {
    (void)state;
    static const char *const names[KNOWN_BUGS] = {
        "no bug",
        "a dropped wait for an event",
        "a dropped wait for a collective",
        "a collective issued twice on one rank",
        "prefetch in another order on one rank",
        "a reduction without a parameter on one rank",
        "the same without labels",
        "a reset that does not wait for its streams",
        "a rank that leaves out its reset",
    };
    for (int bug = NO_BUG; bug < KNOWN_BUGS; bug++) {
        int found = 0;
        for (uint64_t seed = 1; seed <= BUG_COUNT; seed++) {
            const bool violates = run_one(seed, (known_bug)bug, false) > 0;
            found += violates || many.mismatches > 0 || many.time_outs > 0;
        }
        print_message("%s: found in %d of %d schedules\n", names[bug], found, BUG_COUNT);
        assert_true(bug == NO_BUG ? found == 0 : found > 0);
    }
}

static void seed_repeats_its_random_schedule(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        (void)run_one(seed, NO_BUG, true);
        const uint64_t digest = many.digest, changes = many.changes;
        (void)run_one(seed, NO_BUG, true);
        assert_true(many.digest == digest && many.changes == changes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_schedules_keep_the_invariants),
        cmocka_unit_test(random_schedules_find_the_known_bugs),
        cmocka_unit_test(seed_repeats_its_random_schedule),
    };
    sim_each_scenario(add_scenario);
    many.program = run_rank;
    start_threads();
    (void)atexit(print_running_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
