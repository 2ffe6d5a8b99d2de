/* Whole training steps without failures: every scenario, on every kind of device, under many
 * schedules. Each layer reads complete parameters, every sharded gradient is the exact mean, no
 * buffer is used out of order, and nothing leaks. */
#include "sim_model.h"

#include <stdlib.h>

enum { SEEDS = 12, STEPS = 3 };

static uint64_t first_seed;

static void train(const sim_scenario *scenario, const char *device) {
    for (uint64_t seed = first_seed; seed < first_seed + SEEDS; seed++) {
        sim_scenario s = *scenario;
        s.device.seed = seed;
        sim_begin(s.device);
        sim_model *m = sim_model_new(&s);
        for (int step = 0; step < STEPS; step++) {
            fc_status status = sim_model_step(m);
            if (status != FC_OK) {
                sim_fail("step %d: status %d, %s", step, (int)status, m->comm.error.message);
                break;
            }
            sim_model_check(m, "after a step");
            sim_model_optimize(m);
        }
        sim_model_check_shards(m);
        sim_model_free(m);
        sim_named_end("%s, on %s", s.name, device);
    }
}

static void every_scenario_trains_with_exact_results(void **state) {
    (void)state;
    sim_each_scenario(train);
}

/* One release for each pack with its all-gather, for each copy-out, and for each pack with its
 * reduce-scatter, division and cast. */
static void step_on_streams_releases_the_gil_once_per_phase(void **state) {
    (void)state;
    sim_scenario s = {.world = 2,
                      .layers = 2,
                      .shape_count = 3,
                      .device = {.seed = first_seed, .streams = true},
                      .reduce_dtype = FCK_FLOAT32};
    for (size_t i = 0; i < s.shape_count; i++) {
        s.shapes[i] = (sim_shape){.ndim = 1, .sizes = {8}};
    }
    sim_begin(s.device);
    sim_model *m = sim_model_new(&s);
    assert_int_equal(sim_model_step(m), FC_OK);
    sim_model_optimize(m);
    const size_t before = sim_gil_releases();
    assert_int_equal(sim_model_step(m), FC_OK);
    /* 3 layers (root and 2) times 5 phases: pack and copy-out in forward, pack and copy-out in
     * backward, reduction. */
    assert_int_equal(sim_gil_releases() - before, 3 * 5);
    sim_model_free(m);
    sim_end();
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_scenario_trains_with_exact_results),
        cmocka_unit_test(step_on_streams_releases_the_gil_once_per_phase),
    };
    first_seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
