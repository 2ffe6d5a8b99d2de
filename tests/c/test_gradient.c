/* Gradients before their reduction: accumulated, kept in the reduce dtype, or collected into a
 * plan. */
#include "core/gradient.h"

#include "sim_model.h"

#include <string.h>

#define FLOATS {.ndim = 1, .sizes = {4}}

static sim_model *model;
static fc_group_base *base;
static sim_param *params; /* of layers[1], the first after the root */
static fc_reduce_plan plan;

/* The group has two parameters of FLOATS and one of the shape `third`. Unshards it, as before a
 * post-backward. No parameter has a gradient. */
static void begin(sim_shape third, fct_dtype reduce_dtype) {
    sim_scenario s = {.world = 2, .layers = 1, .shape_count = 3, .reduce_dtype = reduce_dtype};
    s.shapes[0] = s.shapes[1] = (sim_shape)FLOATS;
    s.shapes[2] = third;
    sim_begin((sim_config){.seed = 7});
    model = sim_model_new(&s);
    sim_group *group = &model->layers[1].groups[0];
    base = &group->core.base;
    params = group->params;
    plan = (fc_reduce_plan){.count = 0};
    assert_int_equal(fc_group_unshard(&group->core, FC_IDLE, false), FC_OK);
    assert_int_equal(fc_group_wait_unshard(&group->core), FC_OK);
}

static void end(void) {
    fc_reduce_plan_fini(&plan);
    sim_model_free(model);
    sim_end();
}

static void accumulate_gradient(size_t i, double value) {
    const double values[4] = {value, value, value, value};
    sim_grad_accumulate(params[i].core.unsharded, sim_tensor_new(sim_compute_dtype(&params[i]), 1,
                                                                 params[i].shape.sizes, values));
}

static void expect_gradient(const fct_tensor *grad, double value) {
    const double values[4] = {value, value, value, value};
    assert_non_null(grad);
    sim_tensor_expect(grad, values, "a gradient");
}

static void gradient_collect_takes_gradients_in_group_order(void **state) {
    (void)state;
    begin((sim_shape)FLOATS, 0);
    accumulate_gradient(2, 3.0);
    accumulate_gradient(0, 1.0);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), false, &plan), FC_OK);
    assert_int_equal(plan.count, 2);
    assert_ptr_equal(plan.params[0], &params[0].core);
    assert_ptr_equal(plan.params[1], &params[2].core);
    expect_gradient(plan.grads[0], 1.0);
    expect_gradient(plan.grads[1], 3.0);
    assert_false(fct_grad_has(params[0].core.unsharded));
    end();
}

static void gradient_collect_takes_only_span_and_drops_previous_gradients(void **state) {
    (void)state;
    begin((sim_shape)FLOATS, 0);
    accumulate_gradient(0, 1.0);
    accumulate_gradient(1, 2.0);
    assert_int_equal(fc_gradient_collect(base, (fc_span){1, 3}, false, &plan), FC_OK);
    assert_int_equal(plan.count, 1);
    expect_gradient(plan.grads[0], 2.0);
    assert_true(fct_grad_has(params[0].core.unsharded));
    assert_int_equal(fc_gradient_collect(base, (fc_span){0, 1}, false, &plan), FC_OK);
    assert_int_equal(plan.count, 1);
    expect_gradient(plan.grads[0], 1.0);
    end();
}

static void gradient_collect_of_unused_trainable_parameter_gives_zeros(void **state) {
    (void)state;
    begin((sim_shape){.ndim = 1, .sizes = {4}, .frozen = true}, 0);
    accumulate_gradient(0, 1.0);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), true, &plan), FC_OK);
    assert_int_equal(plan.count, 2);
    assert_ptr_equal(plan.params[1], &params[1].core);
    expect_gradient(plan.grads[1], 0.0);
    end();
}

