/* A step calls a fixed number of callbacks, and the visits of state.h name the groups that a hook
 * reaches. */
#include "sim_model.h"

enum { LAYERS = 3, PARAMS = 4 };

/* Callbacks that a step without fallback must not call. */
static int finalize(void *group) {
    (void)group;
    sim_callback("finalize");
    return 0;
}

static void drop_reduce(void *group) {
    (void)group;
    sim_callback("drop_reduce");
}

static fc_callbacks callbacks;

static sim_model *begin(sim_scenario scenario) {
    scenario.layers = LAYERS;
    scenario.world = 2;
    scenario.shape_count = PARAMS;
    for (size_t i = 0; i < PARAMS; i++) {
        scenario.shapes[i] = (sim_shape){.ndim = 1, .sizes = {4}};
    }
    sim_begin(scenario.device);
    sim_model *m = sim_model_new(&scenario);
    callbacks = sim_callbacks;
    callbacks.finalize = finalize;
    callbacks.drop_reduce = drop_reduce;
    for (size_t i = 0; i < m->layer_count; i++) {
        m->layers[i].groups[0].core.base.callbacks = &callbacks;
    }
    return m;
}

static void step(sim_model *m) {
    assert_int_equal(sim_model_step(m), FC_OK);
    sim_model_optimize(m);
}

static void end(sim_model *m) {
    sim_model_free(m);
    sim_end();
}

/* Asserts the calls of a callback in a step of all groups, per parameter. */
static void assert_per_parameter(const char *name, size_t expected) {
    const size_t params = (LAYERS + 1) * PARAMS;
    assert_int_equal(sim_callbacks_of(name), expected * params);
}

static void step_calls_a_fixed_number_of_callbacks(void **state) {
    (void)state;
    for (int streams = 0; streams <= 1; streams++) {
        sim_model *m = begin((sim_scenario){.device = {.seed = 4, .streams = streams == 1}});
        step(m); /* creates the unsharded parameters */
        sim_callbacks_reset();
        step(m);
        assert_per_parameter("refresh_shard", 2); /* two gathers */
        assert_per_parameter("shard_version", 2);
        assert_per_parameter("requires_grad", 2);
        assert_per_parameter("swap", 4);
        assert_per_parameter("needs_grad_now", streams == 1 ? 0 : 1);
        assert_per_parameter("set_sharded_grad", 1);
        assert_per_parameter(NULL, streams == 1 ? 11 : 12); /* no other callback is called */
        end(m);
    }
}

static size_t visited;
static fc_group *latest;

static fc_status visit(fc_group *g) {
    visited++;
    latest = g;
    return FC_OK;
}

static void pre_backward_reaches_its_groups_and_the_prefetched_one(void **state) {
    (void)state;
    sim_model *m = begin((sim_scenario){.device = {.seed = 5}});
    assert_int_equal(sim_model_forward(m, true), FC_OK);
    visited = 0;
    assert_int_equal(fc_state_visit_pre_backward(&m->layers[LAYERS].core, visit), FC_OK);
    assert_int_equal(visited, 2);
    assert_ptr_equal(latest, &m->layers[LAYERS - 1].groups[0].core);
    visited = 0; /* nothing precedes the first layer in the post-forward order */
    assert_int_equal(fc_state_visit_pre_backward(&m->layers[1].core, visit), FC_OK);
    assert_int_equal(visited, 1);
    assert_ptr_equal(latest, &m->layers[1].groups[0].core);
    assert_int_equal(sim_model_backward(m), FC_OK);
    sim_model_optimize(m);
    end(m);
}

static fc_status visit_and_fail(fc_group *g) {
    (void)g;
    visited++;
    return FC_ESTATE;
}

static void visit_of_groups_stops_at_first_failure(void **state) {
    (void)state;
    sim_model *m = begin((sim_scenario){.device = {.seed = 6}});
    visited = 0;
    assert_int_equal(fc_iteration_visit_groups(&m->iteration, visit_and_fail), FC_ESTATE);
    assert_int_equal(visited, 1);
    assert_int_equal(fc_iteration_visit_groups(&m->iteration, visit), FC_OK);
    assert_int_equal(visited, 1 + LAYERS + 1);
    end(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(step_calls_a_fixed_number_of_callbacks),
        cmocka_unit_test(pre_backward_reaches_its_groups_and_the_prefetched_one),
        cmocka_unit_test(visit_of_groups_stops_at_first_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
