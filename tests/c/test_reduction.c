/* Single reductions in flight: their order in the context, the gradients that finish passes on, and
 * partial outputs. test_reduce.c covers the reductions that a group creates. */
#include "core/reduction.h"

#include <string.h>

#include "sim_model.h"

static sim_model *model;

static sim_group *group(size_t layer) {
    return &model->layers[layer].groups[0];
}

/* Two layers of two vectors each, on rank 0 of two: an output has 2 + 1 elements. */
static void begin(void) {
    sim_scenario s = {.world = 2, .layers = 2, .shape_count = 2};
    s.shapes[0] = (sim_shape){.ndim = 1, .sizes = {4}};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {2}};
    sim_begin((sim_config){.seed = 7});
    sim_collectives_stall(true);
    model = sim_model_new(&s);
}

static void end(void) {
    sim_model_free(model);
    sim_end();
}

static fct_tensor *vector_of(int64_t numel, double value) {
    const double values[6] = {value, value, value, value, value, value};
    return sim_tensor_new(FCK_FLOAT32, 1, &numel, values);
}

/* Starts a reduce-scatter of both parameters' gradients. This rank's part of the sum is 3 *
 * value. */
static fc_reduction *start_reduction(size_t layer, double value) {
    fc_group_base *base = &group(layer)->core.base;
    fc_reduction *r = fc_reduction_new(base, 2);
    assert_non_null(r);
    r->params[0] = &group(layer)->params[0].core;
    r->params[1] = &group(layer)->params[1].core;
    r->count = r->total = 2;
    r->divide_after = 1.0;
    r->input = vector_of(6, value);
    assert_int_equal(fc_reduction_output_numel(r), 3);
    r->output = vector_of(3, 0.0);
    assert_int_equal(fc_process_group_reduce_scatter(&base->shard, base->name, r->output, r->input,
                                                     FCT_SUM, 1.0, true, &r->work),
                     FC_OK);
    fc_reduction_append(r);
    return r;
}

static void expect_grads(size_t layer, double value) {
    const double values[2] = {value, value};
    for (size_t i = 0; i < 2; i++) {
        const fct_tensor *grad = sim_grad_peek(group(layer)->params[i].sharded);
        assert_non_null(grad);
        sim_tensor_expect(grad, values, "a reduced gradient");
    }
}

static bool has_grads(size_t layer) {
    return sim_grad_peek(group(layer)->params[0].sharded) != NULL;
}

static void recycle_finishes_oldest_reductions_down_to_limit(void **state) {
    (void)state;
    fc_comm_ctx *c;
    begin();
    c = &model->comm;
    (void)start_reduction(2, 1.0);
    (void)start_reduction(1, 2.0);
    assert_int_equal(fc_reduction_check(c), FC_OK);
    assert_int_equal(fc_reduction_recycle(c, 2), FC_OK);
    assert_false(has_grads(2));
    assert_int_equal(fc_reduction_recycle(c, 1), FC_OK);
    expect_grads(2, 3.0);
    assert_false(has_grads(1));
    assert_false(fc_reduction_has(c, &group(2)->core.base));
    assert_true(fc_reduction_has(c, &group(1)->core.base));
    assert_int_equal(fc_reduction_recycle(c, 0), FC_OK);
    expect_grads(1, 6.0);
    assert_int_equal(fc_reduction_check(c), FC_OK);
    end();
}

static void discard_keeps_order_of_other_reductions(void **state) {
    (void)state;
    fc_comm_ctx *c;
    begin();
    c = &model->comm;
    const fc_reduction *first = start_reduction(2, 1.0);
    (void)start_reduction(1, 2.0);
    const fc_reduction *last = start_reduction(2, 4.0);
    fc_reduction_discard(c, &group(1)->core.base);
    assert_ptr_equal(c->oldest, first);
    assert_ptr_equal(c->oldest->next, last);
    assert_int_equal(fc_reduction_check(c), FC_OK);
    assert_int_equal(fc_reduction_recycle(c, 0), FC_OK);
    expect_grads(2, 15.0);
    assert_false(has_grads(1));
    end();
}

static void abandoned_reduction_keeps_memory_until_work_completes(void **state) {
    (void)state;
    begin();
    const size_t before = sim_live_bytes();
    (void)start_reduction(1, 1.0);
    (void)start_reduction(2, 1.0);
    fc_reduction_discard(&model->comm, NULL);
    assert_int_equal(model->comm.reductions, 0);
    assert_non_null(model->comm.deferred);
    assert_true(sim_live_bytes() > before);
    sim_drain();
    fc_comm_collect(&model->comm);
    assert_int_equal(sim_live_bytes(), before);
    end();
}

static void finish_divides_and_passes_gradient_once(void **state) {
    (void)state;
    begin();
    start_reduction(1, 2.0)->divide_after = 4.0;
    assert_int_equal(fc_reduction_finish(model->comm.oldest), FC_OK);
    expect_grads(1, 1.5);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    expect_grads(1, 1.5);
    end();
}

