/* Checksums of gathered and all-reduced data. */
#include "core/checksum.h"

#include <string.h>

#include "core/gather.h"
#include "kernels/checksum.h"
#include "sim_model.h"

enum { FLIPS = 1000 };

static sim_model *model;
static sim_group *group;
static fc_gather *gather;

/* Rank 1 of three, with a matrix of 5 rows and a vector; `mixed`: of two dtypes. */
static void begin(bool mixed) {
    sim_scenario s = {.world = 3, .rank = 1, .layers = 1, .shape_count = 2};
    s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {5, 3}};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}};
    s.shapes[1].compute = mixed ? FCK_BFLOAT16 : 0;
    sim_begin((sim_config){.seed = 7});
    model = sim_model_new(&s);
    group = &model->layers[1].groups[0];
    gather = &group->core.gather;
    model->comm.checksums = true;
}

static void end(void) {
    sim_model_free(model);
    sim_end();
}

static uint64_t last_checksum(size_t expected_count) {
    const sim_checksum *list;
    assert_int_equal(sim_checksums(&list), expected_count);
    assert_int_equal(list[expected_count - 1].kind, FCT_OP_ALL_GATHER);
    assert_true(list[expected_count - 1].value != 0);
    return list[expected_count - 1].value;
}

static void flip_bit(const fct_tensor *tensor, uint64_t bit) {
    fct_facts facts;
    fct_tensor_facts(tensor, &facts);
    const uint64_t bits = (uint64_t)(facts.numel * facts.itemsize) * 8;
    ((unsigned char *)facts.data)[bit % bits / 8] ^= (unsigned char)(1U << bit % 8);
}

/* Gathers, and flips a bit of the gathered row unless it is negative. Returns the checksum. */
static uint64_t gather_with_flip(size_t number, int64_t bit) {
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    if (bit >= 0) {
        flip_bit(gather->pending.buffer, (uint64_t)bit);
    }
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    return last_checksum(number);
}

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

static void each_flipped_bit_of_a_gathered_row_changes_the_checksum(void **state) {
    (void)state;
    for (int mixed = 0; mixed < 2; mixed++) {
        begin(mixed != 0);
        const uint64_t right = gather_with_flip(1, -1);
        for (size_t i = 0; i < FLIPS; i++) {
            assert_true(gather_with_flip(2 + 2 * i, (int64_t)(sim_random() >> 1)) != right);
            assert_int_equal(gather_with_flip(3 + 2 * i, -1), right);
        }
        end();
    }
}

/* All ranks gather the same data, but this rank's shard has changed since its pack. */
static void checksum_differs_if_the_own_shard_has_changed_since_the_pack(void **state) {
    (void)state;
    begin(false);
    const fc_group_base *base = &group->core.base;
    fc_process_group *pg = &group->core.base.shard;
    uint64_t packed = 0, values[2];
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    assert_int_equal(fc_checksum_pack(base, pg, &gather->chunks, &packed), FC_OK);
    assert_int_equal(packed, gather->pending.packed);
    for (size_t changed = 0; changed < 2; changed++) {
        assert_int_equal(fc_checksum_add_gather(base, pg, &gather->chunks, packed + changed),
                         FC_OK);
        values[changed] = last_checksum(1 + changed);
    }
    assert_true(values[0] != values[1]);
    fc_gather_abandon(gather);
    end();
}

static void repeated_copy_out_adds_one_checksum(void **state) {
    (void)state;
    begin(false);
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_gather_copy_out(gather), FC_ERAISED);
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    (void)last_checksum(1);
    end();
}

static void without_the_setting_no_checksum_is_added(void **state) {
    (void)state;
    const sim_checksum *list;
    begin(false);
    model->comm.checksums = false;
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    assert_int_equal(sim_checksums(&list), 0);
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_flipped_bit_of_memory_changes_its_checksum),
        cmocka_unit_test(words_in_another_order_change_the_checksum),
        cmocka_unit_test(each_flipped_bit_of_a_gathered_row_changes_the_checksum),
        cmocka_unit_test(checksum_differs_if_the_own_shard_has_changed_since_the_pack),
        cmocka_unit_test(repeated_copy_out_adds_one_checksum),
        cmocka_unit_test(without_the_setting_no_checksum_is_added),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
