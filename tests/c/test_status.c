/* Status codes: the message of a failed call, and the control flow of FC_TRY. */
#include "core/status.h"

#include <string.h>

#include "sim.h"

static void error_set_writes_message_and_returns_code(void **state) {
    (void)state;
    fc_error err = {"before"};
    assert_int_equal(fc_error_set(&err, FC_EVALUE, "%s has %d rows", "weight", 3), FC_EVALUE);
    assert_string_equal(err.message, "weight has 3 rows");
    assert_int_equal(fc_error_set(NULL, FC_ESTATE, "unused message %d", 1), FC_ESTATE);
}

static void error_set_truncates_long_message(void **state) {
    (void)state;
    char name[2 * sizeof(fc_error)];
    fc_error errors[2] = {{""}, {"the next one"}};
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_int_equal(fc_error_set(&errors[0], FC_EASSERT, "%s", name), FC_EASSERT);
    assert_int_equal(strlen(errors[0].message), sizeof errors[0].message - 1);
    assert_string_equal(errors[1].message, "the next one");
}

static fc_status count_call(int *calls, fc_status status) {
    ++*calls;
    return status;
}

static fc_status three_calls(int *calls, fc_status second) {
    fc_status status = FC_OK;
    FC_TRY(count_call(calls, FC_OK));
    FC_TRY(count_call(calls, second));
    FC_TRY(count_call(calls, FC_OK));
done:
    return status;
}

static fc_status boundary_call(int result) {
    fc_status status = FC_OK;
    FC_TRY_RAISED(result);
done:
    return status;
}

static void fc_try_returns_first_failure(void **state) {
    (void)state;
    int calls = 0;
    assert_int_equal(three_calls(&calls, FC_OK), FC_OK);
    assert_int_equal(calls, 3);
    assert_int_equal(three_calls(&calls, FC_ENOMEM), FC_ENOMEM);
    assert_int_equal(calls, 5);
    assert_int_equal(boundary_call(0), FC_OK);
    assert_int_equal(boundary_call(-1), FC_ERAISED);
}

/* Callbacks test a status for 0, which must therefore be no failure. */
static void status_codes_are_distinct_and_only_ok_is_zero(void **state) {
    (void)state;
    static const int values[] = {
#define VALUE(name, value, raises) name,
        FC_STATUS_MAP(VALUE)
#undef VALUE
    };
    const size_t count = sizeof values / sizeof values[0];
    assert_int_equal(values[0], 0);
    for (size_t i = 1; i < count; i++) {
        assert_true(values[i] < values[i - 1]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_set_writes_message_and_returns_code),
        cmocka_unit_test(error_set_truncates_long_message),
        cmocka_unit_test(fc_try_returns_first_failure),
        cmocka_unit_test(status_codes_are_distinct_and_only_ok_is_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