static void failed_finish_loses_only_that_reduction(void **state) {
    (void)state;
    begin();
    (void)start_reduction(2, 1.0);
    (void)start_reduction(1, 1.0);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_ERAISED);
    assert_int_equal(model->comm.reductions, 1);
    sim_discard_error();
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    expect_grads(1, 3.0);
    assert_false(has_grads(2));
    end();
}

/* HSDP: a backward without all-reduce leaves its output with the parameters; the next all-reduce
 * takes it from them. */
static void partial_outputs_stay_with_parameters_until_all_reduce(void **state) {
    (void)state;
    const double waiting[2] = {9.0, 9.0};
    begin();
    for (int i = 0; i < 2; i++) {
        start_reduction(1, i == 0 ? 1.0 : 2.0)->keep_partial = true;
        assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    }
    assert_false(has_grads(1));
    sim_tensor_expect(group(1)->params[1].core.partial, waiting,
                      "an output that waits"); /* 3 + 6 */
    fc_reduction *r = start_reduction(1, 4.0);
    assert_int_equal(fc_reduction_wait(r), FC_OK);
    assert_int_equal(fc_reduction_merge_partials(r), FC_OK);
    assert_null(group(1)->params[0].core.partial);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    expect_grads(1, 21.0);
    end();
}

static size_t count_calls(const char *name) {
    size_t count = 0;
    for (const char *at = sim_calls_text(); (at = strstr(at, name)) != NULL; at += strlen(name)) {
        count++;
    }
    return count;
}

/* torch adds the whole output at once. */
static void partial_outputs_of_one_buffer_are_added_in_one_operation(void **state) {
    (void)state;
    begin();
    for (int i = 0; i < 3; i++) {
        start_reduction(1, 1.0)->keep_partial = true;
        sim_calls_clear();
        assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
        assert_int_equal(count_calls("fct_tensor_add"), i == 0 ? 0 : 1);
    }
    fc_reduction *r = start_reduction(1, 1.0);
    assert_int_equal(fc_reduction_wait(r), FC_OK);
    sim_calls_clear();
    assert_int_equal(fc_reduction_merge_partials(r), FC_OK);
    assert_int_equal(count_calls("fct_tensor_add"), 1);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    expect_grads(1, 12.0);
    end();
}

/* The outputs of two parameters may come from different backwards: one of them had no gradient. */
static void start_with_partial_outputs_of_two_buffers(void) {
    begin();
    start_reduction(1, 1.0)->keep_partial = true;
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    fct_tensor *other = vector_of(1, 5.0);
    fc_param_set_partial(&group(1)->params[1].core, other);
    fct_tensor_release(other);
}

static void partial_outputs_of_several_buffers_are_added_in_one_operation(void **state) {
    (void)state;
    const double first[2] = {9.0, 9.0};
    const double second[1] = {11.0};
    start_with_partial_outputs_of_two_buffers();
    fc_reduction *r = start_reduction(1, 2.0);
    assert_int_equal(fc_reduction_wait(r), FC_OK);
    sim_calls_clear();
    assert_int_equal(fc_reduction_merge_partials(r), FC_OK);
    assert_int_equal(count_calls("fct_tensor_add"), 0);
    assert_int_equal(count_calls("fct_foreach_add"), 1);
    assert_null(group(1)->params[1].core.partial);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    sim_tensor_expect(sim_grad_peek(group(1)->params[0].sharded), first, "outputs of one buffer");
    sim_tensor_expect(sim_grad_peek(group(1)->params[1].sharded), second, "outputs of two buffers");
    end();
}

static void output_is_added_to_partial_outputs_of_several_buffers_in_one_operation(void **state) {
    (void)state;
    const double first[2] = {9.0, 9.0};
    const double second[1] = {11.0};
    start_with_partial_outputs_of_two_buffers();
    start_reduction(1, 2.0)->keep_partial = true;
    sim_calls_clear();
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    assert_int_equal(count_calls("fct_tensor_add"), 0);
    assert_int_equal(count_calls("fct_foreach_add"), 1);
    sim_tensor_expect(group(1)->params[0].core.partial, first, "a partial output of one buffer");
    sim_tensor_expect(group(1)->params[1].core.partial, second, "a partial output of two buffers");
    end();
}

