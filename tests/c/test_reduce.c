/* Gradient reduction: what is added up where, what a missing gradient means, and how many
 * reductions are in flight when. */
#include "core/reduction.h"

#include <string.h>

#include "sim_model.h"

#define FLOATS {.ndim = 1, .sizes = {4}}

/* ---- a model of one layer; its group is reduced by hand ---- */

typedef struct fixture {
    sim_model *model;
    sim_group *group; /* of the first layer */
} fixture;

/* After a forward and with the backward about to reach the layer's post-backward. */
static fixture begin(sim_scenario scenario) {
    fixture f;
    scenario.layers = 1;
    scenario.device.seed = 7; /* no collective is done at once */
    sim_begin(scenario.device);
    f.model = sim_model_new(&scenario);
    f.group = &f.model->layers[1].groups[0];
    return f;
}

static void end(const fixture *f) {
    sim_model_free(f->model);
    sim_end();
}

static fc_group *core(const fixture *f) {
    return &f->group->core;
}

/* What a backward over the layer does before its post-backward: .grad of its parameters is set.
 * On a CPU the gather comes after the reductions in flight, so that waiting for it ends those. */
static void compute_gradients(const fixture *f, double value) {
    assert_int_equal(fc_group_unshard(core(f), core(f)->training_state, false), FC_OK);
    assert_int_equal(fc_group_wait_unshard(core(f)), FC_OK);
    core(f)->training_state = FC_PRE_BACKWARD;
    for (size_t i = 0; i < f->group->count; i++) {
        sim_param *p = &f->group->params[i];
        const double values[4] = {value, value, value, value};
        if (!p->shape.unused && !p->shape.frozen) {
            sim_grad_accumulate(p->core.unsharded,
                                sim_tensor_new(sim_compute_dtype(p), 1, p->shape.sizes, values));
        }
    }
}

static void post_backward(const fixture *f) {
    assert_int_equal(fc_group_post_backward(core(f)), FC_OK);
}

static void finish(const fixture *f) {
    assert_int_equal(fc_reduction_recycle(&f->model->comm, 0), FC_OK);
}

static void expect_grad(const fixture *f, size_t i, double value) {
    const double values[4] = {value, value, value, value};
    const fct_tensor *grad = sim_grad_peek(f->group->params[i].sharded);
    assert_non_null(grad);
    sim_tensor_expect(grad, values, "the reduced gradient");
}

static void expect_no_grad(const fixture *f, size_t i) {
    assert_null(sim_grad_peek(f->group->params[i].sharded));
}

/* ---- accumulation ---- */

/* Rank 0 of two: rank 1 has twice the gradient, the mean is 1.5 times ours. */
static const sim_scenario two_ranks = {.world = 2, .shape_count = 1, .shapes = {FLOATS}};

static void a_second_reduction_adds_to_the_gradient(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 3.0);
    compute_gradients(&f, 4.0);
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 9.0);
    end(&f);
}

/* A program that calls post_backward outside of a backward completes the reduction explicitly. */
static void complete_reductions_sets_gradients_on_both_kinds_of_devices(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = streams != 0;
        fixture f = begin(scenario);
        assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
        compute_gradients(&f, 2.0);
        post_backward(&f);
        assert_int_equal(fc_group_complete_reductions(core(&f)), FC_OK);
        assert_true(streams || f.model->comm.reductions == 0);
        expect_grad(&f, 0, 3.0);
        end(&f);
    }
}

/* A large gradient is sent from where it is, if nobody else may change it meanwhile. */
static void gradient_memory_is_sent_as_chunk(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.device.chunks = true;
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    const fc_reduction *r = f.model->comm.oldest;
    assert_non_null(r);
    assert_null(r->input); /* nothing was packed */
    finish(&f);
    expect_grad(&f, 0, 3.0);
    end(&f);
}

static void held_gradient_is_packed_before_sending(void **state) {
    (void)state;
    const double zeros[4] = {0};
    sim_scenario scenario = two_ranks;
    scenario.device.chunks = true;
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    fct_tensor *held = sim_grad_peek(f.group->params[0].core.unsharded);
    fct_tensor_retain(held);
    post_backward(&f);
    sim_tensor_write(held, zeros, "a gradient that somebody holds");
    finish(&f);
    expect_grad(&f, 0, 3.0);
    fct_tensor_release(held);
    end(&f);
}

