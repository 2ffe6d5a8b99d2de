/* The post-forward order of groups, and a group's stack of its indices in that order. */
#include "core/order.h"

#include "core/group.h"
#include "sim.h"

enum { MANY = 100 };

static fc_group groups[3];

static void order_keeps_append_sequence(void **state) {
    (void)state;
    fc_order order = {NULL, 0, 0};
    size_t position = 0;
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(fc_order_append(&order, &groups[i % 3], &position), FC_OK);
        assert_int_equal(position, i);
    }
    assert_int_equal(order.count, MANY);
    for (size_t i = 0; i < MANY; i++) {
        assert_ptr_equal(order.items[i], &groups[i % 3]);
    }
    fc_order_fini(&order);
}

static void forgotten_group_becomes_null_and_indices_stay(void **state) {
    (void)state;
    fc_order order = {NULL, 0, 0};
    size_t position = 0;
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(fc_order_append(&order, &groups[i % 3], &position), FC_OK);
    }
    fc_order_remove(&order, &groups[1]);
    assert_int_equal(order.count, 6);
    for (size_t i = 0; i < 6; i++) {
        assert_ptr_equal(order.items[i], i % 3 == 1 ? NULL : &groups[i % 3]);
    }
    fc_order_fini(&order);
}

static void index_stack_returns_indices_in_reverse_order(void **state) {
    (void)state;
    fc_index_stack positions = {NULL, 0, 0};
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(fc_index_stack_push(&positions, 3 * i), FC_OK);
    }
    for (size_t i = MANY; i-- > 0;) {
        assert_int_equal(positions.items[--positions.count], 3 * i);
    }
    fc_index_stack_fini(&positions);
}

/* Each allocation fails once. The entries must stay, and the next append must succeed. */
static void failed_append_or_push_leaves_entries_unchanged(void **state) {
    (void)state;
    fc_order order = {NULL, 0, 0};
    fc_index_stack positions = {NULL, 0, 0};
    size_t failures = 0;
    sim_begin((sim_config){.seed = 1});
    for (size_t i = 0; i < MANY; i++) {
        size_t position = MANY;
        sim_fault_arm(1, SIM_ONCE);
        if (fc_order_append(&order, &groups[i % 3], &position) == FC_ENOMEM) {
            failures++;
            assert_int_equal(position, MANY);
            assert_int_equal(order.count, i);
            assert_int_equal(fc_order_append(&order, &groups[i % 3], &position), FC_OK);
        }
        assert_int_equal(position, i);
        sim_fault_arm(1, SIM_ONCE);
        if (fc_index_stack_push(&positions, i) == FC_ENOMEM) {
            failures++;
            assert_int_equal(positions.count, i);
            assert_int_equal(fc_index_stack_push(&positions, i), FC_OK);
        }
    }
    assert_int_equal(failures, 8); /* capacities 16, 32, 64 and 128 of both arrays */
    for (size_t i = 0; i < MANY; i++) {
        assert_ptr_equal(order.items[i], &groups[i % 3]);
        assert_int_equal(positions.items[i], i);
    }
    fc_order_fini(&order);
    fc_index_stack_fini(&positions);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_keeps_append_sequence),
        cmocka_unit_test(forgotten_group_becomes_null_and_indices_stay),
        cmocka_unit_test(index_stack_returns_indices_in_reverse_order),
        cmocka_unit_test(failed_append_or_push_leaves_entries_unchanged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
