/* Resets, and changes of a group's communication context, while a reduction is pending or has
 * failed. */
#include "core/reduction.h"

#include <stdlib.h>
#include <string.h>

#include "sim_model.h"

typedef struct fixture {
    sim_model *model;
    sim_group *group; /* of the only layer */
} fixture;

/* The test is rank 0 of two. The gradient of rank 1 is twice that of rank 0, so the mean is 1.5
 * times the gradient of rank 0. */
static const sim_scenario two_ranks = {
    .world = 2, .layers = 1, .shape_count = 1, .shapes = {{.ndim = 1, .sizes = {4}}}};

static fixture begin(sim_scenario scenario) {
    fixture f;
    scenario.device.seed = 7; /* no collective completes at once */
    sim_begin(scenario.device);
    f.model = sim_model_new(&scenario);
    f.group = &f.model->layers[1].groups[0];
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
    return f;
}

static void end(const fixture *f) {
    sim_model_free(f->model);
    sim_end();
}

static fc_group *core(const fixture *f) {
    return &f->group->core;
}

/* Runs a backward up to the layer's post-backward; every element of the gradient is 2. */
static void compute_gradient(const fixture *f) {
    sim_param *p = &f->group->params[0];
    const double values[4] = {2.0, 2.0, 2.0, 2.0};
    assert_int_equal(fc_group_unshard(core(f), core(f)->training_state, false), FC_OK);
    assert_int_equal(fc_group_wait_unshard(core(f)), FC_OK);
    core(f)->training_state = FC_PRE_BACKWARD;
    sim_grad_accumulate(p->core.unsharded, sim_tensor_new(FCK_FLOAT32, 1, p->shape.sizes, values));
}

static void finish_and_check_gradient(const fixture *f) {
    const double values[4] = {3.0, 3.0, 3.0, 3.0};
    assert_int_equal(fc_reduction_recycle(&f->model->comm, 0), FC_OK);
    const fct_tensor *grad = sim_grad_peek(f->group->params[0].sharded);
    assert_non_null(grad);
    sim_tensor_expect(grad, values, "the reduced gradient");
}

/* Gradient hooks are user code. The hook of this test resets the root during a reduction. */
static sim_model *model_to_reset;
static bool fails_after_reset;

static int set_sharded_grad_and_reset(void *owner, fct_tensor *local) {
    assert_int_equal(fc_state_reset(&model_to_reset->layers[0].core), FC_OK);
    return fails_after_reset ? -1 : sim_callbacks.set_sharded_grad(owner, local);
}

static void gradient_hook_can_reset_root(void **state) {
    (void)state;
    fc_callbacks callbacks = sim_callbacks;
    callbacks.set_sharded_grad = set_sharded_grad_and_reset;
    for (int bits = 0; bits < 8; bits++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = (bits & 1) != 0;
        scenario.shapes[0].hooked = (bits & 2) != 0;
        fixture f = begin(scenario);
        model_to_reset = f.model;
        fails_after_reset = (bits & 4) != 0;
        core(&f)->base.callbacks = &callbacks;
        compute_gradient(&f);
        fc_status status = fc_group_post_backward(core(&f));
        status = status == FC_OK ? fc_reduction_recycle(&f.model->comm, 0) : status;
        assert_int_equal(status, fails_after_reset ? FC_ERAISED : FC_OK);
        assert_int_equal(f.model->comm.reductions, 0);
        core(&f)->base.callbacks = &sim_callbacks;
        assert_int_equal(fc_state_reset(&f.model->layers[0].core), FC_OK);
        sim_model_zero_grad(f.model);
        compute_gradient(&f);
        assert_int_equal(fc_group_post_backward(core(&f)), FC_OK);
        finish_and_check_gradient(&f);
        end(&f);
    }
}

/* Pipeline stages are roots that share a communication context. */
static void reset_keeps_pending_work_of_other_root(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    fc_iteration stage;
    fc_state *other = &f.model->layers[0].core;
    fc_state **states = (fc_state **)malloc(sizeof *states);
    bool entering = false;
    fc_iteration_init(&stage);
    states[0] = other;
    fc_iteration_set_states(&stage, states, 1);
    other->iteration = &stage;
    assert_int_equal(fc_group_pre_forward(core(&f), &entering), FC_OK);
    assert_int_equal(fc_group_post_forward(core(&f)), FC_OK);
    compute_gradient(&f);
    sim_collectives_stall(true);
    assert_int_equal(fc_group_post_backward(core(&f)), FC_OK);
    assert_int_equal(fc_state_reset(other), FC_OK);
    assert_int_equal(f.model->comm.reductions, 1);
    assert_int_equal(f.model->comm.order.count, 1);
    finish_and_check_gradient(&f);
    end(&f);
    fc_iteration_fini(&stage);
}