static void without_sync_gradients_wait_unreduced_in_the_parameter(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    core(&f)->settings.reduce_grads = false;
    compute_gradients(&f, 2.0);
    post_backward(&f);
    expect_no_grad(&f, 0);
    assert_int_equal(core(&f)->sharded_state, FC_SHARDED);
    assert_true(fct_grad_has(f.group->params[0].core.unsharded));
    core(&f)->settings.reduce_grads = true;
    compute_gradients(&f, 4.0);
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 9.0);
    assert_false(fct_grad_has(f.group->params[0].core.unsharded));
    end(&f);
}

static void with_a_reduce_type_they_wait_in_that_type(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.shapes[0].compute = FCK_BFLOAT16;
    scenario.reduce_dtype = FCK_FLOAT32;
    fixture f = begin(scenario);
    fct_facts facts;
    core(&f)->settings.reduce_grads = false;
    compute_gradients(&f, 256.0);
    post_backward(&f);
    assert_false(fct_grad_has(f.group->params[0].core.unsharded));
    fct_tensor_facts(f.group->params[0].core.accumulated, &facts);
    assert_int_equal(facts.dtype, FCK_FLOAT32);
    core(&f)->settings.reduce_grads = true;
    compute_gradients(&f, 2.0);
    compute_gradients(&f, 1.0); /* 256 + 2 + 1 has no bfloat16 */
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 1.5 * 259.0);
    assert_null(f.group->params[0].core.accumulated);
    end(&f);
}

static void a_partial_gradient_is_reduced_even_if_the_last_backward_adds_none(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    core(&f)->settings.reduce_grads = false;
    compute_gradients(&f, 2.0);
    post_backward(&f);
    core(&f)->settings.reduce_grads = true;
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 3.0);
    end(&f);
}

static void without_all_reduce_rows_stay_with_the_parameter(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.replicas = 2;
    fixture f = begin(scenario);
    core(&f)->reducer.all_reduce_grads = false;
    compute_gradients(&f, 2.0);
    post_backward(&f);
    finish(&f);
    expect_no_grad(&f, 0);
    assert_non_null(f.group->params[0].core.partial);
    core(&f)->reducer.all_reduce_grads = true;
    post_backward(&f); /* no new gradient: the row alone is all-reduced */
    finish(&f);
    expect_grad(&f, 0, 2.5 * 2.0); /* ranks have 1, 2, 3, 4 times as much */
    assert_null(f.group->params[0].core.partial);
    end(&f);
}

/* ---- missing gradients ---- */

static void a_parameter_without_a_gradient_stays_without(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.shape_count = 2;
    scenario.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}, .unused = true};
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 3.0);
    expect_no_grad(&f, 1);
    end(&f);
}

static void it_is_reduced_as_zeros_where_that_is_asked_for(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.reduce_unused = true;
    scenario.shape_count = 3;
    scenario.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}, .unused = true};
    scenario.shapes[2] = (sim_shape){.ndim = 1, .sizes = {4}, .frozen = true};
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 3.0);
    expect_grad(&f, 1, 0.0);
    expect_no_grad(&f, 2);
    end(&f);
}

static void end_of_a_reduction(bool streams, bool copied, fc_overlap overlap, size_t in_flight) {
    sim_scenario scenario = two_ranks;
    scenario.device.streams = streams;
    scenario.overlap = overlap;
    fixture f = begin(scenario);
    sim_collectives_are_copied(copied);
    if (streams) {
        assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    }
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(f.model->comm.reductions, in_flight);
    finish(&f);
    expect_grad(&f, 0, 3.0);
    end(&f);
}

static void a_reduction_that_is_not_to_overlap_is_over_before_backward_goes_on(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        for (int copied = 0; copied < 2; copied++) {
            end_of_a_reduction(streams, copied, FC_OVERLAP_NEVER, 0);
            end_of_a_reduction(streams, copied, FC_OVERLAP_ALWAYS, 1);
            end_of_a_reduction(streams, copied, FC_OVERLAP_UNLESS_COPIED,
                               copied && !streams ? 0 : 1);
        }
    }
}

static void without_any_gradient_there_is_no_collective(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.shapes[0].unused = true;
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    sim_log_clear();
    post_backward(&f);
    assert_null(strstr(sim_log_text(), "scatter"));
    assert_int_equal(f.model->comm.reductions, 0);
    end(&f);
}

static void an_unsharded_parameter_lets_its_gradient_go(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    core(&f)->settings.reshard_after_backward = false;
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(core(&f)->sharded_state, FC_UNSHARDED);
    assert_false(fct_grad_has(f.group->params[0].core.unsharded));
    finish(&f);
    end(&f);
}

