/* Every call that can fail is made to, in turn, in the middle of training: boundary calls, host
 * call-backs, kernel launches, malloc; see sim_break.h for what has to hold then. What follows a
 * failure in other ways is in test_recovery.c. */
#include "sim_break.h"

/* Later steps make no call that the first does not, but find plans, memory and events that are
 * there already; without kernels only the packing differs. There every third call is made to fail,
 * unless SWEEP_WHOLE is set. */
static void sweep(const sim_scenario *scenario, const char *device) {
    const bool no_kernels = scenario->device.no_kernels;
    sim_sweep(scenario, device, (sim_breakage){.span = SIM_ONCE, .thin = no_kernels},
              no_kernels ? 1 : SIM_BREAK_STEPS);
}

static void step_can_be_repeated_after_any_single_failure(void **state) {
    (void)state;
    sim_each_scenario(sweep);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(step_can_be_repeated_after_any_single_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
