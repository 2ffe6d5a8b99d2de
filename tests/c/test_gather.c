/* The gather without its group: pending state, contents of the unsharded parameters, and
 * abandoning. test_group.c covers the registration. */
#include "core/gather.h"

#include <string.h>

#include "sim_model.h"

static sim_model *model;
static sim_group *group;
static fc_gather *gather;

/* Rank `world - 1`, with a matrix of 5 rows, sharded unevenly, and a vector. With `mixed` the
 * vector has the compute dtype bfloat16. */
static void begin_on(sim_config device, int64_t world, bool mixed) {
    sim_scenario s = {.world = world, .rank = world - 1, .layers = 1, .shape_count = 2};
    s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {5, 3}};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}};
    s.shapes[1].compute = mixed ? FCK_BFLOAT16 : 0;
    s.device = device;
    sim_begin(device);
    sim_collectives_stall(true);
    model = sim_model_new(&s);
    group = &model->layers[1].groups[0];
    gather = &group->core.gather;
}

static void begin(int64_t world, bool mixed) {
    begin_on((sim_config){.seed = 7}, world, mixed);
}

static void end(void) {
    sim_model_free(model);
    sim_end();
}

static void start(void) {
    assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_OK);
    assert_true(gather->pending.active);
}

/* The steps of fc_group_wait_unshard without the swap. */
static void wait_and_copy_out(void) {
    assert_int_equal(fc_gather_await(gather), FC_OK);
    assert_int_equal(fc_gather_copy_out(gather), FC_OK);
    fc_gather_complete(gather, NULL);
}

static void expect_whole_parameters(void) {
    for (size_t i = 0; i < group->count; i++) {
        sim_tensor_expect(group->params[i].core.unsharded, group->params[i].full, "a parameter");
    }
    assert_int_equal(fc_gather_check(gather, true), FC_OK);
}

static void gather_and_copy_out_fill_unsharded_parameters(void **state) {
    (void)state;
    for (int mixed = 0; mixed < 2; mixed++) {
        begin(2, mixed != 0);
        start();
        assert_non_null(gather->pending.work);
        wait_and_copy_out();
        expect_whole_parameters();
        assert_false(gather->pending.active);
        assert_null(gather->pending.buffer);
        assert_string_equal(sim_log_text(), "gather:0");
        end();
    }
}

/* A gather whose caller waits fails before it allocates. Others fail in the wait. */
static void gather_with_different_plans_fails_in_start_or_in_await(void **state) {
    (void)state;
    for (int waits = 0; waits < 2; waits++) {
        begin(2, false);
        const size_t before = sim_live_bytes();
        fc_process_group_set_plan(&group->core.base.shard, 7, 0);
        sim_set_plans_differ(true);
        gather->prefetching = waits == 0;
        if (waits == 0) {
            start();
            assert_int_equal(fc_gather_await(gather), FC_ESTATE);
            fc_gather_abandon(gather);
        } else {
            assert_int_equal(fc_gather_start(gather, false, false, FC_STREAM_DIRECT), FC_ESTATE);
            assert_int_equal(sim_live_bytes(), before);
        }
        assert_false(gather->pending.active);
        assert_string_equal(model->comm.error.message,
                            "the model of rank 1 differs from that of rank 0");
        sim_set_plans_differ(false);
        gather->prefetching = false;
        start();
        wait_and_copy_out();
        expect_whole_parameters();
        end();
    }
}

/* A process group may serve several device types. */
static void gather_is_cpu_bound_only_on_cpu_device(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        begin_on((sim_config){.seed = 7, .streams = streams != 0}, 2, false);
        sim_set_cpu_bound(true);
        assert_false(fc_gather_is_cpu_bound(gather, false)); /* no plan yet */
        start();
        wait_and_copy_out();
        assert_int_equal(fc_gather_is_cpu_bound(gather, false), !streams);
        sim_set_cpu_bound(false);
        assert_false(fc_gather_is_cpu_bound(gather, false));
        end();
    }
}

static void gather_free_releases_all_memory(void **state) {
    (void)state;
    begin(2, false);
    const size_t before = sim_live_bytes();
    start();
    wait_and_copy_out();
    assert_true(sim_live_bytes() > before);
    gather->keep_storage = true;
    fc_gather_free(gather);
    expect_whole_parameters();
    gather->keep_storage = false;
    fc_gather_free(gather);
    assert_int_equal(sim_live_bytes(), before);
    assert_int_equal(fc_gather_check(gather, false), FC_OK);
    end();
}

static void gather_on_one_rank_aliases_shards_without_cast(void **state) {
    (void)state;
    for (int mixed = 0; mixed < 2; mixed++) {
        begin(1, mixed != 0);
        start();
        assert_null(gather->pending.buffer);
        wait_and_copy_out();
        expect_whole_parameters();
        assert_string_equal(sim_log_text(), "");
        assert_int_equal(group->params[0].core.aliased, mixed == 0);
        fc_gather_free(gather);
        end();
    }
}

static void abandoned_gather_keeps_buffer_until_work_completes(void **state) {
    (void)state;
    begin(2, false);
    const size_t before = sim_live_bytes();
    start();
    fc_gather_abandon(gather);
    assert_false(gather->pending.active);
    assert_int_equal(fc_gather_check(gather, false), FC_OK);
    assert_non_null(model->comm.deferred);
    fc_comm_collect(&model->comm);
    assert_true(sim_live_bytes() > before);
    sim_drain();
    fc_comm_collect(&model->comm);
    assert_int_equal(sim_live_bytes(), before);
    end();
}

