/* Gradient buckets of a replicated group: assignment of parameters and time of each reduction.
 * Whole steps with buckets are among the scenarios of test_train.c. */
#include "core/bucket.h"

#include <string.h>

#include "core/reduce.h"
#include "core/reduction.h"
#include "sim_model.h"

#define FOUR_FLOATS {.ndim = 1, .sizes = {4}}

/* Rank 0 of two replicas, with all parameters in the root. Rank 1 has twice the gradient, so the
 * mean is 1.5 times rank 0's. Four parameters of 16 bytes; two of them fill a bucket. */
static const sim_scenario replicated = {
    .world = 1,
    .replicas = 2,
    .no_reshard_after_forward = true,
    .bucket_bytes = 32,
    .shape_count = 4,
    .shapes = {FOUR_FLOATS, FOUR_FLOATS, FOUR_FLOATS, FOUR_FLOATS}};

static int at_end(void *owner) {
    (void)owner;
    return 0;
}

static void ignore_owner(void *owner) {
    (void)owner;
}

static fc_group *core(sim_model *m) {
    return &m->layers[0].groups[0].core;
}

/* Runs a forward and starts a backward, up to the root's output. */
static void start_backward(sim_model *m) {
    const fct_hook hook = {m, at_end, ignore_owner, ignore_owner};
    assert_int_equal(sim_model_forward(m, true), FC_OK);
    m->tape_length = 0;
    sim_set_in_backward(true);
    assert_int_equal(fc_state_pre_backward(&m->layers[0].core, &hook), FC_OK);
}

static sim_model *begin(const sim_scenario *scenario) {
    sim_scenario s = *scenario;
    s.device.seed = 7; /* no collective completes at once */
    sim_begin(s.device);
    sim_model *m = sim_model_new(&s);
    start_backward(m);
    sim_log_clear();
    return m;
}

/* Ends the backward. */
static void finish_backward(sim_model *m) {
    assert_int_equal(fc_iteration_end_backward(&m->iteration, &m->comm), FC_OK);
    sim_set_in_backward(false);
    sim_drop_at_end();
}

static void end(sim_model *m) {
    sim_set_in_backward(false);
    sim_model_free(m);
    sim_end();
}

/* Accumulates a gradient into the i-th parameter, as autograd does. */
static void accumulate_gradient(sim_model *m, size_t i, double value) {
    const double values[4] = {value, value, value, value};
    sim_param *p = &m->layers[0].groups[0].params[i];
    sim_grad_accumulate(p->core.unsharded, sim_tensor_new(FCK_FLOAT32, 1, p->shape.sizes, values));
    assert_int_equal(sim_subscriptions_run(p->core.unsharded), 0);
}

/* Returns the number of all-reduces since the log was cleared. */
static size_t count_all_reduces(void) {
    size_t count = 0;
    for (const char *at = sim_log_text(); (at = strstr(at, "all-reduce:")) != NULL; at++) {
        count++;
    }
    return count;
}

static void expect_grad(sim_model *m, size_t i, double value) {
    const double values[4] = {value, value, value, value};
    const fct_tensor *grad = sim_grad_peek(m->layers[0].groups[0].params[i].sharded);
    assert_non_null(grad);
    sim_tensor_expect(grad, values, "the reduced gradient");
}

/* ---- cut ---- */

/* Expects buckets with these first parameters, from the last parameter to the first. */
static void expect_buckets(sim_scenario scenario, size_t count, const size_t *firsts) {
    sim_begin(scenario.device);
    sim_model *m = sim_model_new(&scenario);
    assert_int_equal(fc_bucket_cut(&core(m)->buckets), FC_OK);
    assert_int_equal(core(m)->buckets.count, count);
    for (size_t i = 0, last = scenario.shape_count; i < count; last = firsts[i++]) {
        assert_int_equal(core(m)->buckets.items[i].span.first, firsts[i]);
        assert_int_equal(core(m)->buckets.items[i].span.end, last);
    }
    end(m);
}

/* Each parameter has 16 bytes. A bucket is complete when it has at least the limit. */
static void buckets_are_cut_from_last_parameter_to_first_at_limit(void **state) {
    (void)state;
    sim_scenario s = replicated;
    s.bucket_bytes = 32;
    expect_buckets(s, 2, (const size_t[]){2, 0});
    s.bucket_bytes = 33;
    expect_buckets(s, 2, (const size_t[]){1, 0});
    s.bucket_bytes = 1;
    expect_buckets(s, 4, (const size_t[]){3, 2, 1, 0});
    s.bucket_bytes = 64;
    expect_buckets(s, 1, (const size_t[]){0});
    s.bucket_bytes = 1000;
    expect_buckets(s, 1, (const size_t[]){0});
}

