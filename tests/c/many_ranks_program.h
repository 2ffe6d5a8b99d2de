/* The actions of a simulated rank, its end, and the invariants of a schedule. */
#ifndef FSDP_C_TESTS_MANY_RANKS_PROGRAM_H
#define FSDP_C_TESTS_MANY_RANKS_PROGRAM_H

#include "many_ranks_step.h"

/* ---- numbers ---- */

/* The parameters of all units after each optimizer step. */
static float expected[STEPS + 1][UNITS][NUMEL_MAX * RANKS_MAX];

static float gradient_of(float parameter, int rank, int unit) {
    return (float)((int)parameter % 8 + rank + unit);
}

static void compute_expected(void) {
    for (int unit = 0; unit < UNITS; unit++) {
        for (int64_t i = 0; i < numels[unit] * simulated.world; i++) {
            expected[0][unit][i] = (float)((i * 5 + unit * 3) % 17);
            for (int step = 0; step < STEPS; step++) {
                float sum = 0;
                for (int rank = 0; rank < simulated.world; rank++) {
                    sum += gradient_of(expected[step][unit][i], rank, unit);
                }
                expected[step + 1][unit][i] =
                    (float)(((int)expected[step][unit][i] + (int)sum) % 64);
            }
        }
    }
}

/* ---- gathers and reductions ---- */

static collective_op *new_op(fct_op_kind kind, int unit) {
    collective_op *op = (collective_op *)calloc(1, sizeof *op);
    if (op == NULL) {
        return NULL;
    }
    op->kind = kind;
    op->unit = unit;
    op->buffer = (float *)calloc((size_t)(numels[unit] * simulated.world), sizeof(float));
    op->output = (float *)calloc((size_t)numels[unit], sizeof(float));
    if (op->buffer == NULL || op->output == NULL) {
        free_op(op);
        return NULL;
    }
    return op;
}

/* As in fc_comm_defer_release, because the transport may still use the operation. */
static void abandon(struct fct_pg *pg, collective_op **op) {
    if (*op != NULL) {
        (*op)->next = pg->abandoned;
        pg->abandoned = *op;
        *op = NULL;
    }
}

static void free_abandoned(struct fct_pg *pg) {
    for (collective_op **at = &pg->abandoned; *at != NULL;) {
        collective_op *op = *at;
        if (op->shm == NULL || op->released || !op->started) {
            *at = op->next;
            free_op(op);
        } else {
            at = &op->next;
        }
    }
}

/* As in fc_gather_start: without a difference `compared` is set, unless the answers are unknown. */
static outcome compare_plan(struct fct_pg *pg, int unit, bool waits) {
    fct_plan_result result;
    if (pg->units[unit].compared) {
        return COMPLETED;
    }
    pg->raised = COMPLETED;
    if (shm_negotiation_compare_plan(pg->negotiation, pg, pg->plan, waits, attach, &result) != 0) {
        return pg->raised != COMPLETED ? pg->raised : MEMORY;
    }
    pg->units[unit].compared = result.state == FCT_PLANS_EQUAL;
    return result.state == FCT_PLANS_DIFFER ? PLAN : COMPLETED;
}

static outcome start_gather(struct fct_pg *pg, int unit, int issued_unit) {
    unit_state *u = &pg->units[unit];
    if (u->gather != NULL) {
        return COMPLETED; /* prefetched */
    }
    outcome result = compare_plan(pg, unit, pg->waits);
    if (result != COMPLETED) {
        return result;
    }
    collective_op *op = new_op(FCT_OP_ALL_GATHER, issued_unit);
    if (op == NULL) {
        return MEMORY;
    }
    const int64_t numel = numels[issued_unit];
    memcpy(op->buffer + pg->rank * numel, pg->units[issued_unit].shard,
           (size_t)numel * sizeof(float));
    u->gather = op;
    return issue(pg, op, 0);
}

static void check_parameters(const struct fct_pg *pg, int unit, const float *full) {
    if (simulated.shifted || simulated.diverged) {
        return; /* labels detect the difference; see check_used_data */
    }
    for (int64_t i = 0; i < numels[unit] * simulated.world; i++) {
        if (full[i] != expected[pg->updates][unit][i]) {
            report("a gathered parameter has a wrong value", pg->rank);
            return;
        }
    }
}

static outcome await_gather(struct fct_pg *pg, int unit) {
    unit_state *u = &pg->units[unit];
    collective_op *op = u->gather;
    if (op == NULL) {
        return COMPLETED;
    }
    outcome result = compare_plan(pg, unit, true);
    result = result == COMPLETED ? wait_for(pg, op) : result;
    if (result != COMPLETED) {
        return result;
    }
    const size_t bytes = (size_t)(numels[op->unit] * simulated.world) * sizeof(float);
    if (simulated.bug == FREES_GATHER_BEFORE_COPY_OUT) {
        for (int64_t i = 0; i < numels[op->unit] * simulated.world; i++) {
            op->buffer[i] = -1; /* the next owner of the memory writes it */
        }
    }
    memcpy(u->full, op->buffer, bytes);
    check_parameters(pg, op->unit, u->full);
    u->gather = NULL;
    free_op(op);
    return COMPLETED;
}