static void set_comm_fails_while_group_is_reduced(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    fc_comm_ctx other;
    fc_comm_init(&other, sim_device());
    compute_gradient(&f);
    sim_collectives_stall(true);
    assert_int_equal(fc_group_post_backward(core(&f)), FC_OK);
    assert_int_equal(fc_group_set_comm(core(&f), &other), FC_ESTATE);
    assert_non_null(strstr(f.model->comm.error.message, "while its gradients are being reduced"));
    finish_and_check_gradient(&f);
    assert_int_equal(fc_group_set_comm(core(&f), &other), FC_OK);
    assert_ptr_equal(core(&f)->base.comm, &other);
    assert_int_equal(fc_group_set_comm(core(&f), &f.model->comm), FC_OK);
    end(&f);
    fc_comm_fini(&other);
}

/* The array of torch's numpy() uses the memory of the storage without a reference to it. If reset
 * freed the memory, the array would point to freed memory. */
static void reset_keeps_memory_shared_with_numpy_array(void **state) {
    (void)state;
    const double values[4] = {7.0, 7.0, 7.0, 7.0};
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = streams != 0;
        fixture f = begin(scenario);
        assert_int_equal(fc_group_unshard(core(&f), core(&f)->training_state, false), FC_OK);
        assert_int_equal(fc_group_wait_unshard(core(&f)), FC_OK);
        fct_tensor *flat = f.group->params[0].core.flat;
        fct_tensor_retain(flat);
        sim_tensor_share(flat);
        sim_tensor_write(flat, values, "the array");
        assert_int_equal(fc_group_reshard(core(&f)), FC_ESTATE);
        assert_int_equal(core(&f)->sharded_state, FC_UNSHARDED);
        assert_non_null(strstr(f.model->comm.error.message, "storage that is not resizable\n"));
        assert_int_equal(fc_state_reset(&f.model->layers[0].core), FC_OK);
        assert_int_equal(core(&f)->sharded_state, FC_SHARDED);
        sim_tensor_expect(flat, values, "the array");
        fct_tensor_release(flat);
        compute_gradient(&f);
        assert_int_equal(fc_group_post_backward(core(&f)), FC_OK);
        finish_and_check_gradient(&f);
        end(&f);
    }
}

/* A prefetched all-gather may start before the answers of the other ranks are read. The first
 * all-reduce waits for them. */
static void first_all_reduce_with_different_plans_fails_and_reset_drops_it(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = two_ranks;
        scenario.device.streams = streams != 0;
        scenario.world = 1;
        scenario.replicas = 2;
        fixture f = begin(scenario);
        fc_process_group_set_plan(&core(&f)->base.replicate, 7, 0);
        sim_set_plans_differ(true);
        compute_gradient(&f);
        sim_calls_clear();
        assert_int_equal(fc_group_post_backward(core(&f)), FC_ESTATE);
        assert_string_equal(f.model->comm.error.message,
                            "the model of rank 1 differs from that of rank 0");
        assert_null(strstr(sim_calls_text(), "fct_all_reduce"));
        assert_int_equal(fc_state_reset(&f.model->layers[0].core), FC_OK);
        assert_int_equal(f.model->comm.reductions, 0);
        sim_set_plans_differ(false);
        sim_model_zero_grad(f.model);
        compute_gradient(&f);
        assert_int_equal(fc_group_post_backward(core(&f)), FC_OK);
        assert_non_null(strstr(sim_calls_text(), "fct_all_reduce"));
        finish_and_check_gradient(&f);
        end(&f);
    }
}

/* An iteration is lost if autograd destroyed its end-of-backward callback without a call. */
static void iteration_is_lost_only_after_discarded_backward(void **state) {
    (void)state;
    fixture f = begin(two_ranks);
    fc_state *s = &f.model->layers[0].core;
    fc_iteration *it = s->iteration;
    assert_false(fc_iteration_is_lost(it));
    it->callback_queued = true; /* by user code, which does not update `callbacks` */
    assert_false(fc_iteration_is_lost(it));
    it->callback_counted = true;
    it->callbacks = 1;
    assert_false(fc_iteration_is_lost(it));
    it->callbacks = 0;
    assert_true(fc_iteration_is_lost(it));
    assert_int_equal(fc_state_reset(s), FC_OK);
    assert_false(fc_iteration_is_lost(it));
    it->callback_queued = true;
    assert_false(fc_iteration_is_lost(it));
    assert_int_equal(fc_iteration_end_backward(it, &f.model->comm), FC_OK);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradient_hook_can_reset_root),
        cmocka_unit_test(reset_keeps_pending_work_of_other_root),
        cmocka_unit_test(reset_keeps_memory_shared_with_numpy_array),
        cmocka_unit_test(set_comm_fails_while_group_is_reduced),
        cmocka_unit_test(first_all_reduce_with_different_plans_fails_and_reset_drops_it),
        cmocka_unit_test(iteration_is_lost_only_after_discarded_backward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
