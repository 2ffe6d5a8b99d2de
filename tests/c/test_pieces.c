/* Pieces of a row: who holds them, and when they go. */
#include "sim.h"

#include "core/pieces.h"

static void pieces_are_held_until_they_are_dropped(void **state) {
    (void)state;
    fc_pieces pieces = {.count = 0};
    const double values[4] = {0};
    const int64_t sizes[1] = {4};
    sim_begin((sim_config){.seed = 1});
    for (int round = 0; round < 2; round++) {
        assert_int_equal(fc_pieces_begin(&pieces, 3), FC_OK);
        fct_tensor *piece = sim_tensor_new(FCK_FLOAT32, 1, sizes, values);
        fct_tensor_retain(piece);
        fc_pieces_add(&pieces, piece);
        fc_pieces_add(&pieces, piece);
        assert_int_equal(pieces.count, 2);
        assert_false(fct_tensor_is_sole(piece));
    }
    fc_pieces_drop(&pieces);
    assert_int_equal(pieces.count, 0);
    sim_check_nothing_alive();
    fc_pieces_fini(&pieces);
    sim_end();
}

static void without_memory_there_are_none(void **state) {
    (void)state;
    fc_pieces pieces = {.count = 0};
    sim_begin((sim_config){.seed = 1});
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_pieces_begin(&pieces, 3), FC_ENOMEM);
    assert_int_equal(pieces.count, 0);
    assert_int_equal(fc_pieces_begin(&pieces, 3), FC_OK);
    fc_pieces_fini(&pieces);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_held_until_they_are_dropped),
        cmocka_unit_test(without_memory_there_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
