/* One parameter: requirements on its shard, memory of its unsharded tensor, and its partial
 * gradients. */
#include "core/param.h"

#include <string.h>

#include "sim.h"

static const int64_t five_by_two[2] = {5, 2};

/* Creates the parameter on `rank`. Of two ranks, each has 3 rows (rank 1 has padding); a single
 * rank has all 5 rows. */
static fc_param begin(int64_t world, int64_t rank) {
    fc_param p;
    fc_error err = {""};
    double values[10];
    sim_begin((sim_config){.seed = 1});
    for (int i = 0; i < 10; i++) {
        values[i] = i;
    }
    assert_int_equal(fc_param_init(&p, NULL, 2, five_by_two, 0, world, rank, &err), FC_OK);
    p.name = "weight";
    p.orig_dtype = FCK_FLOAT32;
    fct_tensor *data = sim_tensor_new(FCK_FLOAT32, 1, &p.layout.padded_numel, values);
    fc_param_set_sharded_data(&p, data);
    fct_tensor_release(data);
    return p;
}

static void end(fc_param *p) {
    fc_param_fini(p);
    sim_end();
}

static void param_init_sets_local_sizes_and_flat_numel(void **state) {
    (void)state;
    fc_param p = begin(2, 1);
    assert_int_equal(p.local_sizes[0], 2);
    assert_int_equal(p.local_sizes[1], 2);
    assert_int_equal(p.strides[0], 2);
    assert_int_equal(p.flat_numel, 12);
    assert_int_equal(fc_param_compute_dtype(&p), FCK_FLOAT32);
    p.param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_param_compute_dtype(&p), FCK_BFLOAT16);
    end(&p);
}

static void invalid_shard_is_refused_with_parameter_name(void **state) {
    (void)state;
    fc_param p = begin(2, 0);
    fc_error err = {""};
    fct_facts facts;
    const int64_t four[1] = {4};
    assert_int_equal(fc_param_shard_facts(&p, false, &facts, &err), FC_OK);
    assert_int_equal(facts.numel, 6);
    p.orig_dtype = FCK_FLOAT64;
    assert_int_equal(fc_param_shard_facts(&p, false, &facts, &err), FC_EASSERT);
    assert_non_null(strstr(err.message, "the shard of parameter 'weight' changed its dtype"));
    p.orig_dtype = FCK_FLOAT32;
    fct_tensor *small = sim_tensor_new(FCK_FLOAT32, 1, four, (const double[4]){0});
    fc_param_set_sharded_data(&p, small);
    fct_tensor_release(small);
    assert_int_equal(fc_param_shard_facts(&p, false, &facts, &err), FC_EASSERT);
    fc_param_set_sharded_data(&p, NULL);
    assert_int_equal(fc_param_shard_facts(&p, false, &facts, &err), FC_ESTATE);
    end(&p);
}

static void flat_tensor_is_kept_when_its_memory_is_freed(void **state) {
    (void)state;
    fc_param p = begin(2, 0);
    fc_error err = {""};
    fct_facts facts;
    for (int i = 0; i < 2; i++) {
        const fct_tensor *before = p.flat;
        assert_int_equal(fc_param_alloc_flat(&p, sim_device(), &err), FC_OK);
        assert_true(before == NULL || p.flat == before);
        fct_tensor_facts(p.flat, &facts);
        assert_int_equal(facts.storage_bytes, 12 * 4);
        assert_true(sim_tensor_has_memory(p.flat));
        fc_param_free(&p);
        assert_false(sim_tensor_has_memory(p.flat));
    }
    end(&p);
}

static void flat_aliases_shard_on_one_rank(void **state) {
    (void)state;
    fc_param p = begin(1, 0);
    fc_error err = {""};
    bool can_alias = false;
    assert_int_equal(fc_param_can_alias(&p, sim_device(), &can_alias, &err), FC_OK);
    assert_true(can_alias);
    assert_int_equal(fc_param_alias_flat(&p), FC_OK);
    fc_param_free(&p); /* the shard's memory must not be freed */
    assert_true(sim_tensor_has_memory(p.sharded_data));
    p.param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_param_can_alias(&p, sim_device(), &can_alias, &err), FC_OK);
    assert_false(can_alias);
    end(&p);
}

static void drop_grad_clears_unsharded_accumulated_and_partial_gradient(void **state) {
    (void)state;
    fc_param p = begin(2, 0);
    fct_tensor *gradient = sim_tensor_new(FCK_FLOAT32, 2, five_by_two, (const double[10]){0});
    fct_tensor *leaf = sim_tensor_new(FCK_FLOAT32, 2, five_by_two, (const double[10]){0});
    fct_tensor *taken = NULL;
    fct_tensor_retain(gradient);
    sim_grad_accumulate(leaf, gradient);
    fc_param_set_unsharded(&p, leaf);
    fc_param_set_accumulated(&p, gradient);
    fc_param_set_partial(&p, gradient);
    fc_param_take_grad(&p, &taken);
    assert_ptr_equal(taken, gradient); /* the accumulated gradient is taken first */
    assert_true(fct_grad_has(leaf));
    fc_param_set_accumulated(&p, taken);
    fct_tensor_release(taken);
    fc_param_drop_grad(&p);
    assert_null(p.accumulated);
    assert_null(p.partial);
    assert_false(fct_grad_has(leaf));
    fct_tensor_release(gradient);
    fct_tensor_release(leaf);
    end(&p);
}

static void gradient_of_replaced_leaf_is_kept_as_partial_gradient(void **state) {
    (void)state;
    fc_param p = begin(1, 0);
    for (int step = 1; step <= 2; step++) { /* the second gradient is added to the first */
        const double values[10] = {step, step, step, step, step, step, step, step, step, step};
        fct_tensor *leaf = sim_tensor_new(FCK_FLOAT32, 2, five_by_two, values);
        fct_tensor *gradient = sim_tensor_new(FCK_FLOAT32, 2, five_by_two, values);
        fct_tensor *shard = sim_tensor_new(FCK_FLOAT32, 1, &p.layout.padded_numel, values);
        sim_grad_accumulate(leaf, gradient); /* takes the gradient */
        fc_param_set_unsharded(&p, leaf);
        fc_param_set_sharded_data(&p, shard);
        assert_int_equal(fc_param_alias_flat(&p), FC_OK);
        assert_null(p.unsharded);
        assert_non_null(p.accumulated);
        fct_tensor_release(shard);
        fct_tensor_release(leaf);
    }
    const double sum[10] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
    sim_tensor_expect(p.accumulated, sum, "a gradient");
    end(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(param_init_sets_local_sizes_and_flat_numel),
        cmocka_unit_test(invalid_shard_is_refused_with_parameter_name),
        cmocka_unit_test(flat_tensor_is_kept_when_its_memory_is_freed),
        cmocka_unit_test(flat_aliases_shard_on_one_rank),
        cmocka_unit_test(drop_grad_clears_unsharded_accumulated_and_partial_gradient),
        cmocka_unit_test(gradient_of_replaced_leaf_is_kept_as_partial_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