/* ---- in flight ---- */

static void on_the_cpu_a_reduction_runs_while_backward_goes_on(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    sim_collectives_stall(true);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(f.model->comm.reductions, 1);
    expect_no_grad(&f, 0);
    finish(&f);
    assert_int_equal(f.model->comm.reductions, 0);
    expect_grad(&f, 0, 3.0);
    end(&f);
}

static void it_is_polled_without_waiting(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    sim_collectives_stall(true);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(fc_reduction_poll(&f.model->comm), FC_OK);
    assert_int_equal(f.model->comm.reductions, 1);
    sim_drain();
    assert_int_equal(fc_reduction_poll(&f.model->comm), FC_OK);
    assert_int_equal(f.model->comm.reductions, 0);
    expect_grad(&f, 0, 3.0);
    end(&f);
}

static void the_next_reduction_finishes_those_above_the_limit(void **state) {
    (void)state;
    for (size_t limit = 1; limit <= 3; limit++) {
        sim_scenario scenario = two_ranks;
        scenario.max_reductions = limit;
        fixture f = begin(scenario);
        core(&f)->settings.reshard_after_backward = false;
        sim_collectives_stall(true);
        for (size_t i = 1; i <= 5; i++) {
            compute_gradients(&f, 2.0);
            post_backward(&f);
            assert_int_equal(f.model->comm.reductions, i < limit ? i : limit);
        }
        finish(&f);
        expect_grad(&f, 0, 15.0);
        end(&f);
    }
}

static void a_hook_on_the_gradient_wants_it_at_once(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.shapes[0].hooked = true;
    fixture f = begin(scenario);
    sim_collectives_stall(true);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(f.model->comm.reductions, 0);
    expect_grad(&f, 0, 3.0);
    assert_non_null(strstr(sim_log_text(), "hook:0.0"));
    end(&f);
}

static void discarded_reductions_give_no_gradient_and_keep_their_memory_until_done(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    sim_collectives_stall(true);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    fc_reduction_discard(&f.model->comm, &core(&f)->members);
    assert_int_equal(f.model->comm.reductions, 0);
    assert_non_null(f.model->comm.parked);
    sim_drain();
    fc_comm_reap(&f.model->comm);
    assert_null(f.model->comm.parked);
    expect_no_grad(&f, 0);
    end(&f);
}

static void only_the_groups_own_reductions_are_discarded(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.max_reductions = 4;
    fixture f = begin(scenario);
    fixture root = f;
    root.group = &f.model->layers[0].groups[0];
    core(&f)->settings.reshard_after_backward = false;
    core(&root)->settings.reshard_after_backward = false;
    compute_gradients(&f, 0.0);
    compute_gradients(&root, 0.0);
    sim_collectives_stall(true);
    for (int i = 0; i < 2; i++) {
        compute_gradients(&f, 2.0);
        post_backward(&f);
        compute_gradients(&root, 4.0);
        post_backward(&root);
    }
    assert_int_equal(f.model->comm.reductions, 4);
    fc_reduction_discard(&f.model->comm, &core(&f)->members);
    assert_int_equal(f.model->comm.reductions, 2);
    finish(&f);
    expect_no_grad(&f, 0);
    expect_grad(&root, 0, 12.0);
    end(&f);
}

static void with_streams_it_is_queued_at_once_and_only_its_input_is_kept(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.device.streams = true;
    fixture f = begin(scenario);
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(f.model->comm.reductions, 1);
    assert_non_null(sim_grad_peek(f.group->params[0].sharded));
    assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK); /* from here on it may be read */
    expect_grad(&f, 0, 3.0);
    finish(&f);
    end(&f);
}

/* ---- a user's all-reduce on a stream of its own (set_all_reduce_hook(hook, stream=...)) ---- */

static struct {
    fct_stream stream;
    bool joined;
} user;

/* As fsdp_c's ParamGroup._run_reduce_hook: the user's stream comes after the one that reduces, and
 * that goes on after the user's. */
static int hook_on_its_stream(void *group, fct_tensor *row) {
    fc_comm *comm = ((sim_group *)group)->core.members.comm;
    fct_stream before = fct_stream_current(sim_device());
    /* Where torch runs hooks: the next reduce-scatter does not wait for them. */
    assert_int_equal(before.id, comm->all_reduce_stream.id);
    assert_int_equal(fc_comm_order_streams(comm, user.stream, before), FC_OK);
    (void)fct_stream_set_current(user.stream);
    assert_int_equal(fct_tensor_div(row, 0.5), 0);
    (void)fct_stream_set_current(before);
    if (user.joined) {
        assert_int_equal(fc_comm_order_streams(comm, before, user.stream), FC_OK);
    }
    return 0;
}