/* The partial outputs stay with the parameters until all additions are queued. */
static void failed_addition_of_several_buffers_is_reported(void **state) {
    (void)state;
    const double first[2] = {3.0, 3.0};
    const double second[1] = {5.0};
    const char *name = NULL;
    start_with_partial_outputs_of_two_buffers();
    fc_reduction *r = start_reduction(1, 2.0);
    assert_int_equal(fc_reduction_wait(r), FC_OK);
    sim_fault_arm(3, SIM_ONCE); /* after two views of the output */
    assert_int_equal(fc_reduction_merge_partials(r), FC_ERAISED);
    assert_int_equal(sim_fault_fired(&name), SIM_FAULT_BOUNDARY);
    assert_string_equal(name, "fct_foreach_add");
    sim_discard_error();
    sim_tensor_expect(group(1)->params[0].core.partial, first, "a partial output that is kept");
    sim_tensor_expect(group(1)->params[1].core.partial, second, "a partial output that is kept");
    end();
}

/* The partial output of a parameter without gradient in this backward is copied to the output. */
static void partial_output_without_new_gradient_is_copied(void **state) {
    (void)state;
    begin();
    start_reduction(1, 1.0)->keep_partial = true;
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    fc_reduction *r = start_reduction(1, 2.0);
    assert_int_equal(fc_reduction_wait(r), FC_OK);
    r->count = 1;
    sim_calls_clear();
    assert_int_equal(fc_reduction_merge_partials(r), FC_OK);
    assert_int_equal(count_calls("fct_tensor_add"), 1);
    assert_int_equal(count_calls("fct_tensor_copy"), 1);
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    const double first[2] = {9.0, 9.0};
    const double second[1] = {3.0};
    sim_tensor_expect(sim_grad_peek(group(1)->params[0].sharded), first, "an added output");
    sim_tensor_expect(sim_grad_peek(group(1)->params[1].sharded), second, "a copied output");
    end();
}

/* torch frees the reduced output as soon as it is added to the partial output. */
static void merged_output_is_released_before_reduction_is_recycled(void **state) {
    (void)state;
    begin();
    start_reduction(1, 1.0)->keep_partial = true;
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    fc_reduction *r = start_reduction(1, 2.0);
    r->keep_partial = true;
    const size_t before = sim_live_bytes();
    assert_int_equal(fc_reduction_finish(r), FC_OK);
    sim_drain();
    assert_int_equal(before - sim_live_bytes(), 3 * sizeof(float));
    assert_int_equal(fc_reduction_recycle(&model->comm, 0), FC_OK);
    end();
}

static void reduction_check_reports_inconsistent_list(void **state) {
    (void)state;
    begin();
    (void)start_reduction(1, 1.0);
    model->comm.reductions++;
    assert_int_equal(fc_reduction_check(&model->comm), FC_ESTATE);
    model->comm.reductions--;
    end();
}

static int reduce_nothing(void *owner, fc_param *const *params, fct_tensor **grads, size_t count,
                          bool order_compute) {
    (void)owner, (void)params, (void)grads, (void)count, (void)order_compute;
    return 0;
}

/* Without replicas there is no all-reduce, and no process group to which its checksum belongs. */
static void reduction_by_callback_without_replicas_adds_no_checksum(void **state) {
    (void)state;
    const sim_checksum *list = NULL;
    begin();
    model->comm.checksums = true;
    fc_group *g = &group(1)->core;
    fc_reduce_plan *plan = &g->reducer.plan;
    fc_callbacks callbacks = sim_callbacks;
    callbacks.reduce = reduce_nothing;
    g->base.callbacks = &callbacks;
    g->base.fallbacks = FC_FALLBACK_REDUCE;
    assert_int_equal(fc_reduce_plan_reserve(plan, 1), FC_OK);
    plan->params[0] = &group(1)->params[0].core;
    plan->grads[0] = vector_of(4, 1.0);
    plan->count = 1;
    assert_int_equal(fc_reduce_run(&g->reducer, fc_group_base_all(&g->base), false), FC_OK);
    assert_int_equal(plan->count, 0);
    assert_int_equal(sim_checksums(&list), 0);
    g->base.callbacks = &sim_callbacks;
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recycle_finishes_oldest_reductions_down_to_limit),
        cmocka_unit_test(discard_keeps_order_of_other_reductions),
        cmocka_unit_test(abandoned_reduction_keeps_memory_until_work_completes),
        cmocka_unit_test(finish_divides_and_passes_gradient_once),
        cmocka_unit_test(failed_finish_loses_only_that_reduction),
        cmocka_unit_test(partial_outputs_stay_with_parameters_until_all_reduce),
        cmocka_unit_test(partial_outputs_of_one_buffer_are_added_in_one_operation),
        cmocka_unit_test(partial_outputs_of_several_buffers_are_added_in_one_operation),
        cmocka_unit_test(output_is_added_to_partial_outputs_of_several_buffers_in_one_operation),
        cmocka_unit_test(failed_addition_of_several_buffers_is_reported),
        cmocka_unit_test(partial_output_without_new_gradient_is_copied),
        cmocka_unit_test(merged_output_is_released_before_reduction_is_recycled),
        cmocka_unit_test(reduction_check_reports_inconsistent_list),
        cmocka_unit_test(reduction_by_callback_without_replicas_adds_no_checksum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
