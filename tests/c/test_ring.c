/* Sums in ring order, compared with a simulated ring all-reduce. */
#include "kernels_reference.h"

#include "kernels/ring.h"

/* Simulates a ring all-reduce over `total` elements per rank, in blocks of `block` elements.
 * Returns the sum of element i on rank i / block, in float. Float64 and 16-bit dtypes use the same
 * order. */
static float simulate_ring_sum(float *const *ranks, int64_t world, int64_t block, int64_t i) {
    int64_t at = (i / block + world - 1) % world;
    float message = ranks[at][i];
    for (int64_t hop = 1; hop < world; hop++) {
        at = (at + world - 1) % world;
        message = ranks[at][i] + message;
    }
    assert_int_equal(at, i / block);
    return message;
}

/* Returns the elements per block. gloo divides the buffer into segments of at most 1 MiB, at least
 * two per rank. A block is the segments of one rank. */
static int64_t gloo_block_numel(int64_t total, int64_t world) {
    int64_t segments = (total * 4 + (1 << 20) - 1) / (1 << 20);
    segments = segments < 2 * world ? 2 * world : segments;
    segments = (segments + world - 1) / world * world;
    int64_t bytes = (total * 4 + segments - 1) / segments;
    return (bytes + 3) / 4 * (segments / world);
}

/* Returns floats with random signs and 24-bit significands, so that a third of the sums of three
 * depend on the order. */
static float *random_floats(int64_t count) {
    float *values = (float *)malloc(sizeof *values * (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        const float significand = (float)((1 << 23) + rand() % (1 << 23));
        values[i] = ldexpf(rand() % 2 == 0 ? significand : -significand, rand() % 4);
    }
    return values;
}

static void check_all_ranks(int64_t world, int64_t numel) {
    const int64_t total = world * numel;
    const int64_t block = gloo_block_numel(total, world);
    float *ranks[8];
    const void *inputs[8];
    float *out = (float *)malloc(sizeof *out * (size_t)numel);
    for (int64_t r = 0; r < world; r++) {
        ranks[r] = random_floats(total);
    }
    for (int64_t own = 0; own < world; own++) {
        for (int64_t r = 0; r < world; r++) {
            inputs[r] = ranks[r] + own * numel;
        }
        fck_ring_sum(FCK_FLOAT32, out, inputs, world, total, own * numel, numel);
        for (int64_t i = 0; i < numel; i++) {
            const float expected = simulate_ring_sum(ranks, world, block, own * numel + i);
            assert_memory_equal(&out[i], &expected, sizeof expected);
        }
    }
    for (int64_t r = 0; r < world; r++) {
        free(ranks[r]);
    }
    free(out);
}

static void ring_sum_adds_in_hop_order(void **state) {
    (void)state;
    static const int64_t numels[] = {1,    2,    3,    7,          64,     65,
                                     1000, 2047, 2049, 131072 + 5, 600001, 600004};
    for (int64_t world = 2; world <= 8; world++) {
        for (size_t i = 0; i < sizeof numels / sizeof numels[0]; i++) {
            if (numels[i] < 100000 || world == 3) {
                check_all_ranks(world, numels[i]);
            }
        }
    }
}

static void ring_sum_can_overwrite_an_input(void **state) {
    (void)state;
    enum { N = 5000 };
    float *ranks[3], expected[N];
    const void *inputs[3];
    for (int r = 0; r < 3; r++) {
        inputs[r] = ranks[r] = random_floats(N);
    }
    fck_ring_sum(FCK_FLOAT32, expected, inputs, 3, 3 * N, N, N);
    for (int r = 0; r < 3; r++) {
        float before[N];
        memcpy(before, ranks[r], sizeof before);
        fck_ring_sum(FCK_FLOAT32, ranks[r], inputs, 3, 3 * N, N, N);
        assert_memory_equal(ranks[r], expected, sizeof expected);
        memcpy(ranks[r], before, sizeof before);
    }
    for (int r = 0; r < 3; r++) {
        free(ranks[r]);
    }
}

/* bfloat16 cannot represent 1 + 1/256, and float16 cannot represent 2048 + 1. With a single
 * rounding at the end the two small inputs would change the result. */
static void ring_sum_rounds_at_each_hop(void **state) {
    (void)state;
    static const struct {
        fck_dtype dtype;
        uint16_t large, small;
    } cases[] = {{FCK_BFLOAT16, 0x3f80, 0x3b80}, {FCK_FLOAT16, 0x6800, 0x3c00}};
    for (size_t i = 0; i < 2; i++) {
        uint16_t large[4], small[4], out[4];
        for (int k = 0; k < 4; k++) {
            large[k] = cases[i].large;
            small[k] = cases[i].small;
        }
        /* The elements are in block 0, which passes from rank 2 to 1 to 0. */
        const void *inputs[3] = {small, small, large};
        fck_ring_sum(cases[i].dtype, out, inputs, 3, 1000, 0, 4);
        assert_memory_equal(out, large, sizeof out);
    }
}

static void ring_sum_supports_only_floating_dtypes(void **state) {
    (void)state;
    assert_true(fck_ring_supports(FCK_FLOAT16) && fck_ring_supports(FCK_FLOAT32));
    assert_true(fck_ring_supports(FCK_FLOAT64) && fck_ring_supports(FCK_BFLOAT16));
    assert_false(fck_ring_supports(FCK_UINT8) || fck_ring_supports(4));
}

/* The sum ends on rank 0, which receives rank 1's values. If both values are NaN, float32 keeps the
 * rank's own. In 16-bit dtypes the result is that of gloo. */
static void ring_sum_nans_match_gloo(void **state) {
    (void)state;
    const uint32_t received[2] = {0x7fc00001, 0xffc00000};
    const uint32_t own[2] = {0xffc00005, 0x3f800000};
    const uint32_t expected[2] = {0xffc00005, 0xffc00000};
    const uint16_t received_float16s[2] = {0xfe05, 0x3c00};
    const uint16_t own_float16s[2] = {0x3c00, 0x7e09};
    const uint16_t expected_float16s[2] = {0xfe00, 0x7e00};
    const uint16_t received_bfloat16s[2] = {0xffc5, 0x3f80};
    const uint16_t own_bfloat16s[2] = {0x3f80, 0x3f80};
    const uint16_t expected_bfloat16s[2] = {0x7fc0, 0x4000};
    uint32_t sum[2];
    uint16_t small[2];
    fck_ring_sum(FCK_FLOAT32, sum, (const void *const[]){own, received}, 2, 4, 0, 2);
    assert_memory_equal(sum, expected, sizeof sum);
    fck_ring_sum(FCK_FLOAT16, small, (const void *const[]){own_float16s, received_float16s}, 2, 4,
                 0, 2);
    assert_memory_equal(small, expected_float16s, sizeof small);
    fck_ring_sum(FCK_BFLOAT16, small, (const void *const[]){own_bfloat16s, received_bfloat16s}, 2,
                 4, 0, 2);
    assert_memory_equal(small, expected_bfloat16s, sizeof small);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ring_sum_nans_match_gloo),
        cmocka_unit_test(ring_sum_adds_in_hop_order),
        cmocka_unit_test(ring_sum_can_overwrite_an_input),
        cmocka_unit_test(ring_sum_rounds_at_each_hop),
        cmocka_unit_test(ring_sum_supports_only_floating_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
