/* Invariants between transitions, and the messages of fc_group_check for violations.
 * tests/unit/test_mutations.py seeds bugs that the checks detect. */
#include "core/group.h"

#include <string.h>

#include "sim_model.h"

typedef struct fixture {
    sim_model *model;
    sim_group *group; /* of the first layer after the root */
    fc_group *core;
} fixture;

static const sim_scenario plain = {
    .world = 2, .layers = 2, .shape_count = 1, .shapes = {{.ndim = 1, .sizes = {4}}}};

static fixture begin(sim_scenario scenario) {
    fixture f;
    sim_begin((sim_config){.seed = 7});
    f.model = sim_model_new(&scenario);
    f.group = &f.model->layers[1].groups[0];
    f.core = &f.group->core;
    return f;
}

static void end(const fixture *f) {
    sim_model_check(f->model, "at the end");
    sim_model_free(f->model);
    sim_end();
}

static void unshard(const fixture *f) {
    assert_int_equal(fc_group_unshard(f->core, f->core->training_state, false), FC_OK);
    assert_int_equal(fc_group_wait_unshard(f->core), FC_OK);
}

static void changed_compute_dtype_rebuilds_plan(void **state) {
    (void)state;
    fixture f = begin(plain);
    unshard(&f);
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    f.group->params[0].core.param_dtype = FCK_BFLOAT16;
    f.group->params[0].shape.compute = FCK_BFLOAT16; /* the other ranks send this dtype, too */
    fc_param_release_unsharded(&f.group->params[0].core);
    fc_group_invalidate(f.core);
    unshard(&f);
    sim_tensor_expect(f.group->params[0].core.unsharded, f.group->params[0].full, "unsharded");
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    assert_int_equal(f.core->sharded_state, FC_SHARDED);
    end(&f);
}

static void group_check_reports_broken_invariants(void **state) {
    (void)state;
    fixture f = begin(plain);
    unshard(&f);
    fct_storage_free(f.group->params[0].core.flat);
    assert_int_equal(fc_group_check(f.core), FC_ESTATE);
    assert_non_null(strstr(f.model->comm.error.message, "parameter 0 holds 0 bytes"));
    f.core->gather.pending.active = true;
    assert_int_equal(fc_group_check(f.core), FC_ESTATE);
    assert_non_null(strstr(f.model->comm.error.message, "a gather is in flight"));
    f.core->gather.pending.active = false;
    assert_int_equal(fc_group_reset(f.core), FC_OK);
    assert_int_equal(fc_group_check(f.core), FC_OK);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(changed_compute_dtype_rebuilds_plan),
        cmocka_unit_test(group_check_reports_broken_invariants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
