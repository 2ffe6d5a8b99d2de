/* Combined failures: the reset fails as well, all later calls fail, rollbacks fail, or the caller
 * ignores the error and continues. sim_break.h lists the conditions that must hold.
 *
 * Failures are injected only in first steps and only on devices with kernels, because cleanup
 * depends neither on the step nor on the kernels. Every third call fails, unless SWEEP_WHOLE is
 * set: each call occurs in many scenarios. */
#include "sim_break.h"

static void sweep(const sim_scenario *scenario, const char *device, sim_breakage b) {
    b.every_third = true;
    if (!scenario->device.no_kernels) {
        sim_sweep(scenario, device, b, 1);
    }
}

static void sweep_reset(const sim_scenario *scenario, const char *device) {
    sweep(scenario, device, (sim_breakage){.in_reset = true});
}

static void sweep_persistent_failures(const sim_scenario *scenario, const char *device) {
    sweep(scenario, device, (sim_breakage){.span = SIM_ALL_AFTER, .in_reset = true});
}

static void sweep_without_reset(const sim_scenario *scenario, const char *device) {
    sweep(scenario, device, (sim_breakage){.step_before_reset = true});
}

static void sweep_failed_rollbacks(const sim_scenario *scenario, const char *device) {
    sweep(scenario, device, (sim_breakage){.span = SIM_CALLBACKS_AFTER, .step_before_reset = true});
}

static void failed_reset_can_be_repeated(void **state) {
    (void)state;
    sim_each_scenario(sweep_reset);
}

static void persistent_failures_give_the_status_of_the_first(void **state) {
    (void)state;
    sim_each_scenario(sweep_persistent_failures);
}

static void forward_after_failure_without_reset_uses_correct_parameters(void **state) {
    (void)state;
    sim_each_scenario(sweep_without_reset);
}

static void group_is_repaired_before_use_after_failed_rollback(void **state) {
    (void)state;
    sim_each_scenario(sweep_failed_rollbacks);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(failed_reset_can_be_repeated),
        cmocka_unit_test(persistent_failures_give_the_status_of_the_first),
        cmocka_unit_test(forward_after_failure_without_reset_uses_correct_parameters),
        cmocka_unit_test(group_is_repaired_before_use_after_failed_rollback),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
