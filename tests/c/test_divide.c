/* Divide rule: how a mean is split around the collectives. */
#include "core/divide.h"

#include "sim.h"

/* `total` is derived from the rule in expect_divisions. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

typedef struct division {
    fc_divide_rule rule;
    fc_divide divide;
} division;

static void expect_divisions(const division *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const fc_divide actual = fc_divide_split(&cases[i].rule);
        const fc_divide *expected = &cases[i].divide;
        const fc_divide_rule *rule = &cases[i].rule;
        const int64_t replicas = rule->replicas > 0 ? rule->replicas : 1;
        assert_true(actual.total ==
                    (rule->has_factor ? rule->factor : (double)(rule->world * replicas)));
        if (actual.before != expected->before || actual.after != expected->after ||
            actual.op != expected->op || actual.premultiply != expected->premultiply ||
            actual.all_reduce_op != expected->all_reduce_op) {
            fail_msg("case %zu: before %g, after %g, op %d, premultiply %g, all-reduce op %d", i,
                     actual.before, actual.after, (int)actual.op, actual.premultiply,
                     (int)actual.all_reduce_op);
        }
    }
}

/* The cases are initializers of `division`. In them a fc_divide is {before, after, op, premultiply,
 * all_reduce_op}. */
#define DIVIDE_AS(...)                                                                             \
    do {                                                                                           \
        const division cases[] = {__VA_ARGS__};                                                    \
        expect_divisions(cases, sizeof cases / sizeof cases[0]);                                   \
    } while (0)

static void wide_range_dtype_uses_backend_mean(void **state) {
    (void)state;
    DIVIDE_AS({{.world = 8, .dtype = FCK_FLOAT32}, {1, 1, FCT_AVG, 1, FCT_AVG}},
              {{.world = 8, .dtype = FCK_BFLOAT16}, {1, 1, FCT_AVG, 1, FCT_AVG}},
              {{.world = 4, .replicas = 2, .dtype = FCK_FLOAT32}, {1, 1, FCT_AVG, 1, FCT_AVG}},
              {{.world = 1, .replicas = 4, .dtype = FCK_FLOAT32}, {1, 1, FCT_AVG, 1, FCT_AVG}});
}

static void float16_is_divided_before_and_after_by_about_square_root(void **state) {
    (void)state;
    DIVIDE_AS({{.world = 2, .dtype = FCK_FLOAT16}, {2, 1, FCT_SUM, 1, FCT_SUM}},
              {{.world = 4, .dtype = FCK_FLOAT16}, {2, 2, FCT_SUM, 1, FCT_SUM}},
              {{.world = 8, .dtype = FCK_FLOAT16}, {4, 2, FCT_SUM, 1, FCT_SUM}},
              {{.world = 6, .dtype = FCK_FLOAT16}, {4, 1.5, FCT_SUM, 1, FCT_SUM}},
              {{.world = 4, .replicas = 4, .dtype = FCK_FLOAT16}, {4, 4, FCT_SUM, 1, FCT_SUM}},
              {{.world = 4, .dtype = FCK_FLOAT16, .has_factor = true, .factor = 0x1p80},
               {0x1p40, 0x1p40, FCT_SUM, 1, FCT_SUM}});
}

static void forced_sum_is_divided_after_reduction(void **state) {
    (void)state;
    DIVIDE_AS(
        {{.world = 4, .dtype = FCK_FLOAT32, .force_sum = true}, {1, 4, FCT_SUM, 1, FCT_SUM}},
        {{.world = 4, .replicas = 2, .dtype = FCK_BFLOAT16, .force_sum = true},
         {1, 8, FCT_SUM, 1, FCT_SUM}},
        {{.world = 4, .dtype = FCK_FLOAT32, .force_sum = true, .has_factor = true, .factor = 3},
         {1, 3, FCT_SUM, 1, FCT_SUM}});
}

static void divide_factor_uses_premul_sum_if_supported(void **state) {
    (void)state;
    const fc_divide_rule supported = {
        .world = 4, .dtype = FCK_FLOAT32, .has_factor = true, .factor = 8, .has_premul = true};
    fc_divide_rule unsupported = supported;
    fc_divide_rule replicated = supported;
    fc_divide_rule float16 = supported;
    unsupported.has_premul = false;
    replicated.world = 1;
    replicated.replicas = 4;
    float16.dtype = FCK_FLOAT16;
    DIVIDE_AS({supported, {1, 1, FCT_PREMUL_SUM, 0.125, FCT_SUM}},
              {unsupported, {8, 1, FCT_SUM, 1, FCT_SUM}}, {replicated, {8, 1, FCT_SUM, 1, FCT_SUM}},
              {float16, {4, 2, FCT_SUM, 1, FCT_SUM}});
}

static void divide_factor_of_world_size_uses_mean(void **state) {
    (void)state;
    DIVIDE_AS({{.world = 4, .dtype = FCK_FLOAT32, .has_factor = true, .factor = 4},
               {1, 1, FCT_AVG, 1, FCT_SUM}});
}

static void one_rank_divides_only_by_divide_factor(void **state) {
    (void)state;
    DIVIDE_AS({{.world = 1, .dtype = FCK_FLOAT32}, {1, 1, FCT_SUM, 1, FCT_SUM}},
              {{.world = 1, .dtype = FCK_FLOAT16}, {1, 1, FCT_SUM, 1, FCT_SUM}},
              {{.world = 1, .replicas = 1, .dtype = FCK_FLOAT32}, {1, 1, FCT_SUM, 1, FCT_SUM}},
              {{.world = 1, .dtype = FCK_FLOAT32, .has_factor = true, .factor = 4},
               {1, 4, FCT_SUM, 1, FCT_SUM}});
}

/* In every split the divisors multiply to the number of ranks, or to the divide factor. */
static void product_of_all_divisors_equals_total_divisor(void **state) {
    (void)state;
    const fct_dtype dtypes[] = {FCK_FLOAT32, FCK_BFLOAT16, FCK_FLOAT16, FCK_FLOAT64};
    for (int64_t bits = 0; bits < 16; bits++) {
        for (int64_t world = 1; world <= 12; world++) {
            for (int64_t replicas = 0; replicas <= 3; replicas++) {
                const fc_divide_rule rule = {.world = world,
                                             .replicas = replicas,
                                             .dtype = dtypes[bits & 3],
                                             .has_factor = (bits & 4) != 0,
                                             .factor = 24.0,
                                             .force_sum = (bits & 8) != 0,
                                             .has_premul = (world & 1) != 0};
                const fc_divide d = fc_divide_split(&rule);
                double total = d.before * d.after / d.premultiply;
                double ranks = (double)(world * (replicas > 0 ? replicas : 1));
                total *= d.op == FCT_AVG ? (double)world : 1.0;
                total *= d.all_reduce_op == FCT_AVG && replicas > 0 ? (double)replicas : 1.0;
                double expected = rule.has_factor ? rule.factor : ranks;
                assert_true(total / expected > 1.0 - 1e-12 && total / expected < 1.0 + 1e-12);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wide_range_dtype_uses_backend_mean),
        cmocka_unit_test(float16_is_divided_before_and_after_by_about_square_root),
        cmocka_unit_test(forced_sum_is_divided_after_reduction),
        cmocka_unit_test(divide_factor_uses_premul_sum_if_supported),
        cmocka_unit_test(divide_factor_of_world_size_uses_mean),
        cmocka_unit_test(one_rank_divides_only_by_divide_factor),
        cmocka_unit_test(product_of_all_divisors_equals_total_divisor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