static void repeat_with_each_copy_out_call_failing(bool chunks, size_t least) {
    size_t failures = 0;
    for (int64_t nth = 1; failures + 1 == (size_t)nth; nth++) {
        begin_on((sim_config){.seed = 7, .chunks = chunks}, 2, !chunks);
        start();
        assert_int_equal(fc_gather_await(gather), FC_OK);
        sim_fault_arm(nth, SIM_ONCE);
        const fc_status status = fc_gather_copy_out(gather);
        failures += status != FC_OK;
        sim_fault_arm(0, SIM_ONCE);
        sim_discard_error();
        if (status != FC_OK) {
            for (size_t i = 0; i < group->count; i++) {
                const fct_tensor *flat = group->params[i].core.flat;
                assert_true(flat == NULL || !sim_tensor_has_memory(flat));
            }
            assert_int_equal(fc_gather_copy_out(gather), FC_OK);
        }
        fc_gather_complete(gather, NULL);
        expect_whole_parameters();
        fc_gather_free(gather);
        end();
    }
    assert_true(failures > least);
}

static void failed_copy_out_frees_memory_and_can_be_repeated(void **state) {
    (void)state;
    repeat_with_each_copy_out_call_failing(false, 4);
}

/* Owned chunks become the parameters' memory. After a failure their memory and contents return. */
static void owned_chunks_survive_failed_copy_out(void **state) {
    (void)state;
    repeat_with_each_copy_out_call_failing(true, 1);
}

static int gathers, dropped_gathers;

static int start_fallback(void *owner, bool async_op, bool overlaps) {
    (void)owner;
    (void)async_op;
    (void)overlaps;
    gathers++;
    return 0;
}

static int fail_copy_out(void *owner, fct_tensor **buffer) {
    (void)owner;
    (void)buffer;
    return -1;
}

static void drop_fallback(void *owner) {
    (void)owner;
    dropped_gathers++;
}

static void failed_copy_out_of_fallback_drops_its_gather(void **state) {
    (void)state;
    begin(2, false);
    fc_callbacks callbacks = sim_callbacks;
    callbacks.gather = start_fallback;
    callbacks.copy_out = fail_copy_out;
    callbacks.drop_gather = drop_fallback;
    group->core.base.callbacks = &callbacks;
    group->core.base.fallbacks = FC_FALLBACK_GATHER;
    gathers = dropped_gathers = 0;
    for (int i = 1; i < 3; i++) {
        start();
        assert_int_equal(fc_gather_await(gather), FC_OK);
        assert_int_equal(fc_gather_copy_out(gather), FC_ERAISED);
        assert_false(gather->pending.active);
        assert_int_equal(fc_gather_check(gather, false), FC_OK);
        assert_int_equal(gathers, i);
        assert_int_equal(dropped_gathers, i);
    }
    group->core.base.callbacks = &sim_callbacks;
    group->core.base.fallbacks = 0;
    start();
    wait_and_copy_out();
    expect_whole_parameters();
    end();
}

static int skip_copy_out(void *owner, fct_tensor **buffer) {
    (void)owner;
    *buffer = NULL;
    return 0;
}

/* On one rank, Python code copies the shards to the aliases of an earlier gather. */
static void fallback_gather_accepts_earlier_changes_of_aliases(void **state) {
    (void)state;
    begin(1, false);
    fc_group_base *base = &group->core.base;
    bool all = false;
    assert_int_equal(fc_unsharded_alias(base, &all), FC_OK);
    assert_true(all);
    fct_tensor_bump(base->params[0]->sharded_data);
    assert_int_equal(fc_unsharded_check_leaves(base), FC_ESTATE);
    fc_callbacks callbacks = sim_callbacks;
    callbacks.gather = start_fallback;
    callbacks.copy_out = skip_copy_out;
    base->callbacks = &callbacks;
    base->fallbacks = FC_FALLBACK_GATHER;
    start();
    wait_and_copy_out();
    assert_int_equal(fc_unsharded_record_leaves(base), FC_OK);
    assert_int_equal(fc_unsharded_check_leaves(base), FC_OK);
    base->callbacks = &sim_callbacks;
    base->fallbacks = 0;
    end();
}

static void gather_check_reports_memory_in_wrong_state(void **state) {
    (void)state;
    begin(2, false);
    start();
    assert_int_equal(fc_gather_check(gather, true), FC_ESTATE);
    assert_non_null(strstr(model->comm.error.message, "in flight while the group is unsharded"));
    wait_and_copy_out();
    assert_int_equal(fc_gather_check(gather, false), FC_ESTATE); /* sharded, but holds memory */
    fc_gather_free(gather);
    assert_int_equal(fc_gather_check(gather, true), FC_ESTATE);
    assert_int_equal(fc_unsharded_adopt(gather->base), FC_ESTATE);
    assert_non_null(strstr(model->comm.error.message, "parameter '0.0' was not gathered"));
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_and_copy_out_fill_unsharded_parameters),
        cmocka_unit_test(gather_with_different_plans_fails_in_start_or_in_await),
        cmocka_unit_test(gather_is_cpu_bound_only_on_cpu_device),
        cmocka_unit_test(gather_free_releases_all_memory),
        cmocka_unit_test(gather_on_one_rank_aliases_shards_without_cast),
        cmocka_unit_test(abandoned_gather_keeps_buffer_until_work_completes),
        cmocka_unit_test(failed_copy_out_frees_memory_and_can_be_repeated),
        cmocka_unit_test(owned_chunks_survive_failed_copy_out),
        cmocka_unit_test(failed_copy_out_of_fallback_drops_its_gather),
        cmocka_unit_test(fallback_gather_accepts_earlier_changes_of_aliases),
        cmocka_unit_test(gather_check_reports_memory_in_wrong_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
