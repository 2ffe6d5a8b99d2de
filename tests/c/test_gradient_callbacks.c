/* Gradient collection by the host in place of the core. */
#include "core/gradient.h"

#include "sim_model.h"

static struct {
    size_t folded;
    size_t stashed;
    fct_tensor *gradient; /* gradient to collect; borrowed */
    bool fails;
} seen;

static bool moves(void *group, fc_fallback move) {
    (void)group;
    return move == FC_FALLBACK_GRADS;
}

static int fold(void *owner) {
    (void)owner;
    seen.folded++;
    return 0;
}

static int stash(void *owner) {
    (void)owner;
    seen.stashed++;
    return 0;
}

static int collect(void *owner, fct_tensor **local) {
    (void)owner;
    if (seen.fails) {
        return -1;
    }
    if (seen.gradient != NULL) {
        fct_tensor_retain(seen.gradient);
    }
    *local = seen.gradient;
    return 0;
}

static void fallback_of_grads_replaces_collection(void **state) {
    (void)state;
    const int64_t size[1] = {4};
    const double values[4] = {1.0, 2.0, 3.0, 4.0};
    const sim_scenario scenario = {
        .layers = 1, .world = 2, .shape_count = 1, .shapes = {{.ndim = 1, .sizes = {4}}}};
    sim_begin((sim_config){.seed = 3});
    sim_model *model = sim_model_new(&scenario);
    fc_group_base *m = &model->layers[1].groups[0].core.base;
    const fc_callbacks *own = m->callbacks;
    fc_callbacks host = *own;
    fc_reduce_plan plan = {.count = 0};
    host.uses_fallback = moves;
    host.accumulate_grad = fold;
    host.to_accumulated_grad = stash;
    host.collect_grad = collect;
    m->callbacks = &host;
    assert_int_equal(fc_gradient_accumulate(m, fc_group_base_all(m)), FC_OK);
    assert_int_equal(fc_gradient_to_accumulated(m), FC_OK);
    assert_int_equal(seen.folded, 1);
    assert_int_equal(seen.stashed, 1);
    assert_int_equal(fc_gradient_collect(m, fc_group_base_all(m), false, &plan), FC_OK);
    assert_int_equal(plan.count, 0);
    assert_int_equal(fc_gradient_collect(m, fc_group_base_all(m), true, &plan), FC_OK);
    assert_int_equal(plan.count, 1); /* zeros for an unused parameter */
    seen.gradient = sim_tensor_new(FCK_FLOAT32, 1, size, values);
    assert_int_equal(fc_gradient_collect(m, fc_group_base_all(m), true, &plan), FC_OK);
    assert_int_equal(plan.count, 1);
    assert_ptr_equal(plan.grads[0], seen.gradient);
    seen.fails = true;
    assert_int_equal(fc_gradient_collect(m, fc_group_base_all(m), true, &plan), FC_ERAISED);
    fc_reduce_plan_fini(&plan);
    assert_int_equal(sim_tensor_refs(seen.gradient), 1);
    fct_tensor_release(seen.gradient);
    m->callbacks = own;
    sim_model_free(model);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fallback_of_grads_replaces_collection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
