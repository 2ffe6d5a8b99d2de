/* Checksums of data in the memory of a device with streams. test_faults.c and test_recovery.c fail
 * each call of a scenario with such checksums. */
#include "core/device_checksums.h"

#include "kernels/checksum.h"
#include "sim_model.h"

enum { FLIPS = 200 };

static sim_model *model;
static uint64_t seed = 3;
static const sim_checksum *list;

/* Two layers on two replicas of two ranks each. */
static void begin(void) {
    sim_scenario s = {.world = 2,
                      .rank = 1,
                      .replicas = 2,
                      .layers = 2,
                      .shape_count = 2,
                      .checksums = true,
                      .device = {.seed = seed, .streams = true}};
    s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {5, 3}};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}};
    sim_begin(s.device);
    model = sim_model_new(&s);
}

static void end(void) {
    sim_model_free(model);
    sim_capture(false);
    sim_end();
}

/* Runs one training step. The next step adds its checksums. */
static void step(void) {
    assert_int_equal(sim_model_step(model), FC_OK);
    sim_drain();
}

static size_t count_unknown(size_t count) {
    size_t unknown = 0;
    for (size_t i = 0; i < count; i++) {
        unknown += list[i].value == 0 ? 1 : 0;
    }
    return unknown;
}

/* Each of the three units (the root and two layers) has a gather in forward, a gather in backward,
 * and an all-reduce. */
static void each_step_adds_the_device_checksums_of_the_previous_step(void **state) {
    (void)state;
    begin();
    step();
    assert_int_equal(sim_checksums(&list), 0);
    step();
    const size_t count = sim_checksums(&list);
    const size_t process_groups = 2 * model->layer_count; /* each unit has two */
    size_t all_reduces = 0;
    for (size_t i = 0; i < count; i++) {
        all_reduces += list[i].kind == FCT_OP_ALL_REDUCE ? 1 : 0;
        assert_int_equal(list[i].step, 1);
    }
    assert_int_equal(all_reduces, model->layer_count);
    assert_int_equal(count, 3 * model->layer_count);
    assert_int_equal(count_unknown(count), 0);
    assert_int_equal(sim_checksum_intervals(), process_groups);
    step();
    assert_int_equal(sim_checksums(&list), 2 * count);
    assert_int_equal(sim_checksum_intervals(), 2 * process_groups);
    end();
}

/* Collectives do not complete, so the copies of the tables are not done either. */
static void host_does_not_wait_for_the_copy_of_a_table(void **state) {
    (void)state;
    begin();
    step();
    step();
    const size_t count = sim_checksums(&list);
    sim_collectives_stall(true);
    assert_int_equal(sim_model_step(model), FC_OK);
    assert_int_equal(sim_model_step(model), FC_OK);
    const size_t passed = sim_checksums(&list);
    sim_collectives_stall(false);
    sim_drain();
    assert_int_equal(sim_model_step(model), FC_OK);
    assert_true(passed <= 2 * count);
    assert_int_equal(sim_checksums(&list), 4 * count);
    assert_int_equal(count_unknown(4 * count), 0);
    end();
}

typedef enum flip { NO_FLIP, FLIP_OWN_SHARD, FLIP_GATHERED } flip;

static uint64_t of_shards; /* checksum of the gathered rank shards alone */

/* Gathers the unit of layer 1, flips a bit of a rank shard, and sets `of_shards`. Returns the
 * checksum. */
