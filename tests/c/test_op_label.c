/* The text of a mismatch of two labels names the first field that differs. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

/* A reduction of parameters 0 and 2 of the root's unit. */
static const fct_op_label REDUCTION = {
    .unit = 5, .params = 5, .contents = 1, .divisor = 2, .step = 1, .pass = FCT_PASS_BACKWARD};

/* Checks that the text of rank 3, which has `label`, contains `expected`. */
static void expect_text(const fct_op_label *label, const fct_op_label *peer, fct_op_kind kind,
                        const char *expected) {
    char text[200];
    op_label_describe(label, peer, kind, 3, text, sizeof text);
    if (strstr(text, expected) == NULL) {
        fail_msg("'%s' does not contain '%s'", text, expected);
    }
}

static void label_text_lists_parameters(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    assert_true(op_label_is_equal(&a, &b));
    b.params = 1;
    assert_false(op_label_is_equal(&a, &b));
    expect_text(
        &a, &b, FCT_OP_REDUCE_SCATTER,
        "rank 3 reduce-scatters the root's unit with the gradients of parameters 0, 2 (step "
        "1, backward)");
}

static void long_label_text_lists_parameters_from_the_first_difference_on(void **state) {
    (void)state;
    fct_op_label a = REDUCTION, b = REDUCTION;
    a.params = UINT64_MAX, b.params = UINT64_MAX & ~(UINT64_C(1) << 40);
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, "parameters 41, 42, 43, ");
    expect_text(&a, &b, FCT_OP_REDUCE_SCATTER, "parameters 40, 41, 42, ");
    expect_text(&a, &b, FCT_OP_REDUCE_SCATTER, ", ... (step");
}

static void label_text_names_the_divisor(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    b.divisor = 7, b.contents = 2;
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, " with divisor 7 ");
}

static void label_text_names_the_size(void **state) {
    (void)state;
    const fct_op_label gather = {.unit = 5, .contents = 64, .size = 64}, other = {.unit = 5};
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    b.size = 12, b.reduce_op = FCT_AVG;
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, " of 12 elements per rank ");
    expect_text(&gather, &other, FCT_OP_ALL_GATHER, " of 64 bytes per rank ");
}

static void label_text_names_the_reduce_op(void **state) {
    (void)state;
    fct_op_label a = REDUCTION, b = REDUCTION;
    a.reduce_op = FCT_AVG;
    b.reduce_op = 77; /* of a peer: any number; an unknown operation is described as sum */
    expect_text(&a, &b, FCT_OP_REDUCE_SCATTER, " by average ");
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, " by sum ");
}

static void label_text_names_other_contents(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    b.contents = 2;
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER,
                " with other parameters from index 64 on, or other factors ");
}

static void label_text_names_another_model(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    b.unit = 6;
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, " of another model ");
}

static void label_text_names_a_unit_without_root(void **state) {
    (void)state;
    const fct_op_label gather = {.unit = 5}, other = {.unit = FCT_LABEL_NO_ROOT};
    expect_text(&other, &gather, FCT_OP_ALL_GATHER,
                "rank 3 gathers a unit before the first forward of its root (step 0, forward)");
}

static void label_text_of_unknown_pass_contains_outside_of_a_pass(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    b.pass = 9;
    expect_text(&b, &a, FCT_OP_REDUCE_SCATTER, "the root's unit (step 1, outside of a pass)");
}

static void label_text_ends_a_name_that_is_not_terminated(void **state) {
    (void)state;
    const fct_op_label a = REDUCTION;
    fct_op_label b = REDUCTION;
    memset(b.name, 'x', sizeof b.name); /* memory of a peer */
    expect_text(&b, &a, FCT_OP_ALL_GATHER, "rank 3 gathers 'xxx");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(label_text_lists_parameters),
        cmocka_unit_test(long_label_text_lists_parameters_from_the_first_difference_on),
        cmocka_unit_test(label_text_names_the_divisor),
        cmocka_unit_test(label_text_names_the_size),
        cmocka_unit_test(label_text_names_the_reduce_op),
        cmocka_unit_test(label_text_names_other_contents),
        cmocka_unit_test(label_text_names_another_model),
        cmocka_unit_test(label_text_names_a_unit_without_root),
        cmocka_unit_test(label_text_of_unknown_pass_contains_outside_of_a_pass),
        cmocka_unit_test(label_text_ends_a_name_that_is_not_terminated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
