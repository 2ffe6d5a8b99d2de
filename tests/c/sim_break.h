/* Training with one injected failure. test_faults.c and test_recovery.c use it for all calls of all
 * scenarios.
 *
 * After the failure these conditions must hold: the status names the failure, and the groups are
 * consistent. fc_state_reset() makes the model usable again. The repeated step and the next one
 * give exactly the results of a run without failure. Nothing leaks, and no buffer is used out of
 * order, cleanup included.
 *
 * In steps after the first one only every third call fails, and everywhere if `thin` is set. The
 * selection depends on the scenario and the device. Environment variables: SWEEP_WHOLE lets every
 * call fail. SWEEP_SEED selects other schedules. SWEEP_SCENARIO runs one scenario only, and
 * SWEEP_CALL lets one call only fail; a failing test prints both. */
#ifndef FSDP_C_TESTS_SIM_BREAK_H
#define FSDP_C_TESTS_SIM_BREAK_H

#include "sim_model.h"

enum { SIM_BREAK_STEPS = 2 };

/* One run with an injected failure. With carry_on, layers must have correct parameters after the
 * failure; gradients may contain parts of the interrupted step. */
typedef struct sim_breakage {
    int64_t nth; /* number of the call that fails */
    sim_fault_span span;
    bool carry_on; /* ignore the error and train one more step before the reset */
    bool in_reset; /* the first call of the reset fails, too */
    bool thin;     /* only every third call fails */
} sim_breakage;

/* Runs the first `steps` steps once per selected call, with that call failing as `b` describes.
 * Selected are every call of the first step and every third call of later steps. With b.thin it is
 * every third call of all steps. */
void sim_sweep(const sim_scenario *scenario, const char *device, sim_breakage b, int steps);

#endif
