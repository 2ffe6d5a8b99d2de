/* Gradient collection by callbacks in place of the core. */
#include "core/gradient.h"

#include "sim_model.h"

static struct {
    size_t accumulated;
    size_t moved;
    fct_tensor *gradient; /* gradient to collect; borrowed */
    bool fails;
} recorded;

static int accumulate(void *owner) {
    (void)owner;
    recorded.accumulated++;
    return 0;
}

static int to_accumulated(void *owner) {
    (void)owner;
    recorded.moved++;
    return 0;
}

static int collect(void *owner, fct_tensor **local) {
    (void)owner;
    if (recorded.fails) {
        return -1;
    }
    if (recorded.gradient != NULL) {
        fct_tensor_retain(recorded.gradient);
    }
    *local = recorded.gradient;
    return 0;
}

static void fallback_for_gradients_replaces_their_collection(void **state) {
    (void)state;
    const int64_t size[1] = {4};
    const double values[4] = {1.0, 2.0, 3.0, 4.0};
    const sim_scenario scenario = {
        .layers = 1, .world = 2, .shape_count = 1, .shapes = {{.ndim = 1, .sizes = {4}}}};
    sim_begin((sim_config){.seed = 3});
    sim_model *model = sim_model_new(&scenario);
    fc_group_base *base = &model->layers[1].groups[0].core.base;
    const fc_callbacks *own = base->callbacks;
    fc_callbacks callbacks = *own;
    fc_reduce_plan plan = {.count = 0};
    base->fallbacks = FC_FALLBACK_GRADS;
    callbacks.accumulate_grad = accumulate;
    callbacks.to_accumulated_grad = to_accumulated;
    callbacks.collect_grad = collect;
    base->callbacks = &callbacks;
    assert_int_equal(fc_gradient_accumulate(base, fc_group_base_all(base)), FC_OK);
    assert_int_equal(fc_gradient_to_accumulated(base), FC_OK);
    assert_int_equal(recorded.accumulated, 1);
    assert_int_equal(recorded.moved, 1);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), false, &plan), FC_OK);
    assert_int_equal(plan.count, 0);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), true, &plan), FC_OK);
    assert_int_equal(plan.count, 1); /* zeros for an unused parameter */
    recorded.gradient = sim_tensor_new(FCK_FLOAT32, 1, size, values);
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), true, &plan), FC_OK);
    assert_int_equal(plan.count, 1);
    assert_ptr_equal(plan.grads[0], recorded.gradient);
    recorded.fails = true;
    assert_int_equal(fc_gradient_collect(base, fc_group_base_all(base), true, &plan), FC_ERAISED);
    fc_reduce_plan_fini(&plan);
    assert_int_equal(sim_tensor_refs(recorded.gradient), 1);
    fct_tensor_release(recorded.gradient);
    base->callbacks = own;
    base->fallbacks = 0;
    sim_model_free(model);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fallback_for_gradients_replaces_their_collection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
