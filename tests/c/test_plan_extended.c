/* Gather plans of extended parameters, which have one slot per input of their hook. */
#include "core/plan.h"

#include "sim.h"

static const fct_device CPU = {FCT_DEVICE_CPU, -1};
static fc_error error;

/* Creates a parameter sharded on `dim` over two ranks, as on rank 1. */
static fc_param param_of(const char *name, int32_t ndim, const int64_t *sizes, int32_t dim,
                         fct_dtype compute) {
    fc_param p;
    assert_int_equal(fc_param_init(&p, NULL, ndim, sizes, dim, 2, 1, &error), FC_OK);
    p.name = name;
    p.orig_dtype = FCK_FLOAT32;
    p.param_dtype = compute;
    return p;
}

static fc_param vector(const char *name, int64_t size, fct_dtype compute) {
    return param_of(name, 1, &size, 0, compute);
}

static fc_gather_plan plan_of(fc_param *const *params, size_t count) {
    fc_gather_plan plan = {.valid = false};
    assert_int_equal(fc_gather_plan_build(&plan, params, count, 2, false, CPU, &error), FC_OK);
    return plan;
}

/* Sets two inputs: `numel` elements of `dtype`, and 2 float32. */
static void extend(fc_param *p, int64_t numel, fct_dtype dtype) {
    const int64_t two[1] = {2};
    fct_tensor *inputs[2] = {sim_tensor_new(dtype, 1, &numel, NULL),
                             sim_tensor_new(FCK_FLOAT32, 1, two, NULL)};
    p->extended = true;
    assert_int_equal(fc_extension_set_inputs(&p->extension, inputs, 2), FC_OK);
    fct_tensor_release(inputs[0]);
    fct_tensor_release(inputs[1]);
}

static void extended_parameter_has_one_slot_per_input(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 1});
    const int64_t sizes[2] = {3, 4};
    fc_param a = vector("a", 64, FCK_BFLOAT16);
    fc_param b = param_of("b", 2, sizes, 1, FCK_BFLOAT16);
    fc_param c = vector("c", 4, FCK_BFLOAT16);
    fc_param *params[3] = {&a, &b, &c};
    extend(&b, 5, FCK_UINT8);
    fc_set_min_owned_chunk_bytes(1);
    fc_gather_plan plan = plan_of(params, 3);
    fc_set_min_owned_chunk_bytes(SIM_NEVER_SPLIT);
    assert_int_equal(plan.count, 4);
    assert_true(plan.extended);
    assert_int_equal(plan.dtype, FCK_UINT8);
    assert_int_equal(plan.rank_bytes, 64 + 5 + 8 + 4);
    assert_false(fc_chunk_list_can_split(&plan.chunks));
    const size_t owners[4] = {0, 1, 1, 2};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(plan.slots[i].param, owners[i]);
        assert_int_equal(plan.slots[i].extended, owners[i] == 1);
        assert_int_equal(plan.slots[i].input, i == 2);
    }
    assert_int_equal(plan.slots[1].source, FCK_UINT8); /* inputs are never cast */
    assert_int_equal(plan.slots[1].compute, FCK_UINT8);
    assert_int_equal(plan.slots[1].outer, 1);
    assert_int_equal(plan.slots[2].offset, 64 + 5);
    assert_ptr_equal(fc_slot_input(&plan, &plan.slots[2], params), b.extension.inputs[1].tensor);
    /* An input of the shard's size has the shard's layout, sharded on dim 1. */
    extend(&b, 6, FCK_BFLOAT16);
    assert_false(fc_gather_plan_fits(&plan, params, 3));
    assert_int_equal(fc_gather_plan_build(&plan, params, 3, 2, false, CPU, &error), FC_OK);
    assert_int_equal(plan.slots[1].outer, 3);
    fc_gather_plan_fini(&plan);
    for (size_t i = 0; i < 3; i++) {
        fc_param_fini(params[i]);
    }
    sim_end();
}

static void plan_fits_only_inputs_that_it_was_built_for(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 1});
    fc_param a = vector("a", 4, FCT_NO_DTYPE);
    fc_param *params[1] = {&a};
    extend(&a, 5, FCK_UINT8);
    fc_gather_plan plan = plan_of(params, 1);
    fc_extension_drop_inputs(&a.extension);
    assert_true(fc_gather_plan_fits(&plan, params, 1));
    extend(&a, 5, FCK_UINT8);
    assert_true(fc_gather_plan_fits(&plan, params, 1));
    extend(&a, 6, FCK_UINT8);
    assert_false(fc_gather_plan_fits(&plan, params, 1));
    extend(&a, 5, FCK_FLOAT64);
    assert_false(fc_gather_plan_fits(&plan, params, 1));
    assert_int_equal(fc_gather_plan_check(&plan, params, 1, &error), FC_ESTATE);
    assert_int_equal(fc_extension_set_inputs(&a.extension, NULL, 0), FC_OK);
    assert_false(fc_gather_plan_fits(&plan, params, 1));
    assert_int_equal(fc_gather_plan_build(&plan, params, 1, 2, false, CPU, &error), FC_OK);
    assert_int_equal(plan.rank_bytes, 0);
    a.extended = false;
    assert_false(fc_gather_plan_fits(&plan, params, 1));
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(extended_parameter_has_one_slot_per_input),
        cmocka_unit_test(plan_fits_only_inputs_that_it_was_built_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
