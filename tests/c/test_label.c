/* Labels of collectives: which properties of a collective they contain. */
#include "core/label.h"

#include <string.h>

#include "sim.h"

static fc_param params[70];
static fc_param *group[70];
static const fc_comm_ctx comm = {.step = 3};

static fct_op_label label_reduction(size_t count, fc_param *const *reduced, int64_t numel,
                                    fc_divide divide) {
    fct_op_label label = {0};
    for (size_t i = 0; i < 70; i++) {
        group[i] = &params[i];
    }
    const fc_label_params all = {group, 70, reduced, count};
    fc_label_set_reduction(&label, &comm, all, numel, &divide);
    return label;
}

static void label_of_gather_has_size_step_and_pass(void **state) {
    (void)state;
    fct_op_label label = {.params = 7, .divisor = 2, .reduce_op = 1};
    fc_label_set_gather(&label, &comm, FCT_PASS_FORWARD, 64);
    assert_int_equal(label.contents, 64);
    assert_int_equal(label.size, 64);
    assert_int_equal(label.step, 3);
    assert_int_equal(label.pass, FCT_PASS_FORWARD);
    assert_int_equal(label.params, 0);
    assert_true(label.divisor == 0);
    assert_int_equal(label.reduce_op, 0);
}

static void label_of_reduction_depends_on_each_property(void **state) {
    (void)state;
    const fc_divide mean = {1, 1, FCT_AVG, 1, FCT_AVG, 2};
    fc_param *const some[] = {&params[2], &params[0], &params[66]};
    const fct_op_label label = label_reduction(3, some, 8, mean);
    assert_int_equal(label.params, 5); /* 64 bits: parameter 66 is only in the hash */
    assert_int_equal(label.pass, FCT_PASS_BACKWARD);
    assert_int_equal(label.size, 8);
    assert_int_equal(label.reduce_op, FCT_AVG);
    const fct_op_label same = label_reduction(3, some, 8, mean);
    assert_int_equal(label.contents, same.contents);
    fc_param *const others[] = {&params[2], &params[0], &params[67]};
    fc_divide divides[4] = {mean, mean, mean, mean};
    divides[0].before = 2;
    divides[1].after = 2;
    divides[2].premultiply = 2;
    divides[3].op = FCT_SUM;
    for (int i = 0; i < 4; i++) {
        assert_int_not_equal(label.contents, label_reduction(3, some, 8, divides[i]).contents);
    }
    assert_int_not_equal(label.contents, label_reduction(3, others, 8, mean).contents);
    assert_int_not_equal(label.contents, label_reduction(2, some, 8, mean).contents);
    assert_int_not_equal(label.contents, label_reduction(3, some, 9, mean).contents);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(label_of_gather_has_size_step_and_pass),
        cmocka_unit_test(label_of_reduction_depends_on_each_property),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
