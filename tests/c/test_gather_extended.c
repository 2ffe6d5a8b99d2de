/* Gather of parameters with all-gather hooks: when the hooks run, and the state after one fails. */
#include "core/gather.h"

#include "sim_model.h"

static sim_model *model;
static sim_group *group;
static fc_gather *gather;

/* The last of `world` ranks: a matrix whose inputs grow, a vector, a matrix with inputs of two
 * dtypes. */
static void begin_on(sim_config device, int64_t world) {
    sim_scenario s = {.world = world, .rank = world - 1, .layers = 1, .shape_count = 3};
    s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {5, 3}, .extended = SIM_EXTENDED_GROWS};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}, .compute = FCK_BFLOAT16};
    s.shapes[2] = (sim_shape){.ndim = 2, .sizes = {5, 3}, .extended = SIM_EXTENDED_TYPES};
    s.device = device;
    sim_begin(device);
    sim_collectives_stall(true);
    model = sim_model_new(&s);
    group = &model->layers[1].groups[0];
    gather = &group->core.gather;
    assert_int_equal(fc_comm_init_streams(&model->comm), FC_OK);
    sim_drain(); /* shards are written before a step begins */
}

static void end(void) {
    sim_model_free(model);
    sim_end();
}

static fc_status start(fc_stream_mode mode) {
    return fc_gather_start(gather, false, false, mode);
}

static fc_status wait_and_copy_out(void) {
    fc_status status = FC_OK;
    fct_event *copied = NULL;
    FC_TRY(fc_gather_await(gather));
    FC_TRY(fc_gather_copy_out(gather));
    status = fc_gather_end_copy_out(gather, FC_STREAM_DIRECT, &copied);
    if (status != FC_OK) {
        fc_gather_undo_copy_out(gather, copied);
        return status;
    }
    fc_gather_complete(gather, copied);
done:
    return status;
}

static void expect_whole_parameters(void) {
    for (size_t i = 0; i < group->count; i++) {
        sim_tensor_expect(group->params[i].core.unsharded, group->params[i].full, "a parameter");
    }
    assert_int_equal(fc_gather_check(gather, true), FC_OK);
}

static void extension_hooks_run_before_gather_and_after_copy_out(void **state) {
    (void)state;
    for (int64_t world = 1; world <= 2; world++) {
        for (int streams = 0; streams < 2; streams++) {
            begin_on((sim_config){.seed = 7, .streams = streams != 0}, world);
            const size_t before = sim_live_bytes();
            for (int again = 0; again < 3; again++) {
                sim_log_clear();
                assert_int_equal(start(FC_STREAM_OVERLAP), FC_OK);
                assert_int_equal(wait_and_copy_out(), FC_OK);
                expect_whole_parameters();
                assert_string_equal(sim_log_text(),
                                    world == 1
                                        ? "inputs:0.0 inputs:0.2 made:0.0 made:0.2"
                                        : "inputs:0.0 inputs:0.2 gather:0 made:0.0 made:0.2");
                sim_drain();
                fc_gather_free(gather);
                assert_int_equal(fc_gather_check(gather, false), FC_OK);
            }
            sim_drain();
            fc_comm_collect(&model->comm);
            assert_int_equal(sim_live_bytes(), before);
            end();
        }
    }
}

static void repeat_with_each_call_failing(sim_config device, int64_t world) {
    size_t failures = 0;
    for (int64_t nth = 1; failures + 1 == (size_t)nth; nth++) {
        begin_on(device, world);
        sim_fault_arm(nth, SIM_ONCE);
        fc_status status = start(FC_STREAM_OVERLAP);
        status = status == FC_OK ? wait_and_copy_out() : status;
        failures += status != FC_OK;
        sim_fault_arm(0, SIM_ONCE);
        sim_discard_error();
        if (status != FC_OK) {
            for (size_t i = 0; i < group->count; i++) {
                const fc_extension *e = &group->params[i].core.extension;
                assert_int_equal(fc_extension_bytes(e), 0);
                for (size_t k = 0; k < e->input_count; k++) {
                    assert_null(e->inputs[k].tensor);
                }
            }
            assert_int_equal(fc_gather_check(gather, false), FC_OK);
            fc_gather_abandon(gather); /* if only the wait has failed */
            assert_int_equal(start(FC_STREAM_OVERLAP), FC_OK);
            assert_int_equal(wait_and_copy_out(), FC_OK);
        }
        expect_whole_parameters();
        fc_gather_free(gather);
        end();
    }
    assert_true(failures > 20);
}

static void failed_extended_gather_can_be_restarted(void **state) {
    (void)state;
    for (int64_t world = 1; world <= 2; world++) {
        repeat_with_each_call_failing((sim_config){.seed = 7}, world);
        repeat_with_each_call_failing((sim_config){.seed = 7, .streams = true}, world);
        repeat_with_each_call_failing((sim_config){.seed = 7, .streams = true, .no_kernels = true},
                                      world);
    }
}

static void failed_extended_copy_out_abandons_gather(void **state) {
    (void)state;
    begin_on((sim_config){.seed = 7}, 2);
    assert_int_equal(start(FC_STREAM_DIRECT), FC_OK);
    assert_int_equal(fc_gather_await(gather), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_not_equal(fc_gather_copy_out(gather), FC_OK);
    sim_discard_error();
    assert_false(gather->pending.active);
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(extension_hooks_run_before_gather_and_after_copy_out),
        cmocka_unit_test(failed_extended_gather_can_be_restarted),
        cmocka_unit_test(failed_extended_copy_out_abandons_gather),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