static void limit_of_a_sole_group_does_not_apply_beside_another_group(void **state) {
    (void)state;
    sim_scenario s = replicated;
    for (s.layers = 0; s.layers < 2; s.layers++) {
        sim_begin(s.device);
        sim_model *m = sim_model_new(&s);
        fc_buckets *b = &core(m)->buckets;
        fc_bucket_set_limit(b, 32, true);
        assert_int_equal(fc_bucket_limit(b), s.layers == 0 ? 32 : 0);
        assert_int_equal(fc_bucket_cut(b), FC_OK);
        assert_true(fc_bucket_has_several(b) == (s.layers == 0));
        fc_bucket_set_limit(b, 32, false);
        assert_int_equal(fc_bucket_limit(b), 32);
        end(m);
    }
}

static void bucket_size_excludes_frozen_parameters_and_uses_reduce_dtype(void **state) {
    (void)state;
    sim_scenario s = replicated;
    s.shapes[2].frozen = true;
    expect_buckets(s, 2, (const size_t[]){1, 0});
    s.shapes[0].frozen = true; /* joins the bucket before it */
    expect_buckets(s, 1, (const size_t[]){0});
    s.shapes[3].frozen = true;
    expect_buckets(s, 1, (const size_t[]){0});
    s = replicated;
    for (size_t i = 0; i < 4; i++) {
        s.shapes[i].compute = FCK_BFLOAT16;
    }
    expect_buckets(s, 1, (const size_t[]){0});
    s.reduce_dtype = FCK_FLOAT32;
    expect_buckets(s, 2, (const size_t[]){2, 0});
}

static void change_of_reduce_dtype_cuts_the_buckets_again(void **state) {
    (void)state;
    sim_scenario s = replicated;
    for (size_t i = 0; i < 4; i++) {
        s.shapes[i].compute = FCK_BFLOAT16;
    }
    sim_begin(s.device);
    sim_model *m = sim_model_new(&s);
    fc_buckets *buckets = &core(m)->buckets;
    assert_int_equal(fc_bucket_cut(buckets), FC_OK);
    assert_int_equal(buckets->count, 1);
    fc_bucket_set_reduce_dtype(buckets, FCK_FLOAT32);
    assert_int_equal(buckets->mode, FC_BUCKETS_STALE);
    assert_int_equal(fc_bucket_cut(buckets), FC_OK);
    assert_int_equal(buckets->count, 2);
    fc_bucket_set_reduce_dtype(buckets, FCK_FLOAT32); /* no change */
    assert_int_equal(buckets->mode, FC_BUCKETS_READY);
    end(m);
}

/* Two buckets: the group has registered one of their all-reduces, and fc_bucket_subscribe registers
 * the other. */
static void each_bucket_is_registered_once(void **state) {
    (void)state;
    sim_scenario s = replicated;
    sim_begin(s.device);
    sim_model *m = sim_model_new(&s);
    fc_buckets *buckets = &core(m)->buckets;
    const int before = sim_registered_users();
    for (int i = 0; i < 3; i++) { /* as reads of the Python attribute _buckets */
        assert_int_equal(fc_bucket_cut(buckets), FC_OK);
        fc_bucket_invalidate(buckets);
    }
    assert_int_equal(sim_registered_users(), before);
    sim_fault_arm(2, SIM_ONCE); /* after the allocation of the buckets */
    assert_int_equal(fc_bucket_subscribe(buckets), FC_ERAISED);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(fc_bucket_subscribe(buckets), FC_OK);
        assert_int_equal(sim_registered_users(), before + 1);
        fc_bucket_invalidate(buckets);
    }
    end(m);
}

/* ---- backward ---- */

static void bucket_is_reduced_when_its_last_gradient_arrives(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    accumulate_gradient(m, 3, 2.0);
    assert_int_equal(count_all_reduces(), 0);
    accumulate_gradient(m, 2, 4.0);
    assert_int_equal(count_all_reduces(), 1);
    accumulate_gradient(m, 1, 6.0);
    accumulate_gradient(m, 0, 8.0);
    assert_int_equal(count_all_reduces(), 2);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 2);
    for (size_t i = 0; i < 4; i++) {
        expect_grad(m, i, 1.5 * (8.0 - 2.0 * (double)i));
    }
    end(m);
}

static void bucket_reductions_follow_parameter_order_in_any_autograd_order(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    sim_collectives_stall(true);
    accumulate_gradient(m, 0, 2.0);
    accumulate_gradient(m, 1, 2.0);
    accumulate_gradient(m, 2, 2.0);
    assert_int_equal(count_all_reduces(), 0); /* the bucket of parameters 2 and 3 must be first */
    accumulate_gradient(m, 3, 4.0);
    assert_int_equal(count_all_reduces(), 2);
    assert_int_equal(fc_reduction_recycle(&m->comm, 1), FC_OK);
    expect_grad(m, 3, 6.0);
    assert_null(sim_grad_peek(m->layers[0].groups[0].params[0].sharded));
    finish_backward(m);
    expect_grad(m, 0, 3.0);
    end(m);
}

