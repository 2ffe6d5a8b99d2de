/* Conversions of the kernels: the nearest value, ties to even, NaN preserved, for every pair of
 * floating dtypes and every backend under test. Vector loops give the same bits as portable
 * loops. */
#include "kernels_reference.h"

#include "kernels/cast_cpu.h"

static void all_16_bit_values_widen_exactly_and_convert_to_other_16_bit_type(void **state) {
    (void)state;
    static uint16_t pattern[65536];
    for (size_t t = 0; t < 2; t++) {
        int64_t count = 0;
        for (int bits = 0; bits < 65536; bits++) {
            if (!isnan(value_of_16_bits((uint16_t)bits, FLOATS[t]))) {
                pattern[count++] = (uint16_t)bits;
            }
        }
        assert_int_equal(count, 65536 - 2 * (t == 0 ? 1023 : 127));
        FOR_EACH_BACKEND(backend) {
            for (size_t to = 0; to < FLOAT_TYPES; to++) {
                assert_converts_like_reference(backend, pattern, FLOATS[t], FLOATS[to], count);
            }
        }
    }
}

/* Covers every finite value of a 16-bit dtype, every midpoint between two of them, and the adjacent
 * floats. */
static void float32_to_16_bit_rounds_to_nearest_even_at_every_boundary(void **state) {
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        const fck_dtype dtype = FLOATS[t];
        const int last = dtype == FCK_FLOAT16 ? 0x7bff : 0x7f7f;
        float *edges = (float *)malloc(sizeof *edges * 12 * (size_t)(last + 1));
        int64_t count = 0;
        for (int bits = 0; bits <= last; bits++) {
            const double value = value_of_16_bits((uint16_t)bits, dtype);
            const double next = bits < last ? value_of_16_bits((uint16_t)(bits + 1), dtype)
                                            : ldexp(1, dtype == FCK_FLOAT16 ? 16 : 128);
            const float at[2] = {(float)value, (float)(value / 2 + next / 2)};
            for (int k = 0; k < 2; k++) {
                for (float sign = -1; sign <= 1; sign += 2) {
                    edges[count++] = sign * at[k];
                    edges[count++] = sign * nextafterf(at[k], INFINITY);
                    edges[count++] = sign * nextafterf(at[k], 0);
                }
            }
        }
        FOR_EACH_BACKEND(backend) {
            assert_converts_like_reference(backend, edges, FCK_FLOAT32, dtype, count);
            assert_converts_like_reference(backend, edges, FCK_FLOAT32, FCK_FLOAT64, count);
        }
        free(edges);
    }
}

static void random_bit_patterns_convert_between_all_dtypes(void **state) {
    (void)state;
    const int64_t count = 20000;
    random_state random = {1};
    for (size_t from = 0; from < FLOAT_TYPES; from++) {
        unsigned char *src = new_elements(&random, FLOATS[from], count);
        for (size_t to = 0; to < FLOAT_TYPES; to++) {
            FOR_EACH_BACKEND(backend) {
                assert_converts_like_reference(backend, src, FLOATS[from], FLOATS[to], count);
            }
        }
        free(src);
    }
}

/* A double just above the midpoint of two float16 values becomes the midpoint as a float, and then
 * ties to even. A single rounding of 1 + 2^-11 + 2^-40 would give 1 + 2^-10. */
static void float64_to_16_bit_rounds_through_float32_as_in_torch(void **state) {
    (void)state;
    const double float16_case = 1 + ldexp(1, -11) + ldexp(1, -40);
    const double bfloat16_case = 1 + ldexp(1, -8) + ldexp(1, -40);
    FOR_EACH_BACKEND(backend) {
        uint16_t *float16_bits =
            (uint16_t *)(void *)packed(backend, &float16_case, FCK_FLOAT64, FCK_FLOAT16, 1);
        uint16_t *bfloat16_bits =
            (uint16_t *)(void *)packed(backend, &bfloat16_case, FCK_FLOAT64, FCK_BFLOAT16, 1);
        assert_int_equal(*float16_bits, 0x3c00);
        assert_int_equal(*bfloat16_bits, 0x3f80);
        free(float16_bits);
        free(bfloat16_bits);
    }
}

/* Covers quiet and signaling NaN, both signs, and the smallest and the largest payload. The arrays
 * are long enough for vector loops. */
