/* Status codes: the message of a failed call, and the control flow of FC_TRY. */
#include "core/status.h"

#include <stdio.h>
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

static void cut_text_ends_and_begins_with_a_whole_character(void **state) {
    (void)state;
    static const char *const characters[] = {"x", "\xC3\xA9", "\xE5\xB1\x82", "\xF0\x9F\x98\x80"};
    for (size_t i = 0; i < 4; i++) {
        const size_t bytes = strlen(characters[i]);
        for (size_t kept = 0; kept <= bytes; kept++) {
            char text[8] = "a";
            strncat(text, characters[i], kept);
            fc_text_trim_end(text);
            assert_int_equal(strlen(text), kept < bytes ? 1 : 1 + bytes);
        }
        char text[8];
        (void)snprintf(text, sizeof text, "%sa", characters[i]);
        assert_ptr_equal(fc_text_trim_start(text), text);
        assert_ptr_equal(fc_text_trim_start(text + 1), text + bytes);
    }
    char empty[1] = "";
    fc_text_trim_end(empty);
    assert_ptr_equal(fc_text_trim_start(empty), empty);
}

static void error_message_is_cut_between_characters(void **state) {
    (void)state;
    fc_error err;
    char name[sizeof err.message + 3];
    for (size_t i = 0; i + 3 <= sizeof name; i += 3) {
        memcpy(name + i, "\xE5\xB1\x82", 4);
    }
    assert_int_equal(fc_error_set(&err, FC_ESTATE, "%s", name), FC_ESTATE);
    assert_int_equal(strlen(err.message), sizeof err.message / 3 * 3);
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
        cmocka_unit_test(cut_text_ends_and_begins_with_a_whole_character),
        cmocka_unit_test(error_message_is_cut_between_characters),
        cmocka_unit_test(fc_try_returns_first_failure),
        cmocka_unit_test(status_codes_are_distinct_and_only_ok_is_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
