/* Failure injection during training: each call that can fail (boundary calls, fc_callbacks,
 * kernel launches, malloc) fails in its own run. sim_break.h lists the conditions that must hold
 * afterwards. test_recovery.c covers combined failures. */
#include "sim_break.h"

/* Later steps make the same calls as the first, but reuse plans, memory and events. Only every
 * third of their calls fails. Without kernels only the packing differs, so only every third call of
 * the first step fails. SWEEP_WHOLE makes every call of these steps fail. */
static void sweep(const sim_scenario *scenario, const char *device) {
    const bool no_kernels = scenario->device.no_kernels;
    sim_sweep(scenario, device, (sim_breakage){.span = SIM_ONCE, .every_third = no_kernels},
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