static outcome finish_reduction(struct fct_pg *pg) {
    collective_op *op = pg->reduction;
    if (op == NULL) {
        return COMPLETED;
    }
    const outcome result = wait_for(pg, op);
    if (result != COMPLETED) {
        return result;
    }
    for (int64_t i = 0; i < numels[op->unit]; i++) {
        float *value = &pg->units[op->unit].shard[i];
        *value = (float)(((int)*value + (int)op->output[i]) % 64);
    }
    pg->reduction = NULL;
    free_op(op);
    return COMPLETED;
}

static outcome start_reduction(struct fct_pg *pg, int unit, uint64_t params) {
    outcome result = COMPLETED;
    collective_op *op = NULL;
    if (simulated.bug == REUSES_REDUCTION_BUFFER && pg->reduction != NULL) {
        op = pg->reduction; /* its input is written while the transport may read it */
        for (int64_t i = 0; i < numels[op->unit] * simulated.world; i++) {
            op->buffer[i] = gradient_of(pg->units[unit].full[i], pg->rank, unit);
        }
        result = finish_reduction(pg);
    }
    op = result == COMPLETED ? new_op(FCT_OP_REDUCE_SCATTER, unit) : NULL;
    if (op == NULL) {
        return result != COMPLETED ? result : MEMORY;
    }
    for (int64_t i = 0; i < numels[unit] * simulated.world; i++) {
        op->buffer[i] = gradient_of(pg->units[unit].full[i], pg->rank, unit);
    }
    pg->reduction = op;
    return issue(pg, op, params);
}

/* ---- the program ---- */

typedef enum action_kind { GATHER, AWAIT, REDUCE, FINISH } action_kind;
typedef struct action {
    action_kind kind;
    int unit;
} action;

/* One step: forward of units 0 to 2, then their backward, with a prefetch of unit 1. */
enum { PREFETCH = 8, FIRST_FINISH = 11, LAST_REDUCE = 14 }; /* indices */
static const action actions[ACTIONS] = {
    {GATHER, 0}, {AWAIT, 0},  {GATHER, 1}, {AWAIT, 1},  {GATHER, 2}, {AWAIT, 2},
    {GATHER, 2}, {AWAIT, 2},  {GATHER, 1}, {REDUCE, 2}, {AWAIT, 1},  {FINISH, 0},
    {REDUCE, 1}, {FINISH, 0}, {REDUCE, 0}, {FINISH, 0},
};

static outcome run_collective(struct fct_pg *pg, action a) {
    int unit = a.unit;
    if (a.kind == GATHER) {
        const bool is_other = is_due(OTHER_UNIT, pg) ||
                              (has_bug(PREFETCHES_WRONG_UNIT, pg) && pg->action == PREFETCH);
        simulated.diverged = simulated.diverged || is_other;
        return start_gather(pg, unit, is_other ? (unit + UNITS - 1) % UNITS : unit);
    }
    if (has_bug(REDUCES_IN_ANOTHER_ORDER, pg) && unit > 0) {
        unit = UNITS - unit;
    }
    const bool differs = is_due(OTHER_PARAMS, pg);
    simulated.diverged = simulated.diverged || differs;
    return start_reduction(pg, unit, differs ? 1 : 3);
}

static outcome run_action(struct fct_pg *pg) {
    const action a = actions[pg->action];
    const bool issues = a.kind == GATHER || a.kind == REDUCE;
    pg->interrupts = pg->interrupts || is_due(INTERRUPTED, pg);
    if (is_due(NO_MEMORY, pg)) {
        many.failing_rank = pg->rank;
        many.allocations = 1 + random_below(8);
    }
    if (is_due(LATE, pg)) {
        suspend_for(random_below(LIMIT_MS / 4));
    }
    if (issues && is_due(LEAVES_OUT, pg)) {
        simulated.shifted = true;
        return COMPLETED;
    }
    if (issues) {
        return run_collective(pg, a);
    }
    if (a.kind == FINISH && simulated.bug == REUSES_REDUCTION_BUFFER &&
        pg->action == FIRST_FINISH) {
        return COMPLETED;
    }
    return a.kind == AWAIT ? await_gather(pg, a.unit) : finish_reduction(pg);
}

/* As in fc_state_reset. */
static void reset_iter_state(struct fct_pg *pg) {
    for (int unit = 0; unit < UNITS; unit++) {
        if (!has_bug(RESET_FORGETS_GATHER, pg)) {
            abandon(pg, &pg->units[unit].gather);
        }
    }
    abandon(pg, &pg->reduction);
    free_abandoned(pg);
    pg->action = 0;
}

