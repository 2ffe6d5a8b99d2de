/* Training with one injected failure. test_faults.c and test_recovery.c use it for the calls of all
 * scenarios.
 *
 * After the failure these conditions must hold: the status names the failure, and the groups are
 * consistent. fc_state_reset() makes the model usable again. The repeated step and the next one
 * give exactly the results of a run without failure. Nothing leaks, and no buffer is used out of
 * order, cleanup included.
 *
 * In steps after the first one, and in all steps if `every_third` is set, only every third call
 * fails. The selection depends on the scenario and the device. Environment variables: SWEEP_WHOLE
 * makes every call fail. SWEEP_SEED selects other schedules. SWEEP_SCENARIO runs one scenario only,
 * and SWEEP_CALL makes only one call fail; a failing test prints both. */
#ifndef FSDP_C_TESTS_SIM_BREAK_H
#define FSDP_C_TESTS_SIM_BREAK_H

#include "sim_model.h"

enum { SIM_BREAK_STEPS = 2 };

/* One run with an injected failure. With step_before_reset, layers must have correct parameters
 * after the failure; gradients may contain parts of the interrupted step. */
typedef struct sim_breakage {
    int64_t nth; /* number of the call that fails; set by sim_sweep */
    sim_fault_span span;
    bool step_before_reset; /* ignore the error and train one more step before the reset */
    bool in_reset;          /* the first call of the reset fails, too */
    bool every_third;       /* in the first step, too, only every third call fails */
} sim_breakage;

/* Records a failure if a group is not sharded and idle, or if the communication context holds
 * anything, after fc_state_reset() of the root. */
void sim_check_reset(sim_model *m);

/* Trains SIM_BREAK_STEPS steps once per selected call of the first `steps` steps. That call fails
 * as `b` describes. Every call of the first step and every third call of later steps are selected.
 * If b.every_third, every third call of all steps is selected. */
void sim_sweep(const sim_scenario *scenario, const char *device, sim_breakage b, int steps);

#endif
