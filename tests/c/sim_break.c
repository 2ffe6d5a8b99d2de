/* Runs with one injected failure each; see sim_break.h. Owns nothing between runs. */
#include "sim_break.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const spans[] = {"", " and all after it", " and all callbacks after it"};

/* Checks the status of a step. A failed allocation of optional memory (event pool, record of an
 * abandoned collective) is no failure of the step. If all later calls fail too, the next required
 * call reports an error. */
static void check_status(sim_model *m, const sim_breakage *b, fc_status status) {
    const char *name = NULL;
    fc_status expected = FC_OK;
    switch (sim_fault_fired(&name)) {
    case SIM_NO_FAULT:
        break;
    case SIM_FAULT_MEMORY:
        expected = FC_ENOMEM;
        break;
    case SIM_FAULT_KERNEL:
        expected = FC_ESTATE;
        break;
    case SIM_FAULT_BOUNDARY:
    case SIM_FAULT_CALLBACK:
        expected = FC_ERAISED;
        break;
    }
    if (b->span != SIM_ONCE && expected == FC_ENOMEM && status == FC_ERAISED) {
        expected = FC_ERAISED;
    }
    if (status == FC_OK && expected == FC_ENOMEM) {
        expected = FC_OK;
    }
    if (status != expected) {
        sim_fail("%s failed and the status is %d (%s)", name != NULL ? name : "nothing",
                 (int)status, m->comm.error.message);
    }
    if ((status == FC_ERAISED) != sim_error_pending()) {
        sim_fail("%s failed, the status is %d, and %s exception is set",
                 name != NULL ? name : "nothing", (int)status, sim_error_pending() ? "an" : "no");
    }
}

void sim_check_reset(sim_model *m) {
    sim_model_check(m, "after the reset");
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            const fc_group *g = &m->layers[i].groups[k].core;
            if (g->sharded_state != FC_SHARDED || g->training_state != FC_IDLE ||
                g->gather.pending.active || g->registration_dirty) {
                sim_fail("after the reset group %s is not sharded and idle",
                         m->layers[i].groups[k].name);
            }
        }
    }
    if (m->comm.reductions != 0 || m->comm.order.count != 0 || m->comm.kept_gather.buffer != NULL) {
        sim_fail("after the reset the context holds a reduction, an order or a buffer");
    }
}

static void recover(sim_model *m, const sim_breakage *b) {
    if (b->in_reset) {
        sim_fault_arm(1, b->span);
        if (fc_state_reset(&m->layers[0].core) != FC_OK) {
            sim_model_check(m, "after a failed reset");
        }
        sim_discard_error();
    }
    sim_fault_arm(0, SIM_ONCE);
    if (fc_state_reset(&m->layers[0].core) != FC_OK) {
        sim_fail("the reset failed: %s", m->comm.error.message);
    }
    sim_model_discard_step(m);
    sim_model_zero_grad(m);
    sim_check_reset(m);
}

/* Checks the state after the failed step, recovers and repeats the step. */
static void repeat_step(sim_model *m, const sim_breakage *b, fc_status status) {
    sim_model_check(m, "after a failure");
    sim_discard_error();
    if (b->step_before_reset) {
        sim_fault_arm(0, SIM_ONCE);
        sim_model_discard_step(m);
        (void)!sim_model_step(m);
        sim_model_check(m, "after a step without a reset");
    }
    recover(m, b);
    status = sim_model_step(m);
    if (status != FC_OK) {
        sim_fail("the repeated step: status %d, %s", (int)status, m->comm.error.message);
    }
}

/* Trains with one injected failure (nth 0: none). Returns the step in which the n-th call was made,
 * or SIM_BREAK_STEPS if there were fewer calls. */
static int broken_run(const sim_scenario *s, const char *device, const sim_breakage *b,
                      double *digest) {
    sim_begin(s->device);
    sim_model *m = sim_model_new(s);
    const char *name = NULL;
    int broken = SIM_BREAK_STEPS;
    sim_fault_arm(b->nth, b->span);
    for (int step = 0; step < SIM_BREAK_STEPS; step++) {
        fc_status status = sim_model_step(m);
        if (broken == SIM_BREAK_STEPS && sim_fault_fired(&name) != SIM_NO_FAULT) {
            broken = step;
        }
        check_status(m, b, status);
        if (status != FC_OK) {
            repeat_step(m, b, status);
        }
        sim_model_check(m, "after a step");
        sim_model_optimize(m);
    }
    sim_model_check_shards(m);
    *digest = sim_model_digest(m);
    sim_model_free(m);
    sim_named_end("%s, on %s, where call %lld (%s) fails%s%s%s", s->name, device, (long long)b->nth,
                  name != NULL ? name : "none", spans[b->span],
                  b->step_before_reset ? ", training continues without a reset" : "",
                  b->in_reset ? ", and so does the reset" : "");
    return broken;
}

static int64_t read_env_number(const char *name, int64_t standard) {
    const char *value = getenv(name);
    return value != NULL ? strtoll(value, NULL, 0) : standard;
}

/* Returns the distance between the numbers of two failing calls. */
static int64_t stride_of(const sim_breakage *b, int step) {
    return (b->every_third || step > 0) && getenv("SWEEP_WHOLE") == NULL ? 3 : 1;
}

/* Returns the number of the first failing call, which differs per scenario and device. */
static int64_t first_of(const char *scenario, const char *device, int64_t stride) {
    return 1 + (int64_t)(strlen(scenario) + strlen(device)) % stride;
}

void sim_sweep(const sim_scenario *scenario, const char *device, sim_breakage b, int steps) {
    const char *only_scenario = getenv("SWEEP_SCENARIO");
    int64_t first_seed = read_env_number("SWEEP_SEED", 1);
    int64_t only_call = read_env_number("SWEEP_CALL", 0);
    sim_scenario s = *scenario;
    if (only_scenario != NULL && strcmp(only_scenario, s.name) != 0) {
        return;
    }
    double unfailed = 0.0;
    double digest = 0.0;
    s.device.seed = (uint64_t)first_seed;
    assert_int_equal(broken_run(&s, device, &(sim_breakage){.nth = 0}, &unfailed), SIM_BREAK_STEPS);
    b.nth = only_call > 0 ? only_call : first_of(s.name, device, stride_of(&b, 0));
    while (only_call == 0 || b.nth == only_call) {
        s.device.seed = (uint64_t)(first_seed + b.nth); /* another schedule, the same parameters */
        int step = broken_run(&s, device, &b, &digest);
        if (step >= steps) {
            break;
        }
        assert_true(digest == unfailed);
        b.nth += stride_of(&b, step);
    }
    assert_true(b.nth > 10 || s.shape_count == 0 || only_call > 0);
}
