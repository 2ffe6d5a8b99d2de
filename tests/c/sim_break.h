/* Training with one failure in it: the runner that test_faults.c and test_recovery.c sweep over all
 * calls of all scenarios.
 *
 * After the failure the status says what happened, the groups are consistent, fc_state_reset()
 * makes the model usable again, the step that is then repeated and the one after it give exactly
 * what an unfailed run gives, nothing leaks, and no buffer was used out of order at any time,
 * cleaning up included.
 *
 * In later steps than the first, and everywhere where a breakage asks for that, only every third
 * call fails. Which ones depends on the scenario and the device; SWEEP_WHOLE in the environment
 * has all of them. SWEEP_SEED draws other schedules. A failure says what it needs to be seen again:
 * SWEEP_SCENARIO is the only scenario that runs, SWEEP_CALL the only call that fails. */
#ifndef FSDP_C_TESTS_SIM_BREAK_H
#define FSDP_C_TESTS_SIM_BREAK_H

#include "sim_model.h"

enum { SIM_BREAK_STEPS = 2 };

/* One broken run. */
typedef struct sim_breakage {
    int64_t nth; /* which call fails */
    sim_fault_span span;
    bool carry_on; /* the caller swallows the error and trains on, once, before it resets: layers
                      find right parameters all the same, gradients may have parts of the
                      interrupted step */
    bool in_reset; /* the reset is made to fail, too, at its first call */
    bool thin;     /* not at every call */
} sim_breakage;

/* Runs once for every call of the first step and every third of the others of the first `steps`
 * steps, with that call failing as b says; a thin sweep for every third call of all of them. */
void sim_sweep(const sim_scenario *scenario, const char *device, sim_breakage b, int steps);

#endif