/* The row is cast, so that its memory could be used by the next reduction while the hook still runs
 * (B9 of tests/TORCH_BUGS.md). */
static void a_row_is_kept_until_the_hooks_stream_is_done_with_it(void **state) {
    (void)state;
    for (int joined = 0; joined < 2; joined++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = true;
        scenario.reduce_dtype = FCK_BFLOAT16;
        scenario.user_reduce = true;
        fixture f = begin(scenario);
        fc_host host = sim_host;
        host.reduce_hook = hook_on_its_stream;
        core(&f)->members.host = &host;
        user.joined = joined != 0;
        assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
        assert_int_equal(fct_stream_new(sim_device(), false, &user.stream), 0);
        for (int i = 0; i < 4; i++) {
            compute_gradients(&f, 2.0);
            post_backward(&f);
        }
        assert_null(f.model->comm.last_reduced);
        assert_non_null(f.model->comm.last_all_reduced);
        assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK);
        finish(&f);
        if (joined) {
            expect_grad(&f, 0, 4 * 2.0 * 3.0);
        } else {
            assert_true(sim_take_failures() > 0);
        }
        sim_drain();
        assert_true(sim_take_failures() == 0 || !joined);
        core(&f)->members.host = &sim_host;
        end(&f);
    }
}

/* ---- offload ---- */

static int takes_left;

static int take_some(void *param, fct_tensor *local) {
    return takes_left-- > 0 ? sim_host.take_grad(param, local) : -1;
}

/* The second parameter's gradient fails, after the first one's copy was queued. */
static void what_was_sent_before_a_failure_is_waited_for_after_the_reset(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.device.streams = true;
    scenario.offload = true;
    scenario.shapes[scenario.shape_count++] = (sim_shape)FLOATS;
    fixture f = begin(scenario);
    fc_host host = sim_host;
    host.take_grad = take_some;
    core(&f)->members.host = &host;
    takes_left = 1;
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    compute_gradients(&f, 2.0);
    assert_int_equal(fc_group_post_backward(core(&f)), FC_ERAISED);
    assert_int_equal(fc_group_reset(core(&f)), FC_OK);
    assert_non_null(core(&f)->reducer.sent);
    assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK);
    assert_null(core(&f)->reducer.sent);
    expect_grad(&f, 0, 3.0);
    core(&f)->members.host = &sim_host;
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_reduction_adds_to_the_gradient),
        cmocka_unit_test(complete_reductions_sets_gradients_on_both_kinds_of_devices),
        cmocka_unit_test(gradient_memory_is_sent_as_chunk),
        cmocka_unit_test(held_gradient_is_packed_before_sending),
        cmocka_unit_test(without_sync_gradients_wait_unreduced_in_the_parameter),
        cmocka_unit_test(with_a_reduce_type_they_wait_in_that_type),
        cmocka_unit_test(a_partial_gradient_is_reduced_even_if_the_last_backward_adds_none),
        cmocka_unit_test(without_all_reduce_rows_stay_with_the_parameter),
        cmocka_unit_test(a_parameter_without_a_gradient_stays_without),
        cmocka_unit_test(it_is_reduced_as_zeros_where_that_is_asked_for),
        cmocka_unit_test(a_reduction_that_is_not_to_overlap_is_over_before_backward_goes_on),
        cmocka_unit_test(without_any_gradient_there_is_no_collective),
        cmocka_unit_test(an_unsharded_parameter_lets_its_gradient_go),
        cmocka_unit_test(on_the_cpu_a_reduction_runs_while_backward_goes_on),
        cmocka_unit_test(it_is_polled_without_waiting),
        cmocka_unit_test(the_next_reduction_finishes_those_above_the_limit),
        cmocka_unit_test(a_hook_on_the_gradient_wants_it_at_once),
        cmocka_unit_test(discarded_reductions_give_no_gradient_and_keep_their_memory_until_done),
        cmocka_unit_test(only_the_groups_own_reductions_are_discarded),
        cmocka_unit_test(with_streams_it_is_queued_at_once_and_only_its_input_is_kept),
        cmocka_unit_test(a_row_is_kept_until_the_hooks_stream_is_done_with_it),
        cmocka_unit_test(what_was_sent_before_a_failure_is_waited_for_after_the_reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