static void gradient_collect_of_never_unsharded_parameter_gives_zeros_of_full_size(void **state) {
    (void)state;
    begin((sim_shape){.ndim = 2, .sizes = {3, 2}, .compute = FCK_BFLOAT16}, 0);
    fct_facts facts;
    fc_param_release_unsharded(&params[1].core);
    fc_param_release_unsharded(&params[2].core);
    assert_int_equal(fct_tensor_set_requires_grad(params[1].sharded, false), 0);
    assert_int_equal(fc_gradient_collect(base, (fc_span){1, 3}, true, &plan), FC_OK);
    assert_int_equal(plan.count, 1);
    fct_tensor_facts(plan.grads[0], &facts);
    assert_int_equal(facts.numel, 6);
    assert_int_equal(facts.dtype, FCK_BFLOAT16);
    end();
}

static void gradient_to_accumulated_casts_to_reduce_dtype_and_accumulates(void **state) {
    (void)state;
    begin((sim_shape){.ndim = 1, .sizes = {4}, .compute = FCK_BFLOAT16}, FCK_FLOAT32);
    accumulate_gradient(2, 256.0);
    assert_int_equal(fc_gradient_to_accumulated(base), FC_OK);
    assert_false(fct_grad_has(params[2].core.unsharded));
    expect_gradient(params[2].core.accumulated, 256.0);
    accumulate_gradient(2, 1.0); /* bfloat16 cannot represent 257 */
    assert_int_equal(fc_gradient_accumulate(base, (fc_span){0, 2}), FC_OK);
    expect_gradient(params[2].core.accumulated, 256.0);
    assert_int_equal(fc_gradient_accumulate(base, (fc_span){2, 3}), FC_OK);
    expect_gradient(params[2].core.accumulated, 257.0);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), false, &plan), FC_OK);
    expect_gradient(plan.grads[0], 257.0);
    assert_null(params[2].core.accumulated);
    end();
}

static void gradient_to_accumulated_in_reduce_dtype_leaves_gradient_in_grad(void **state) {
    (void)state;
    begin((sim_shape){.ndim = 1, .sizes = {4}, .compute = FCK_BFLOAT16}, FCK_BFLOAT16);
    accumulate_gradient(2, 3.0);
    assert_int_equal(fc_gradient_to_accumulated(base), FC_OK);
    assert_true(fct_grad_has(params[2].core.unsharded));
    assert_null(params[2].core.accumulated);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), false, &plan), FC_OK);
    expect_gradient(plan.grads[0], 3.0);
    end();
}

static void end_of_backward_casts_gradient_in_place_to_grad_dtype(void **state) {
    (void)state;
    begin((sim_shape){.ndim = 1, .sizes = {4}, .compute = FCK_BFLOAT16}, FCK_FLOAT32);
    fct_facts facts;
    fc_param *p = &params[2].core;
    p->grad_dtype = FCK_FLOAT32;
    p->defers_cast = true;
    fc_group_base_refresh(base);
    assert_int_equal(fc_gradient_begin(base, true), FC_OK);
    accumulate_gradient(2, 3.0);
    accumulate_gradient(0, 1.0);
    assert_int_equal(fc_gradient_to_accumulated(base), FC_OK);
    assert_null(p->accumulated);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_gradient_end(base), FC_ERAISED);
    fct_tensor_facts(sim_grad_peek(p->unsharded), &facts);
    assert_int_equal(facts.dtype, FCK_BFLOAT16);
    assert_int_equal(fc_gradient_end(base), FC_OK);
    fct_tensor_facts(sim_grad_peek(p->unsharded), &facts);
    assert_int_equal(facts.dtype, FCK_FLOAT32);
    expect_gradient(sim_grad_peek(p->unsharded), 3.0);
    expect_gradient(sim_grad_peek(params[0].core.unsharded), 1.0);
    end();
}