static void bucket_with_missing_gradient_is_reduced_at_end_of_backward(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    accumulate_gradient(m, 3, 2.0);
    accumulate_gradient(m, 1, 2.0);
    accumulate_gradient(m, 0, 2.0);
    assert_int_equal(count_all_reduces(), 0);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 2);
    assert_null(sim_grad_peek(m->layers[0].groups[0].params[2].sharded));
    expect_grad(m, 3, 3.0);
    expect_grad(m, 0, 3.0);
    end(m);
}

static void bucket_without_gradients_is_not_reduced(void **state) {
    (void)state;
    sim_scenario s = replicated;
    s.bucket_bytes = 16;
    sim_model *m = begin(&s);
    accumulate_gradient(m, 3, 2.0);
    accumulate_gradient(m, 0, 2.0);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 2);
    end(m);
}

static void second_gradient_after_reduction_is_reduced_alone_and_ends_eager_mode(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    accumulate_gradient(m, 3, 2.0);
    accumulate_gradient(m, 2, 2.0);
    accumulate_gradient(m, 3, 6.0);
    accumulate_gradient(m, 1, 2.0);
    accumulate_gradient(m, 0, 2.0);
    assert_int_equal(count_all_reduces(), 1);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 3);
    expect_grad(m, 3, 3.0 + 9.0);
    expect_grad(m, 2, 3.0);
    sim_model_zero_grad(m);
    start_backward(m); /* this and later backwards reduce at the end */
    for (size_t i = 0; i < 4; i++) {
        accumulate_gradient(m, i, 2.0);
    }
    assert_int_equal(count_all_reduces(), 3);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 5);
    end(m);
}

static void second_gradient_before_reduction_is_included(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    accumulate_gradient(m, 3, 2.0);
    accumulate_gradient(m, 3, 6.0);
    assert_int_equal(count_all_reduces(), 0);
    accumulate_gradient(m, 2, 2.0);
    assert_int_equal(count_all_reduces(), 1);
    assert_int_equal(core(m)->buckets.mode, FC_BUCKETS_EAGER);
    finish_backward(m);
    expect_grad(m, 3, 12.0);
    end(m);
}

/* ---- conditions that prevent early reductions ---- */

static void expect_no_early_reduction(const sim_scenario *scenario, void (*change)(fc_group *g),
                                      size_t collectives) {
    sim_begin(scenario->device);
    sim_model *m = sim_model_new(scenario);
    if (change != NULL) {
        change(core(m));
    }
    start_backward(m);
    sim_log_clear();
    for (size_t i = 4; i-- > 0;) {
        accumulate_gradient(m, i, 2.0);
    }
    assert_int_equal(count_all_reduces(), 0);
    finish_backward(m);
    assert_int_equal(count_all_reduces(), collectives);
    end(m);
}

static void set_reduce_hook(fc_group *g) {
    g->reducer.has_hook = true;
}

static void disable_reduction(fc_group *g) {
    g->settings.reduce_grads = false;
}

static void enable_reduce_unused(fc_group *g) {
    g->reducer.reduce_unused = true;
}

static void no_bucket_is_reduced_early_under_a_condition_that_prevents_it(void **state) {
    (void)state;
    sim_scenario s = replicated;
    expect_no_early_reduction(&s, enable_reduce_unused, 2);
    expect_no_early_reduction(&s, set_reduce_hook,
                              1); /* the hook requires the gradients of all parameters */
    expect_no_early_reduction(&s, disable_reduction, 0);
    s.layers = 1; /* the root is not the sole group of the model */
    expect_no_early_reduction(&s, NULL, 2);
}

static void change_to_one_bucket_removes_the_subscriptions(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    assert_int_equal(sim_count_alive().hooks, 5); /* with the callback for the end of backward */
    finish_backward(m);
    fc_bucket_set_limit(&core(m)->buckets, 64, false);
    start_backward(m);
    assert_int_equal(sim_count_alive().hooks, 1);
    finish_backward(m);
    end(m);
}

static void single_bucket_creates_no_subscriptions(void **state) {
    (void)state;
    sim_scenario s = replicated;
    s.bucket_bytes = 64;
    sim_model *m = begin(&s);
    assert_int_equal(sim_count_alive().hooks, 1); /* the callback for the end of backward */
    for (size_t i = 0; i < 4; i++) {
        accumulate_gradient(m, i, 2.0);
    }
    finish_backward(m);
    assert_int_equal(count_all_reduces(), 1);
    end(m);
}