/* Restores the parameters that a reduction of the interrupted step has changed. */
static void load_checkpoint(struct fct_pg *pg) {
    for (int unit = 0; unit < UNITS; unit++) {
        memcpy(pg->units[unit].shard, expected[pg->updates][unit] + pg->rank * numels[unit],
               (size_t)numels[unit] * sizeof(float));
    }
}

/* Runs all steps. Returns early with an outcome that the rank does not catch. */
static outcome run_steps(struct fct_pg *pg) {
    while (pg->step < STEPS) {
        if (is_due(RAISES_ON_ALL, pg)) {
            reset_iter_state(pg);
            load_checkpoint(pg);
            pg->step++;
            pg->issued_before = pg->issued;
            continue;
        }
        preempt();
        const outcome result = run_action(pg);
        if (result == INTERRUPT) { /* the rank raises, catches it alone, and repeats the step */
            simulated.shifted = simulated.shifted || pg->issued != pg->issued_before;
            reset_iter_state(pg);
            load_checkpoint(pg);
            pg->issued_before = pg->issued;
        } else if (result != COMPLETED) {
            return result;
        } else if (++pg->action == ACTIONS) {
            pg->action = 0;
            pg->step++;
            pg->updates++;
            pg->issued_before = pg->issued;
            free_abandoned(pg);
        }
    }
    return COMPLETED;
}

/* Ends a rank that was not killed: resets, closes the transport and releases its operations. */
static void end_rank(struct fct_pg *pg) {
    reset_iter_state(pg);
    for (int unit = 0; unit < UNITS; unit++) {
        abandon(pg, &pg->units[unit].gather);
    }
    shm_negotiation_close(pg->negotiation);
    free_abandoned(pg);
    shm_negotiation_release(pg->negotiation);
    pg->negotiation = NULL;
}

static void run_rank(int rank) {
    struct fct_pg *pg = &simulated.ranks[rank];
    pg->rank = rank;
    pg->negotiation = shm_negotiation_new();
    for (int i = 0; i < (int)UNITS + pg->more_users; i++) {
        (void)fct_group_users_add(fct_pg_name(pg));
    }
    load_checkpoint(pg);
    const outcome result = run_steps(pg);
    const int step = pg->step;
    end_rank(pg);
    pg->step = step;
    pg->raised = result;
    add_to_digest((uint64_t)(100 + rank * 10 + (int)result));
}

/* ---- invariants ---- */

static bool happened(fault_kind kind) {
    return simulated.faults[0].kind == kind || simulated.faults[1].kind == kind;
}

/* Whether all ranks issued a message with the same number, and their labels differ. */
static bool has_mismatch(void) {
    for (int number = 0; number < OPS_MAX; number++) {
        const uint64_t first = simulated.shm[number][0].code;
        bool all_issued = true, differs = false;
        for (int rank = 0; rank < simulated.world; rank++) {
            const uint64_t code = simulated.shm[number][rank].code;
            all_issued = all_issued && code != 0;
            differs = differs || code != first;
        }
        if (all_issued && differs) {
            return true;
        }
    }
    return false;
}

static bool must_raise(bool mismatch, bool died_early) {
    return (mismatch && !simulated.guard_is_off) ||
           (simulated.plan_differs && !simulated.guard_is_off) ||
           (died_early && !simulated.shifted);
}

static bool is_faulty(void) {
    return simulated.shifted || simulated.diverged || happened(DIES) || happened(NO_MEMORY);
}

static void check_outcomes(void) {
    bool died_early = false; /* before the last collective of the last step */
    for (int rank = 0; rank < simulated.world; rank++) {
        died_early = died_early || (many.ranks[rank].dead && simulated.ranks[rank].step < STEPS &&
                                    !(simulated.ranks[rank].step == STEPS - 1 &&
                                      simulated.ranks[rank].action >= LAST_REDUCE));
    }
    const bool mismatch = has_mismatch();
    if (many.stuck) {
        report("no rank can continue", -1);
    }
    for (int rank = 0; rank < simulated.world; rank++) {
        const struct fct_pg *pg = &simulated.ranks[rank];
        if (many.ranks[rank].dead || many.stuck) {
            continue;
        }
        if (pg->raised == COMPLETED && must_raise(mismatch, died_early)) {
            report("a rank did not raise", rank);
        }
        if (mismatch && pg->raised != MISMATCH && !happened(DIES) && !happened(NO_MEMORY) &&
            !simulated.shifted && !simulated.guard_is_off && !simulated.plan_differs) {
            report("a rank raised another error than the mismatch", rank);
        }
        if (pg->raised != COMPLETED && !is_faulty()) {
            report("a rank raised without a fault", rank);
        }
        if (pg->raised == TIMED_OUT && !(simulated.shifted && !simulated.all_wait)) {
            report("a wait ended at the time limit", rank);
        }
    }
}

#endif
