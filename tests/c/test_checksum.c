/* Checksums of slots, and of memory of the host. */
#include "core/checksum.h"

#include <string.h>

#include "kernels/checksum.h"
#include "sim_model.h"

enum { FLIPS = 1000 };

static void each_flipped_bit_of_memory_changes_its_checksum(void **state) {
    (void)state;
    unsigned char memory[601];
    for (size_t i = 0; i < sizeof memory; i++) {
        memory[i] = (unsigned char)(i * 37);
    }
    for (size_t bytes = 0; bytes < sizeof memory; bytes += bytes < 24 ? 1 : 61) {
        const unsigned char *data = memory + bytes % 2; /* also unaligned */
        const uint64_t right = fck_checksum(data, bytes);
        for (size_t bit = 0; bit < 8 * bytes; bit++) {
            memory[bytes % 2 + bit / 8] ^= (unsigned char)(1U << bit % 8);
            assert_true(fck_checksum(data, bytes) != right);
            memory[bytes % 2 + bit / 8] ^= (unsigned char)(1U << bit % 8);
        }
        assert_true(fck_checksum(data, bytes) == right);
    }
}

/* The second flip has each distance in words, among them multiples of a vector's size. */
static void two_flips_of_the_highest_bit_change_the_checksum(void **state) {
    (void)state;
    uint64_t words[200] = {0};
    const uint64_t right = fck_checksum(words, sizeof words);
    for (size_t i = 1; i < 200; i++) {
        words[0] = words[i] = UINT64_C(1) << 63;
        assert_true(fck_checksum(words, sizeof words) != right);
        words[i] = 0;
    }
}

static void words_in_another_order_change_the_checksum(void **state) {
    (void)state;
    uint64_t words[40] = {0};
    words[0] = 7;
    const uint64_t right = fck_checksum(words, sizeof words);
    for (size_t i = 1; i < 40; i++) {
        words[i - 1] = 0;
        words[i] = 7;
        assert_true(fck_checksum(words, sizeof words) != right);
    }
}

/* A slot of several pieces, whose last piece is not full. */
static void flipped_bits_of_a_long_slot_change_the_checksum(void **state) {
    (void)state;
    enum { BYTES = 3 * 65536 + 4096 };
    const fck_backend *kernels = fck_backend_of(FCK_DEVICE_CPU);
    const fc_checksum_shard shard = {1, true};
    sim_begin((sim_config){.seed = 7});
    const int64_t size[1] = {BYTES};
    fct_tensor *source = sim_tensor_new(FCK_UINT8, 1, size, NULL);
    fct_tensor *target = sim_tensor_new(FCK_UINT8, 1, size, NULL);
    fct_facts from, to;
    fct_tensor_facts(source, &from);
    fct_tensor_facts(target, &to);
    fc_checksum right = {0}, copied = {0}, packed = {0};
    assert_null(fc_checksum_add(&right, 2, shard, from.data, BYTES, NULL, kernels));
    assert_null(fc_checksum_add(&copied, 2, shard, from.data, BYTES, to.data, kernels));
    assert_true(copied.all == right.all && copied.own == right.own);
    assert_memory_equal(from.data, to.data, BYTES);
    const fck_segment segment = {from.data, to.data, BYTES, 1, FCK_UINT8, FCK_UINT8};
    assert_null(fc_checksum_pack(&packed, 2, &segment, kernels));
    assert_true(packed.own == right.own);
    for (size_t i = 0; i < FLIPS; i++) {
        fc_checksum other = {0};
        const uint64_t bit = sim_random();
        sim_tensor_flip_bit(source, bit);
        assert_null(fc_checksum_add(&other, 2, shard, from.data, BYTES, NULL, kernels));
        assert_true(other.all != right.all && other.own != right.own);
        sim_tensor_flip_bit(source, bit);
    }
    fct_tensor_release(source);
    fct_tensor_release(target);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_flipped_bit_of_memory_changes_its_checksum),
        cmocka_unit_test(two_flips_of_the_highest_bit_change_the_checksum),
        cmocka_unit_test(words_in_another_order_change_the_checksum),
        cmocka_unit_test(flipped_bits_of_a_long_slot_change_the_checksum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
