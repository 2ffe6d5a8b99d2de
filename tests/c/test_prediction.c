/* The prediction of a sequence. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

#include "transport/prediction.h"

/* Adds a value. Returns whether it was predicted. */
static bool add(op_prediction *p, uint64_t value) {
    const bool predicted = op_prediction_next(p) == value;
    op_prediction_add(p, value);
    return predicted;
}

/* Adds `count` values that repeat with a period of `period`. Returns how many were predicted. */
static int add_periodic(op_prediction *p, int period, int count) {
    int predicted = 0;
    for (int i = 0; i < count; i++) {
        predicted += add(p, (uint64_t)(1 + i % period)) ? 1 : 0;
    }
    return predicted;
}

static op_prediction make(void) {
    op_prediction p = {0};
    assert_true(op_prediction_reserve(&p));
    assert_true(op_prediction_reserve(&p));
    assert_int_equal(op_prediction_next(&p), 0);
    return p;
}

static void repeated_sequence_is_predicted(void **state) {
    (void)state;
    static const int periods[] = {1, 2, 3, 50, 1000};
    for (size_t i = 0; i < sizeof periods / sizeof periods[0]; i++) {
        op_prediction p = make();
        assert_int_equal(add_periodic(&p, periods[i], periods[i]), 0);
        /* The first repetition of the first two values has a new context. */
        assert_true(add_periodic(&p, periods[i], 10 * periods[i]) >= 10 * periods[i] - 2);
        assert_int_equal(add_periodic(&p, periods[i], periods[i]), periods[i]);
        op_prediction_fini(&p);
    }
}

/* Steps of gradient accumulation: four equal passes, then one more value. */
static int add_accumulation(op_prediction *p, int steps) {
    int missed = 0;
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < 40; i++) {
            missed += add(p, (uint64_t)(1 + i % 10)) ? 0 : 1;
        }
        missed += add(p, 99) ? 0 : 1;
    }
    return missed;
}

static void longest_known_context_decides_the_prediction(void **state) {
    (void)state;
    op_prediction p = make();
    const int missed = add_accumulation(&p, 20);
    assert_true(missed > 12 && missed < 60); /* the first 12 values have no known context */
    assert_int_equal(add_accumulation(&p, 20), 0);
    op_prediction_fini(&p);
}

static void context_with_different_successors_gives_no_prediction(void **state) {
    (void)state;
    op_prediction p = make();
    static const uint64_t values[] = {1, 2, 3, 1, 2};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        op_prediction_add(&p, values[i]);
    }
    assert_int_equal(op_prediction_next(&p), 3);
    op_prediction_add(&p, 4); /* 1, 2 was followed by 3 and by 4 */
    op_prediction_add(&p, 1);
    op_prediction_add(&p, 2);
    assert_int_equal(op_prediction_next(&p), 0);
    op_prediction_fini(&p);
}

static void prediction_keeps_the_latest_values(void **state) {
    (void)state;
    op_prediction p = make();
    for (uint64_t i = 0; i < OP_RECENT + 10; i++) {
        assert_int_equal(op_prediction_at(&p, i), 0);
        op_prediction_add(&p, 1000 + i);
        assert_int_equal(op_prediction_at(&p, i), 1000 + i);
    }
    assert_int_equal(op_prediction_at(&p, 9), 0);
    assert_int_equal(op_prediction_at(&p, 10), 1010);
    op_prediction_fini(&p);
    assert_int_equal(op_prediction_at(&p, 10), 0);
}

/* Ranks with equal values predict the same, also for values without a pattern. */
static void equal_sequences_have_equal_predictions(void **state) {
    (void)state;
    op_prediction a = make(), b = make();
    uint64_t random = 1;
    for (int i = 0; i < 100000; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        assert_int_equal(op_prediction_next(&a), op_prediction_next(&b));
        op_prediction_add(&a, 1 + (random >> 62));
        op_prediction_add(&b, 1 + (random >> 62));
    }
    op_prediction_fini(&a);
    op_prediction_fini(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(repeated_sequence_is_predicted),
        cmocka_unit_test(longest_known_context_decides_the_prediction),
        cmocka_unit_test(context_with_different_successors_gives_no_prediction),
        cmocka_unit_test(prediction_keeps_the_latest_values),
        cmocka_unit_test(equal_sequences_have_equal_predictions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
