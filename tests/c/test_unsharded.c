/* Unsharded parameters of a group: memory, parameter objects over it, and requires_grad. The tests
 * call core/unsharded.h directly, without steps of the group. */
#include "core/unsharded.h"

#include <string.h>

#include "sim_model.h"

static sim_model *model;
static sim_group *group;
static fc_group_base *base;
static fc_gather_plan plan;

/* The last of `world` ranks: a matrix of 5 rows and a vector. */
static void begin(int64_t world) {
    sim_scenario s = {.world = world, .rank = world - 1, .layers = 1, .shape_count = 2};
    s.shapes[0] = (sim_shape){.ndim = 2, .sizes = {5, 3}};
    s.shapes[1] = (sim_shape){.ndim = 1, .sizes = {4}};
    s.device = (sim_config){.seed = 3};
    sim_begin(s.device);
    model = sim_model_new(&s);
    group = &model->layers[1].groups[0];
    base = &group->core.base;
    assert_int_equal(fc_gather_plan_build(&plan, base->params, base->count, world, false,
                                          base->device, &model->comm.error),
                     FC_OK);
}

static void end(void) {
    fc_gather_plan_fini(&plan);
    sim_model_free(model);
    sim_end();
}

static void unsharded_memory_exists_between_alloc_and_free(void **state) {
    (void)state;
    begin(2);
    const size_t before = sim_live_bytes();
    assert_int_equal(fc_unsharded_check(base, false, false), FC_OK);
    assert_int_equal(fc_unsharded_check(base, true, false), FC_ESTATE);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(fc_unsharded_alloc(base, &plan, NULL), FC_OK);
        assert_int_equal(sim_live_bytes() - before, (2 * 9 + 2 * 2) * 4); /* padded */
        assert_int_equal(fc_unsharded_check(base, true, false), FC_OK);
        assert_int_equal(fc_unsharded_check(base, false, true), FC_OK);
        assert_int_equal(fc_unsharded_check(base, false, false), FC_ESTATE);
        fc_unsharded_free(base);
        assert_int_equal(sim_live_bytes(), before);
    }
    end();
}

static void unsharded_adopt_requires_memory_of_every_parameter(void **state) {
    (void)state;
    begin(2);
    assert_int_equal(fc_unsharded_adopt(base), FC_ESTATE);
    assert_string_equal(model->comm.error.message, "parameter '0.0' was not gathered");
    assert_int_equal(fc_unsharded_alloc(base, &plan, NULL), FC_OK);
    fc_param_free(base->params[1]);
    assert_int_equal(fc_unsharded_adopt(base), FC_ESTATE);
    assert_string_equal(model->comm.error.message, "parameter '0.1' was not gathered");
    fc_unsharded_free(base);
    assert_int_equal(fc_unsharded_alloc(base, &plan, NULL), FC_OK);
    assert_int_equal(fc_unsharded_adopt(base), FC_OK);
    assert_ptr_equal(base->params[0]->unsharded, group->params[0].unsharded);
    fc_unsharded_free(base);
    assert_int_equal(fc_unsharded_adopt(base), FC_ESTATE);
    end();
}

static void copy_requires_grad_freezes_shard_of_parameter_that_the_user_froze(void **state) {
    (void)state;
    begin(2);
    fc_param *p = base->params[0];
    assert_int_equal(fc_unsharded_alloc(base, &plan, NULL), FC_OK);
    assert_int_equal(fc_unsharded_make(base, false), FC_OK);
    assert_true(fct_tensor_requires_grad(p->unsharded));
    assert_int_equal(fct_tensor_set_requires_grad(p->unsharded, false), 0);
    assert_int_equal(fc_unsharded_copy_requires_grad(base), FC_OK);
    assert_false(fct_tensor_requires_grad(group->params[0].sharded));
    assert_true(fct_tensor_requires_grad(group->params[1].sharded));
    assert_int_equal(fc_unsharded_make(base, false), FC_OK);
    assert_false(fct_tensor_requires_grad(p->unsharded));
    fc_unsharded_free(base);
    end();
}

static void unsharded_alias_on_one_rank_shares_shards(void **state) {
    (void)state;
    begin(1);
    const size_t before = sim_live_bytes();
    bool all = false;
    assert_int_equal(fc_unsharded_alias(base, &all), FC_OK);
    assert_true(all);
    assert_int_equal(sim_live_bytes(), before);
    fc_unsharded_free(base); /* must not free the shards */
    assert_true(sim_tensor_has_memory(base->params[0]->flat));
    base->params[1]->param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_unsharded_alias(base, &all), FC_OK);
    assert_false(all);
    end();
}

static void unsharded_alias_requires_one_rank_without_fallback_and_cast(void **state) {
    (void)state;
    bool can = true;
    begin(2);
    assert_int_equal(fc_unsharded_can_alias(base, &can), FC_OK);
    assert_false(can);
    end();
    begin(1);
    assert_int_equal(fc_unsharded_can_alias(base, &can), FC_OK);
    assert_true(can);
    base->fallbacks = FC_FALLBACK_GATHER;
    assert_int_equal(fc_unsharded_can_alias(base, &can), FC_OK);
    assert_false(can);
    base->fallbacks = 0;
    base->params[1]->param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_unsharded_can_alias(base, &can), FC_OK);
    assert_false(can);
    assert_null(base->params[0]->flat);
    end();
}

static void check_leaves_detects_changed_shards_of_aliases(void **state) {
    (void)state;
    const double zeros[15] = {0};
    begin(1);
    fct_tensor *shard = base->params[0]->sharded_data;
    bool all = false;
    assert_int_equal(fc_unsharded_alias(base, &all), FC_OK);
    assert_true(all);
    assert_int_equal(fc_unsharded_check_leaves(base), FC_OK);
    sim_tensor_write(shard, zeros, "optimizer step");
    fct_tensor_bump(shard);
    assert_int_equal(fc_unsharded_check_leaves(base), FC_ESTATE);
    assert_non_null(strstr(model->comm.error.message, "parameter '0.0' was changed in place"));
    assert_int_equal(fc_unsharded_alias(base, &all), FC_OK);
    assert_int_equal(fc_unsharded_check_leaves(base), FC_OK);
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unsharded_memory_exists_between_alloc_and_free),
        cmocka_unit_test(unsharded_adopt_requires_memory_of_every_parameter),
        cmocka_unit_test(copy_requires_grad_freezes_shard_of_parameter_that_the_user_froze),
        cmocka_unit_test(unsharded_alias_on_one_rank_shares_shards),
        cmocka_unit_test(unsharded_alias_requires_one_rank_without_fallback_and_cast),
        cmocka_unit_test(check_leaves_detects_changed_shards_of_aliases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
