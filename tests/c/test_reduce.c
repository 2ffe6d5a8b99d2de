/* Gradient reduction: accumulation, missing gradients, and the number of reductions in flight. */
#include "core/reduction.h"

#include <string.h>

#include "sim_model.h"

#define FLOATS {.ndim = 1, .sizes = {4}}

/* ---- a model with one layer; the test reduces its group directly ---- */

typedef struct fixture {
    sim_model *model;
    sim_group *group; /* of the first layer after the root */
} fixture;

static fixture begin(sim_scenario scenario) {
    fixture f;
    scenario.layers = 1;
    scenario.device.seed = 7; /* no collective completes at once */
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

/* Sets .grad of the layer's parameters, as a backward does before its post-backward. On a CPU the
 * gather is queued after the pending reductions, so the wait for it completes them. */
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

/* Rank 0 of two. Rank 1 has twice the gradient, so the mean is 1.5 times rank 0's. */
static const sim_scenario two_ranks = {.world = 2, .shape_count = 1, .shapes = {FLOATS}};

static void second_reduction_adds_to_gradient(void **state) {
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

static void large_gradient_is_sent_from_its_own_memory(void **state) {
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

static void gradient_with_other_owner_is_packed_before_sending(void **state) {
    (void)state;
    const double zeros[4] = {0};
    sim_scenario scenario = two_ranks;
    scenario.device.chunks = true;
    fixture f = begin(scenario);
    compute_gradients(&f, 2.0);
    fct_tensor *held = sim_grad_peek(f.group->params[0].core.unsharded);
    fct_tensor_retain(held);
    post_backward(&f);
    sim_tensor_write(held, zeros, "a gradient with another owner");
    finish(&f);
    expect_grad(&f, 0, 3.0);
    fct_tensor_release(held);
    end(&f);
}

static void backward_without_sync_leaves_gradient_in_parameter(void **state) {
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

static void backward_without_sync_leaves_gradient_in_reduce_dtype(void **state) {
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
    compute_gradients(&f, 1.0); /* bfloat16 cannot represent 256 + 2 + 1 */
    post_backward(&f);
    finish(&f);
    expect_grad(&f, 0, 1.5 * 259.0);
    assert_null(f.group->params[0].core.accumulated);
    end(&f);
}

static void partial_gradient_is_reduced_without_new_gradient(void **state) {
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

static void reduce_scatter_without_all_reduce_keeps_output_in_parameter(void **state) {
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
    post_backward(&f); /* no new gradient: only the output is all-reduced */
    finish(&f);
    expect_grad(&f, 0, 2.5 * 2.0); /* the ranks have 1, 2, 3 and 4 times the gradient */
    assert_null(f.group->params[0].core.partial);
    end(&f);
}

static void gradients_of_one_rank_are_added_to_its_partial_output(void **state) {
    (void)state;
    fixture f = begin((sim_scenario){
        .device.streams = true, .world = 1, .replicas = 2, .shape_count = 1, .shapes = {FLOATS}});
    core(&f)->reducer.all_reduce_grads = false;
    for (size_t i = 0; i < 2; i++) {
        sim_calls_clear();
        compute_gradients(&f, 2.0);
        post_backward(&f);
    }
    assert_null(strstr(sim_calls_text(), "fct_tensor_copy"));
    core(&f)->reducer.all_reduce_grads = true;
    post_backward(&f);
    expect_grad(&f, 0, 1.5 * (2.0 + 2.0)); /* the ranks have 1 and 2 times the gradient */
    end(&f);
}

static void reduction_clears_grad_of_unsharded_parameter(void **state) {
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

/* ---- missing gradients ---- */

static void parameter_without_gradient_gets_none(void **state) {
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

static void reduce_unused_reduces_zeros_for_missing_gradient(void **state) {
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

static void group_without_gradients_issues_no_collective(void **state) {
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

/* ---- in flight ---- */

static void expect_in_flight_after_reduction(bool streams, bool is_cpu_bound, fc_overlap overlap,
                                             size_t in_flight) {
    sim_scenario scenario = two_ranks;
    scenario.device.streams = streams;
    scenario.overlap = overlap;
    fixture f = begin(scenario);
    sim_set_cpu_bound(is_cpu_bound);
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

static void non_overlapping_reduction_completes_before_backward_continues(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        for (int is_cpu_bound = 0; is_cpu_bound < 2; is_cpu_bound++) {
            expect_in_flight_after_reduction(streams, is_cpu_bound, FC_OVERLAP_NEVER, 0);
            expect_in_flight_after_reduction(streams, is_cpu_bound, FC_OVERLAP_ALWAYS, 1);
            expect_in_flight_after_reduction(streams, is_cpu_bound, FC_OVERLAP_UNLESS_CPU_BOUND,
                                             is_cpu_bound && !streams ? 0 : 1);
        }
    }
}

static void cpu_reduction_runs_while_backward_continues(void **state) {
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

static void reduction_poll_does_not_wait(void **state) {
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

static void next_reduction_finishes_reductions_above_limit(void **state) {
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

static void post_accumulate_hook_finishes_reduction_at_once(void **state) {
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

static void discarded_reduction_gives_no_gradient_and_holds_memory_until_complete(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    sim_collectives_stall(true);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    fc_reduction_discard(&f.model->comm, &core(&f)->base);
    assert_int_equal(f.model->comm.reductions, 0);
    assert_non_null(f.model->comm.deferred);
    sim_drain();
    fc_comm_collect(&f.model->comm);
    assert_null(f.model->comm.deferred);
    expect_no_grad(&f, 0);
    end(&f);
}

static void discard_affects_only_reductions_of_group(void **state) {
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
    fc_reduction_discard(&f.model->comm, &core(&f)->base);
    assert_int_equal(f.model->comm.reductions, 2);
    finish(&f);
    expect_no_grad(&f, 0);
    expect_grad(&root, 0, 12.0);
    end(&f);
}

static void stream_reduction_is_queued_completely_and_keeps_only_input(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.device.streams = true;
    fixture f = begin(scenario);
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    assert_int_equal(f.model->comm.reductions, 1);
    assert_non_null(sim_grad_peek(f.group->params[0].sharded));
    assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK); /* orders later reads */
    expect_grad(&f, 0, 3.0);
    finish(&f);
    end(&f);
}

typedef enum input_release { RECYCLED, SETTLED_AND_RECYCLED, DISCARDED } input_release;

/* Reduces on one stream and releases the input while another stream is current. The only rank casts
 * its input. A collective of several ranks would hold the input in the simulation. */
static void release_input_on_other_stream(input_release release) {
    sim_scenario scenario = two_ranks;
    fct_stream other;
    scenario.world = 1;
    scenario.device.streams = true;
    scenario.reduce_dtype = FCK_BFLOAT16;
    fixture f = begin(scenario);
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    assert_int_equal(fct_stream_new(sim_device(), false, &other), 0);
    compute_gradients(&f, 2.0);
    post_backward(&f);
    const fct_stream compute = fct_stream_set_current(other);
    if (release == SETTLED_AND_RECYCLED) {
        assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK);
    }
    if (release == DISCARDED) {
        fc_reduction_discard(&f.model->comm, NULL);
    } else {
        finish(&f);
    }
    (void)fct_stream_set_current(compute);
    const double zeros[8] = {0};
    const int64_t size[1] = {8};
    fct_tensor_release(sim_tensor_new(FCK_FLOAT32, 1, size, zeros)); /* reuses the input's memory */
    assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK);
    finish(&f);
    end(&f);
}

static void input_released_on_other_stream_is_reused_after_its_cast(void **state) {
    (void)state;
    release_input_on_other_stream(RECYCLED);
    release_input_on_other_stream(SETTLED_AND_RECYCLED);
    release_input_on_other_stream(DISCARDED);
}

/* ---- a user's all-reduce hook on its own stream (set_all_reduce_hook(hook, stream=...)) ---- */

static struct {
    fct_stream stream;
    bool joined;
} user;

/* Like GroupCommunication._run_reduce_hook of fsdp_c: the user's stream waits for the stream that
 * reduces, which then waits for the user's stream. */
static int reduce_hook_on_user_stream(void *group, fct_tensor *output) {
    fc_comm_ctx *comm = ((sim_group *)group)->core.base.comm;
    fct_stream before = fct_stream_current(sim_device());
    /* As in torch: the next reduce-scatter does not wait for the hook. */
    assert_int_equal(before.id, comm->all_reduce_stream.id);
    assert_int_equal(fc_comm_order_streams(comm, user.stream, before), FC_OK);
    (void)fct_stream_set_current(user.stream);
    assert_int_equal(fct_tensor_div(output, 0.5), 0);
    (void)fct_stream_set_current(before);
    if (user.joined) {
        assert_int_equal(fc_comm_order_streams(comm, before, user.stream), FC_OK);
    }
    return 0;
}

/* The output is cast, so the next reduction could reuse its memory while the hook still runs (B9 of
 * tests/TORCH_BUGS.md). */
static void output_is_kept_until_all_reduce_hook_stream_has_used_it(void **state) {
    (void)state;
    for (int joined = 0; joined < 2; joined++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = true;
        scenario.reduce_dtype = FCK_BFLOAT16;
        scenario.user_reduce = true;
        fixture f = begin(scenario);
        fc_callbacks callbacks = sim_callbacks;
        callbacks.reduce_hook = reduce_hook_on_user_stream;
        core(&f)->base.callbacks = &callbacks;
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
        core(&f)->base.callbacks = &sim_callbacks;
        end(&f);
    }
}

/* ---- offload ---- */

static int sets_left;

static int set_sharded_grad_until_failure(void *param, fct_tensor *local) {
    return sets_left-- > 0 ? sim_callbacks.set_sharded_grad(param, local) : -1;
}

/* The second parameter's gradient fails after the copy of the first one was queued. */
static void offload_copies_before_failure_are_waited_for_after_reset(void **state) {
    (void)state;
    sim_scenario scenario = two_ranks;
    scenario.device.streams = true;
    scenario.offload = true;
    scenario.shapes[scenario.shape_count++] = (sim_shape)FLOATS;
    fixture f = begin(scenario);
    fc_callbacks callbacks = sim_callbacks;
    callbacks.set_sharded_grad = set_sharded_grad_until_failure;
    core(&f)->base.callbacks = &callbacks;
    sets_left = 1;
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    compute_gradients(&f, 2.0);
    assert_int_equal(fc_group_post_backward(core(&f)), FC_ERAISED);
    assert_int_equal(fc_group_reset(core(&f)), FC_OK);
    assert_non_null(core(&f)->reducer.copied_to_host);
    assert_int_equal(fc_group_finalize_backward(core(&f)), FC_OK);
    assert_null(core(&f)->reducer.copied_to_host);
    expect_grad(&f, 0, 3.0);
    core(&f)->base.callbacks = &sim_callbacks;
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(second_reduction_adds_to_gradient),
        cmocka_unit_test(complete_reductions_sets_gradients_on_both_kinds_of_devices),
        cmocka_unit_test(large_gradient_is_sent_from_its_own_memory),
        cmocka_unit_test(gradient_with_other_owner_is_packed_before_sending),
        cmocka_unit_test(backward_without_sync_leaves_gradient_in_parameter),
        cmocka_unit_test(backward_without_sync_leaves_gradient_in_reduce_dtype),
        cmocka_unit_test(partial_gradient_is_reduced_without_new_gradient),
        cmocka_unit_test(reduce_scatter_without_all_reduce_keeps_output_in_parameter),
        cmocka_unit_test(gradients_of_one_rank_are_added_to_its_partial_output),
        cmocka_unit_test(reduction_clears_grad_of_unsharded_parameter),
        cmocka_unit_test(parameter_without_gradient_gets_none),
        cmocka_unit_test(reduce_unused_reduces_zeros_for_missing_gradient),
        cmocka_unit_test(group_without_gradients_issues_no_collective),
        cmocka_unit_test(non_overlapping_reduction_completes_before_backward_continues),
        cmocka_unit_test(cpu_reduction_runs_while_backward_continues),
        cmocka_unit_test(reduction_poll_does_not_wait),
        cmocka_unit_test(next_reduction_finishes_reductions_above_limit),
        cmocka_unit_test(post_accumulate_hook_finishes_reduction_at_once),
        cmocka_unit_test(discarded_reduction_gives_no_gradient_and_holds_memory_until_complete),
        cmocka_unit_test(discard_affects_only_reductions_of_group),
        cmocka_unit_test(stream_reduction_is_queued_completely_and_keeps_only_input),
        cmocka_unit_test(input_released_on_other_stream_is_reused_after_its_cast),
        cmocka_unit_test(output_is_kept_until_all_reduce_hook_stream_has_used_it),
        cmocka_unit_test(offload_copies_before_failure_are_waited_for_after_reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