/* The parameters are NULL, so a visit would crash. */
static void backward_without_deferred_casts_visits_no_parameter(void **state) {
    (void)state;
    begin((sim_shape)FLOATS, 0);
    fc_group_base copy = *base;
    fc_param *nothing[3] = {NULL, NULL, NULL};
    copy.params = nothing;
    assert_int_equal(fc_gradient_begin(&copy, true), FC_OK);
    assert_int_equal(fc_gradient_end(&copy), FC_OK);
    end();
}

static void change_of_deferred_cast_requires_invalidate(void **state) {
    (void)state;
    begin((sim_shape)FLOATS, 0);
    fc_group *group = &model->layers[1].groups[0].core;
    params[2].core.grad_dtype = FCK_FLOAT32;
    for (int defers = 1; defers >= 0; defers--) {
        params[2].core.defers_cast = defers != 0;
        assert_int_equal(fc_group_check(group), FC_ESTATE);
        assert_non_null(strstr(base->comm->error.message, "defers its cast"));
        fc_group_invalidate(group);
        assert_int_equal(base->defers_casts, defers);
        assert_int_equal(fc_group_check(group), FC_OK);
    }
    end();
}

static void zero_gradients_without_a_dtype_are_refused(void **state) {
    (void)state;
    begin((sim_shape)FLOATS, FCT_NO_DTYPE);
    fc_param *p = &params[2].core;
    p->overrides_grad_dtype = true;
    assert_int_equal(fc_gradient_check_zeros(base), FC_EVALUE);
    assert_non_null(strstr(base->comm->error.message, "requires an explicit"));
    p->sharded_grad_dtype = FCK_FLOAT32;
    assert_int_equal(fc_gradient_check_zeros(base), FC_OK);
    p->sharded_grad_dtype = FCT_NO_DTYPE;
    p->reduce_dtype = FCK_FLOAT32;
    assert_int_equal(fc_gradient_check_zeros(base), FC_OK);
    p->reduce_dtype = FCT_NO_DTYPE;
    assert_int_equal(fct_tensor_set_requires_grad(params[2].sharded, false), 0);
    assert_int_equal(fc_gradient_check_zeros(base), FC_OK);
    end();
}

static int unwrap(void *param, fct_tensor *grad, fct_tensor **local) {
    (void)param;
    return fct_tensor_cast(grad, FCK_FLOAT64, local);
}

static void gradient_collect_unwraps_dtensor_gradients_through_callback(void **state) {
    (void)state;
    fc_callbacks callbacks = sim_callbacks;
    fct_facts facts;
    begin((sim_shape)FLOATS, 0);
    callbacks.unwrap_grad = unwrap;
    base->callbacks = &callbacks;
    params[1].core.wrapped = true;
    accumulate_gradient(0, 1.0);
    accumulate_gradient(1, 2.0);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), false, &plan), FC_OK);
    fct_tensor_facts(plan.grads[0], &facts);
    assert_int_equal(facts.dtype, FCK_FLOAT32);
    fct_tensor_facts(plan.grads[1], &facts);
    assert_int_equal(facts.dtype, FCK_FLOAT64);
    base->callbacks = &sim_callbacks;
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradient_collect_takes_gradients_in_group_order),
        cmocka_unit_test(gradient_collect_takes_only_span_and_drops_previous_gradients),
        cmocka_unit_test(gradient_collect_of_unused_trainable_parameter_gives_zeros),
        cmocka_unit_test(gradient_collect_of_never_unsharded_parameter_gives_zeros_of_full_size),
        cmocka_unit_test(gradient_to_accumulated_in_reduce_dtype_leaves_gradient_in_grad),
        cmocka_unit_test(end_of_backward_casts_gradient_in_place_to_grad_dtype),
        cmocka_unit_test(backward_without_deferred_casts_visits_no_parameter),
        cmocka_unit_test(change_of_deferred_cast_requires_invalidate),
        cmocka_unit_test(zero_gradients_without_a_dtype_are_refused),
        cmocka_unit_test(gradient_to_accumulated_casts_to_reduce_dtype_and_accumulates),
        cmocka_unit_test(gradient_collect_unwraps_dtensor_gradients_through_callback),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
