/* Element types: sizes, names and promotion. */
#include "core/dtype.h"

#include "sim.h"

/* c10::ScalarType numbers without a name in kernels.h. */
enum { INT64 = 4, COMPLEX32 = 8, COMPLEX64 = 9, COMPLEX128 = 10, BITS1X8 = 18 };

static void dtype_has_torch_size_and_name(void **state) {
    (void)state;
    assert_int_equal(fc_dtype_size(FCK_UINT8), 1);
    assert_int_equal(fc_dtype_size(FCK_BFLOAT16), 2);
    assert_int_equal(fc_dtype_size(FCK_FLOAT64), 8);
    assert_int_equal(fc_dtype_size(COMPLEX128), 16);
    assert_string_equal(fc_dtype_name(FCK_FLOAT16), "torch.float16");
    assert_string_equal(fc_dtype_name(FCK_BFLOAT16), "torch.bfloat16");
    assert_string_equal(fc_dtype_name(INT64), "torch.int64");
    assert_int_equal(fc_dtype_size(BITS1X8), 0);
    assert_int_equal(fc_dtype_size(FCT_NO_DTYPE), 0);
    assert_string_equal(fc_dtype_name(FCT_NO_DTYPE), "an unknown dtype");
    assert_string_equal(fc_dtype_name(BITS1X8), "an unknown dtype");
}

static void expect_wider(fct_dtype a, fct_dtype b, fct_dtype wanted) {
    assert_int_equal(fc_dtype_wider(a, b), wanted);
    assert_int_equal(fc_dtype_wider(b, a), wanted);
}

static void wider_dtype_holds_values_of_both(void **state) {
    (void)state;
    expect_wider(FCK_FLOAT32, FCK_FLOAT32, FCK_FLOAT32);
    expect_wider(FCK_FLOAT32, FCK_FLOAT64, FCK_FLOAT64);
    expect_wider(FCK_BFLOAT16, FCK_FLOAT32, FCK_FLOAT32);
    expect_wider(FCK_BFLOAT16, FCK_FLOAT16,
                 FCK_FLOAT32); /* neither dtype holds the other's values */
    expect_wider(INT64, INT64, INT64);
    expect_wider(INT64, FCK_FLOAT64, FCT_NO_DTYPE);
}

static void complex_dtype_is_as_wide_as_its_parts(void **state) {
    (void)state;
    assert_true(fc_dtype_is_complex(COMPLEX32) && fc_dtype_is_complex(COMPLEX128));
    assert_false(fc_dtype_is_complex(FCK_FLOAT64));
    assert_int_equal(fc_dtype_complex(FCK_FLOAT16), COMPLEX32);
    assert_int_equal(fc_dtype_complex(FCK_BFLOAT16), COMPLEX64); /* the next wider one */
    assert_int_equal(fc_dtype_complex(INT64), INT64);
    expect_wider(COMPLEX64, FCK_FLOAT32, COMPLEX64);
    expect_wider(COMPLEX64, FCK_FLOAT64, COMPLEX128);
    expect_wider(COMPLEX32, FCK_BFLOAT16, COMPLEX64);
    expect_wider(COMPLEX64, INT64, FCT_NO_DTYPE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtype_has_torch_size_and_name),
        cmocka_unit_test(wider_dtype_holds_values_of_both),
        cmocka_unit_test(complex_dtype_is_as_wide_as_its_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
