/* placeholder */
#include "sim_model.h"
#include <stdio.h>
static void basic(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++)
    for (int nk = 0; nk < 2; nk++)
    for (uint64_t seed = 0; seed < 20; seed++)
    for (int64_t world = 1; world <= 4; world *= 2) {
        sim_scenario s = {.name = "basic", .device = {.seed = seed, .streams = streams, .no_kernels = nk}, .world = world, .rank = world - 1, .layers = 3,
            .shape_count = 2, .shapes = {{.ndim = 2, .sizes = {5, 3}}, {.ndim = 1, .sizes = {3}}}};
        sim_begin(s.device);
        sim_model *m = sim_model_new(&s);
        for (int step = 0; step < 3; step++) {
            assert_int_equal(sim_model_step(m), FC_OK);
            sim_model_check(m, "x");
            sim_model_optimize(m);
        }
        sim_model_check_shards(m);
        sim_model_free(m);
        sim_end();
    }
}
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(basic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
