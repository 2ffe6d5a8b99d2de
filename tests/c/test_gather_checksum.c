/* Checksums of all-gathers on the host. test_device_checksums.c tests those of devices. */
#include "core/gather_checksum.h"

#include "core/gather.h"
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

/* Expects `count` checksums. Returns the last one. */
static uint64_t expect_checksums(size_t count) {
    const sim_checksum *list;
    assert_int_equal(sim_checksums(&list), count);
    assert_int_equal(list[count - 1].kind, FCT_OP_ALL_GATHER);
    assert_true(list[count - 1].value != 0);
    return list[count - 1].value;
}

/* Gathers, and flips a bit of the gathered shards unless `bit` is negative. Returns the checksum,
 * which is number `number` of this test. */
static uint64_t gather_with_flip(size_t number, int64_t bit) {
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    if (bit >= 0) {
        sim_tensor_flip_bit(gather->pending.buffer, (uint64_t)bit);
    }
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    return expect_checksums(number);
}

static void flipped_bits_of_gathered_shards_change_the_checksum(void **state) {
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

/* All ranks gather the same shards, but this rank's shard has changed since its pack. */
static void checksum_differs_if_the_own_shard_has_changed_since_the_pack(void **state) {
    (void)state;
    begin(false);
    const uint64_t right = gather_with_flip(1, -1);
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    gather->pending.checksum.packed.own++;
    assert_int_equal(fc_gather_await(gather), FC_OK);
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    assert_true(expect_checksums(2) != right);
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    end();
}

/* Ranks may differ in whether large parameters have their own chunks. The first parameter is
 * sharded on dim 1. It has several blocks, which are copied after the checksum. */
static void checksum_does_not_depend_on_chunks(void **state) {
    (void)state;
    uint64_t values[2];
    for (int split = 0; split < 2; split++) {
        sim_scenario s = {.world = 3, .rank = 1, .layers = 1, .shape_count = 3};
        s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {3, 6}, .dim = 1};
        s.shapes[1] = (sim_shape){.ndim = 2, .sizes = {40, 7}};
        s.shapes[2] = (sim_shape){.ndim = 1, .sizes = {4}};
        s.device = (sim_config){.seed = 7, .chunks = split == 1};
        sim_begin(s.device);
        model = sim_model_new(&s);
        gather = &model->layers[1].groups[0].core.gather;
        model->comm.checksums = true;
        assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
        assert_int_equal(gather->pending.split, split == 1);
        assert_int_equal(fc_gather_await(gather), FC_OK);
        assert_int_equal(fc_gather_copy_out(gather), FC_OK);
        values[split] = expect_checksums(1);
        fc_gather_complete(gather, NULL);
        fc_gather_free(gather);
        end();
    }
    assert_true(values[0] == values[1]);
}

static void repeated_copy_out_adds_one_checksum(void **state) {
    (void)state;
    fc_status first = FC_ERAISED;
    int64_t call = 0;
    while (first != FC_OK) {
        begin(false);
        assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
        assert_int_equal(fc_gather_await(gather), FC_OK);
        sim_fault_arm(++call, SIM_ONCE);
        first = fc_gather_copy_out(gather);
        sim_fault_arm(0, SIM_ONCE);
        assert_true(first == FC_OK || fc_gather_copy_out(gather) == FC_OK);
        fc_gather_complete(gather, NULL);
        (void)expect_checksums(1);
        end();
    }
    assert_true(call > 4); /* several calls have failed */
}

/* Another rank may use the shards of a prefetch that this rank abandons. */
static void abandoned_gather_adds_an_unknown_checksum(void **state) {
    (void)state;
    const sim_checksum *list;
    begin(false);
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    fc_gather_abandon(gather);
    assert_int_equal(sim_checksums(&list), 1);
    assert_int_equal(list[0].value, 0);
    end();
}

/* Ranks may have waited for different gathers before the reset. */
static void reset_drops_the_checksums(void **state) {
    (void)state;
    const sim_checksum *list;
    begin(false);
    (void)gather_with_flip(1, -1);
    assert_int_equal(fc_state_reset(&model->layers[0].core), FC_OK);
    assert_int_equal(sim_checksums(&list), 0);
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
        cmocka_unit_test(flipped_bits_of_gathered_shards_change_the_checksum),
        cmocka_unit_test(checksum_differs_if_the_own_shard_has_changed_since_the_pack),
        cmocka_unit_test(checksum_does_not_depend_on_chunks),
        cmocka_unit_test(repeated_copy_out_adds_one_checksum),
        cmocka_unit_test(abandoned_gather_adds_an_unknown_checksum),
        cmocka_unit_test(reset_drops_the_checksums),
        cmocka_unit_test(without_the_setting_no_checksum_is_added),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
