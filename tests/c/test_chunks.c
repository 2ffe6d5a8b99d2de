/* Chunks of a pending collective: references held and released. */
#include "sim.h"

#include "core/chunks.h"

static void chunks_hold_references_until_dropped(void **state) {
    (void)state;
    fc_chunks chunks = {.count = 0};
    const double values[4] = {0};
    const int64_t sizes[1] = {4};
    sim_begin((sim_config){.seed = 1});
    for (int round = 0; round < 2; round++) {
        assert_int_equal(fc_chunks_begin(&chunks, 3), FC_OK);
        fct_tensor *chunk = sim_tensor_new(FCK_FLOAT32, 1, sizes, values);
        fct_tensor_retain(chunk);
        fc_chunks_add(&chunks, chunk);
        fc_chunks_add(&chunks, chunk);
        assert_int_equal(chunks.count, 2);
        assert_false(fct_tensor_is_sole(chunk));
    }
    fc_chunks_drop(&chunks);
    assert_int_equal(chunks.count, 0);
    sim_check_nothing_alive();
    fc_chunks_fini(&chunks);
    sim_end();
}

static void chunks_begin_without_memory_holds_no_tensors(void **state) {
    (void)state;
    fc_chunks chunks = {.count = 0};
    sim_begin((sim_config){.seed = 1});
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_chunks_begin(&chunks, 3), FC_ENOMEM);
    assert_int_equal(chunks.count, 0);
    assert_int_equal(fc_chunks_begin(&chunks, 3), FC_OK);
    fc_chunks_fini(&chunks);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_hold_references_until_dropped),
        cmocka_unit_test(chunks_begin_without_memory_holds_no_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