static uint64_t gather_with_flip(flip what, uint64_t bit) {
    fc_gather *gather = &model->layers[1].groups[0].core.gather;
    fc_device_checksums **d = &model->comm.device_checksums;
    const size_t before = sim_checksums(&list);
    assert_int_equal(fc_gather_start(gather, false, true, FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    sim_drain();
    const int64_t bytes = gather->plan.rank_bytes;
    if (what == FLIP_OWN_SHARD) {
        const uint64_t own = (uint64_t)(8 * gather->pending.pg->rank * bytes);
        sim_tensor_flip_bit(gather->pending.buffer, own + bit);
    } else if (what == FLIP_GATHERED) {
        sim_tensor_flip_bit(gather->pending.buffer, bit);
    }
    fct_facts facts;
    fct_tensor_facts(gather->pending.buffer, &facts);
    of_shards = fck_checksum(facts.data, (size_t)(gather->plan.world * bytes));
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    sim_drain();
    fc_gather_complete(gather, NULL);
    fc_gather_free(gather);
    assert_int_equal(fc_device_checksums_end_interval(*d), FC_OK);
    sim_drain();
    assert_int_equal(fc_device_checksums_end_interval(*d), FC_OK);
    assert_int_equal(sim_checksums(&list), before + 1);
    assert_true(list[before].value != 0);
    return list[before].value;
}

static void flipped_bits_of_gathered_shards_change_the_checksum(void **state) {
    (void)state;
    begin();
    const uint64_t right = gather_with_flip(NO_FLIP, 0);
    for (int i = 0; i < FLIPS; i++) {
        assert_true(gather_with_flip(FLIP_GATHERED, sim_random()) != right);
        assert_int_equal(gather_with_flip(NO_FLIP, 0), right);
    }
    end();
}

/* A bit of this rank's shard may flip after the pack. The other ranks receive the flipped shard, so
 * their checksum is that of the gathered shards. This rank's checksum must differ from it. */
static void changed_own_shard_has_another_checksum_than_the_gathered_shards(void **state) {
    (void)state;
    begin();
    assert_int_equal(gather_with_flip(NO_FLIP, 0), of_shards);
    for (uint64_t bit = 0; bit < 64; bit++) {
        assert_true(gather_with_flip(FLIP_OWN_SHARD, bit) != of_shards);
    }
    end();
}

/* A replay of the captured work must not write to a table. */
static void captured_step_ends_no_interval_and_its_checksums_are_unknown(void **state) {
    (void)state;
    begin();
    step();
    step();
    const size_t count = sim_checksums(&list), intervals = sim_checksum_intervals();
    fc_device_sum sum;
    sim_capture(true);
    step();
    assert_int_equal(sim_checksums(&list), count);
    assert_int_equal(sim_checksum_intervals(), intervals);
    assert_int_equal(fc_device_checksums_take(&model->comm.device_checksums, sim_device(), &sum),
                     FC_OK);
    assert_null(sum.at);
    sim_capture(false);
    step();
    step();
    assert_int_equal(sim_checksums(&list), 4 * count);
    assert_int_equal(count_unknown(2 * count), 0);
    assert_int_equal(count_unknown(4 * count), count);
    end();
}

/* The sum belongs to an interval that was open before the capture. */
static void addition_during_a_capture_makes_the_sum_unknown(void **state) {
    (void)state;
    begin();
    step();
    fc_device_checksums **d = &model->comm.device_checksums;
    fc_device_sum sum;
    assert_int_equal(fc_device_checksums_take(d, sim_device(), &sum), FC_OK);
    assert_non_null(sum.at);
    sim_capture(true);
    assert_int_equal(fc_device_checksums_add(*d, &sum, NULL, 0, &model->comm.error), FC_OK);
    sim_capture(false);
    assert_null(sum.at);
    end();
}

/* The seed selects the order of operations on different streams. */
static void checksum_interval_ends_after_additions_on_every_stream(void **state) {
    (void)state;
    for (uint64_t order = 1; order <= 16; order++) {
        seed = order;
        begin();
        step();
        fc_device_checksums **d = &model->comm.device_checksums;
        fct_tensor *data = NULL;
        fct_facts facts;
        fc_device_sum sum;
        assert_int_equal(fct_tensor_empty(64, FCK_UINT8, sim_device(), &data), 0);
        fct_tensor_facts(data, &facts);
        const fck_range range = {.data = facts.data, .bytes = 64, .factor = 1};
        assert_int_equal(fc_device_checksums_take(d, sim_device(), &sum), FC_OK);
        const fct_stream current = fct_stream_set_current(model->comm.reduce_stream);
        assert_int_equal(fc_device_checksums_add(*d, &sum, &range, 1, &model->comm.error), FC_OK);
        (void)fct_stream_set_current(current);
        fc_device_checksums_complete(
            d, sim_device(), &sum, &model->layers[1].groups[0].core.base.shard, "", FC_ALL_GATHER);
        assert_int_equal(fc_device_checksums_end_interval(*d), FC_OK);
        sim_drain();
        assert_int_equal(fc_device_checksums_end_interval(*d), FC_OK);
        const size_t count = sim_checksums(&list);
        assert_int_equal(list[count - 1].value, fck_checksum(facts.data, 64));
        fct_tensor_release(data);
        end();
    }
}

static void reset_makes_the_checksums_before_it_unknown(void **state) {
    (void)state;
    begin();
    step();
    step();
    const size_t count = sim_checksums(&list);
    assert_int_equal(sim_model_forward(model, true), FC_OK);
    assert_int_equal(fc_state_reset(&model->layers[0].core), FC_OK);
    step();
    step();
    const size_t all = sim_checksums(&list);
    assert_true(all > 3 * count);
    assert_int_equal(count_unknown(2 * count), 0);
    assert_int_equal(count_unknown(all), model->layer_count); /* those of the forward */
    end();
}

static void full_checksum_table_makes_later_sums_unknown(void **state) {
    (void)state;
    begin();
    fc_device_checksums *d = NULL;
    fc_device_sum sum;
    for (int i = 0; i < 2048; i++) {
        assert_int_equal(fc_device_checksums_take(&d, sim_device(), &sum), FC_OK);
        assert_non_null(sum.at);
    }
    assert_int_equal(fc_device_checksums_take(&d, sim_device(), &sum), FC_OK);
    assert_null(sum.at);
    sim_drain();
    fc_device_checksums_free(d);
    end();
}

/* A long evaluation would fill the table of the next backward. */
static void forward_ends_the_interval_of_a_half_full_table(void **state) {
    (void)state;
    begin();
    fc_device_checksums **d = &model->comm.device_checksums;
    step();
    for (int i = 0; i < 1024; i++) {
        fc_device_sum sum;
        assert_false(fc_device_checksums_is_half_full(*d));
        assert_int_equal(fc_device_checksums_take(d, sim_device(), &sum), FC_OK);
        fc_device_checksums_complete(
            d, sim_device(), &sum, &model->layers[1].groups[0].core.base.shard, "", FC_ALL_GATHER);
    }
    assert_true(fc_device_checksums_is_half_full(*d));
    assert_int_equal(sim_model_forward(model, false), FC_OK);
    assert_false(fc_device_checksums_is_half_full(*d));
    step();
    assert_true(sim_checksums(&list) > 1024);
    end();
}

static void checksum_of_an_ended_interval_becomes_unknown(void **state) {
    (void)state;
    begin();
    fc_device_checksums **d = &model->comm.device_checksums;
    fc_device_sum sum;
    assert_int_equal(fc_device_checksums_take(d, sim_device(), &sum), FC_OK);
    assert_non_null(sum.at);
    step();
    assert_int_equal(fc_device_checksums_add(*d, &sum, NULL, 0, &model->comm.error), FC_OK);
    assert_null(sum.at);
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_step_adds_the_device_checksums_of_the_previous_step),
        cmocka_unit_test(host_does_not_wait_for_the_copy_of_a_table),
        cmocka_unit_test(flipped_bits_of_gathered_shards_change_the_checksum),
        cmocka_unit_test(changed_own_shard_has_another_checksum_than_the_gathered_shards),
        cmocka_unit_test(captured_step_ends_no_interval_and_its_checksums_are_unknown),
        cmocka_unit_test(addition_during_a_capture_makes_the_sum_unknown),
        cmocka_unit_test(checksum_interval_ends_after_additions_on_every_stream),
        cmocka_unit_test(reset_makes_the_checksums_before_it_unknown),
        cmocka_unit_test(full_checksum_table_makes_later_sums_unknown),
        cmocka_unit_test(forward_ends_the_interval_of_a_half_full_table),
        cmocka_unit_test(checksum_of_an_ended_interval_becomes_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