/* A program may warm up on a side stream before it captures a step. */
static void subscriptions_are_renewed_when_forward_runs_on_another_stream(void **state) {
    (void)state;
    sim_scenario s = replicated;
    s.device.streams = true;
    sim_model *m = begin(&s);
    fct_stream side;
    const fct_stream first = fct_stream_current(sim_device());
    assert_non_null(core(m)->base.params[0]->subscription);
    finish_backward(m);
    sim_calls_clear();
    start_backward(m);
    assert_null(strstr(sim_calls_text(), "fct_autograd_subscribe"));
    finish_backward(m);
    assert_int_equal(fct_stream_new(sim_device(), false, &side), 0);
    assert_int_equal(fc_comm_order_streams(&m->comm, side, first), FC_OK);
    (void)fct_stream_set_current(side);
    sim_calls_clear();
    start_backward(m);
    assert_non_null(strstr(sim_calls_text(), "fct_autograd_subscribe"));
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(core(m)->base.params[i]->subscription_stream, side.id);
        accumulate_gradient(m, i, 1.0);
    }
    finish_backward(m);
    assert_int_equal(fc_comm_order_streams(&m->comm, first, side), FC_OK);
    (void)fct_stream_set_current(first);
    end(m);
}

/* The limit changes between a backward without an all-reduce and one with it. Partial gradients are
 * then slices of outputs with other parameters. */
static void partial_gradients_from_other_buckets_are_added(void **state) {
    (void)state;
    static const int64_t limits[][2] = {{1000, 32}, {32, 1000}, {32, 32}, {1000, 1000}, {1, 32}};
    sim_scenario s = replicated;
    s.device.streams = true;
    for (size_t k = 0; k < sizeof limits / sizeof limits[0]; k++) {
        sim_begin(s.device);
        sim_model *m = sim_model_new(&s);
        for (size_t pass = 0; pass < 2; pass++) {
            fc_bucket_set_limit(&core(m)->buckets, limits[k][pass], false);
            core(m)->reducer.all_reduce_grads = pass == 1;
            start_backward(m);
            for (size_t i = 4; i-- > 0;) {
                accumulate_gradient(m, i, 2.0 + (double)i);
            }
            finish_backward(m);
        }
        for (size_t i = 0; i < 4; i++) {
            expect_grad(m, i, 1.5 * 2 * (2.0 + (double)i));
        }
        end(m);
    }
}

static void reset_discards_reduction_of_bucket(void **state) {
    (void)state;
    sim_model *m = begin(&replicated);
    sim_collectives_stall(true);
    accumulate_gradient(m, 3, 2.0);
    accumulate_gradient(m, 2, 2.0);
    accumulate_gradient(m, 1, 2.0);
    sim_set_in_backward(false);
    sim_drop_at_end();
    assert_int_equal(fc_state_reset(&m->layers[0].core), FC_OK);
    sim_collectives_stall(false);
    sim_log_clear();
    start_backward(m);
    for (size_t i = 4; i-- > 0;) {
        accumulate_gradient(m, i, 4.0);
    }
    assert_int_equal(count_all_reduces(), 2);
    finish_backward(m);
    for (size_t i = 0; i < 4; i++) {
        expect_grad(m, i, 6.0);
    }
    end(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_are_cut_from_last_parameter_to_first_at_limit),
        cmocka_unit_test(limit_of_a_sole_group_does_not_apply_beside_another_group),
        cmocka_unit_test(bucket_size_excludes_frozen_parameters_and_uses_reduce_dtype),
        cmocka_unit_test(change_of_reduce_dtype_cuts_the_buckets_again),
        cmocka_unit_test(each_bucket_is_registered_once),
        cmocka_unit_test(bucket_is_reduced_when_its_last_gradient_arrives),
        cmocka_unit_test(bucket_reductions_follow_parameter_order_in_any_autograd_order),
        cmocka_unit_test(bucket_with_missing_gradient_is_reduced_at_end_of_backward),
        cmocka_unit_test(bucket_without_gradients_is_not_reduced),
        cmocka_unit_test(second_gradient_after_reduction_is_reduced_alone_and_ends_eager_mode),
        cmocka_unit_test(second_gradient_before_reduction_is_included),
        cmocka_unit_test(no_bucket_is_reduced_early_under_a_condition_that_prevents_it),
        cmocka_unit_test(change_to_one_bucket_removes_the_subscriptions),
        cmocka_unit_test(single_bucket_creates_no_subscriptions),
        cmocka_unit_test(subscriptions_are_renewed_when_forward_runs_on_another_stream),
        cmocka_unit_test(partial_gradients_from_other_buckets_are_added),
        cmocka_unit_test(reset_discards_reduction_of_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