static void nan_stays_nan_in_every_conversion(void **state) {
    (void)state;
    static const uint64_t fractions[] = {
        1, 0x8, 0x10000, 0x2000000000000, 0x8000000000001, 0xfffffffffffff};
    enum { COUNT = 37 };
    for (size_t from = 0; from < FLOAT_TYPES; from++) {
        const fck_dtype src_dtype = FLOATS[from];
        const int64_t size = size_of(src_dtype);
        const int fraction_bits = src_dtype == FCK_FLOAT64   ? 52
                                  : src_dtype == FCK_FLOAT32 ? 23
                                  : src_dtype == FCK_FLOAT16 ? 10
                                                             : 7;
        unsigned char src[COUNT * 8];
        for (int i = 0; i < COUNT; i++) {
            uint64_t fraction = fractions[i % 6] & ((UINT64_C(1) << fraction_bits) - 1);
            fraction += fraction == 0;
            const uint64_t exponent =
                (UINT64_C(1) << (size * 8 - 1)) - (UINT64_C(1) << fraction_bits);
            const uint64_t sign = (uint64_t)(i / 6 % 2) << (size * 8 - 1);
            const uint64_t bits = sign | exponent | fraction;
            memcpy(src + i * size, &bits, (size_t)size);
            assert_true(isnan(load_value(src + i * size, src_dtype)));
        }
        for (size_t to = 0; to < FLOAT_TYPES; to++) {
            FOR_EACH_BACKEND(backend) {
                unsigned char *dst = packed(backend, src, src_dtype, FLOATS[to], COUNT);
                for (int i = 0; i < COUNT; i++) {
                    assert_true(isnan(load_value(dst + i * size_of(FLOATS[to]), FLOATS[to])));
                }
                free(dst);
            }
        }
    }
}

/* The bits must not depend on the kind of loop, also for NaN. The lengths cover all tails of the
 * vector loops. */
static void vector_loops_match_portable_loops_bit_for_bit(void **state) {
    (void)state;
    const fck_loops *best = fck_loops_best();
    if (best == &fck_loops_portable) {
        skip();
    }
    static const int64_t element_size[FCK_LOOP_TYPES] = {2, 8, 2};
    enum { LONGEST = 5000 };
    static unsigned char src[LONGEST * 8], fast[LONGEST * 8 + 8], slow[LONGEST * 8 + 8];
    random_state random = {2};
    for (int64_t count = 0; count <= LONGEST; count += count < 70 ? 1 : 493) {
        for (int k = 0; k < (int)sizeof src; k++) {
            /* NaN or infinite: a quarter of float16 values, an eighth of bfloat16 and float32. */
            src[k] = (unsigned char)(draw(&random) | (draw(&random) % 4 == 0 ? 0x7f : 0));
        }
        for (int s = 0; s < FCK_LOOP_TYPES; s++) {
            memset(fast, UNTOUCHED, sizeof fast);
            memset(slow, UNTOUCHED, sizeof slow);
            best->from_float[s](src, fast, count);
            fck_loops_portable.from_float[s](src, slow, count);
            assert_memory_equal(fast, slow, sizeof fast);
            assert_int_equal(fast[count * element_size[s]], UNTOUCHED);
            best->to_float[s](src, fast, count);
            fck_loops_portable.to_float[s](src, slow, count);
            assert_memory_equal(fast, slow, sizeof fast);
        }
    }
}

static void only_floating_dtypes_convert_and_all_dtypes_copy(void **state) {
    (void)state;
    for (fck_dtype src = 0; src < 20; src++) {
        for (fck_dtype dst = 0; dst < 20; dst++) {
            const int floats = is_float(src) && is_float(dst);
            assert_int_equal(!!fck_can_cast(FCK_DEVICE_CPU, src, dst), src == dst || floats);
        }
    }
    assert_true(fck_can_cast(FCK_DEVICE_CPU, FCK_FLOAT64, FCK_BFLOAT16));
    assert_true(fck_can_cast(FCK_DEVICE_CPU, FCK_COMPLEX128, FCK_COMPLEX128));
    assert_false(fck_can_cast(FCK_DEVICE_CPU, FCK_UINT8, FCK_FLOAT32));
    assert_false(fck_can_cast(FCK_DEVICE_CPU, FCK_FLOAT32, FCK_COMPLEX128));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_16_bit_values_widen_exactly_and_convert_to_other_16_bit_type),
        cmocka_unit_test(float32_to_16_bit_rounds_to_nearest_even_at_every_boundary),
        cmocka_unit_test(random_bit_patterns_convert_between_all_dtypes),
        cmocka_unit_test(float64_to_16_bit_rounds_through_float32_as_in_torch),
        cmocka_unit_test(nan_stays_nan_in_every_conversion),
        cmocka_unit_test(vector_loops_match_portable_loops_bit_for_bit),
        cmocka_unit_test(only_floating_dtypes_convert_and_all_dtypes_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
