/* State machine of the parameter group, one transition at a time: registration, memory and pending
 * work before and after each. */
#include "core/group.h"

#include <string.h>

#include "sim_model.h"

typedef struct fixture {
    sim_model *model;
    sim_group *group; /* of the first layer after the root */
    fc_group *core;
} fixture;

static const sim_scenario plain = {
    .world = 2, .shape_count = 1, .shapes = {{.ndim = 1, .sizes = {4}}}};

static fixture begin(sim_scenario scenario) {
    fixture f;
    scenario.layers = 2;
    scenario.device.seed = 7;
    sim_begin(scenario.device);
    f.model = sim_model_new(&scenario);
    f.group = &f.model->layers[1].groups[0];
    f.core = &f.group->core;
    assert_int_equal(fc_comm_init_streams(&f.model->comm), FC_OK);
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

static void expect_state(const fixture *f, fc_sharded_state state, bool gathering) {
    assert_int_equal(f->core->sharded_state, state);
    assert_int_equal(f->core->gather.pending.active, gathering);
    sim_model_check(f->model, "after a transition");
}

static size_t count_gathers(void) {
    size_t count = 0;
    for (const char *at = sim_log_text(); (at = strstr(at, "gather:")) != NULL; at++) {
        count++;
    }
    return count;
}

static void expect_values(const fixture *f, double offset) {
    double values[4];
    for (int i = 0; i < 4; i++) {
        values[i] = f->group->params[0].full[i] + offset;
    }
    sim_tensor_expect(f->group->params[0].core.unsharded, values, "the unsharded parameter");
}

/* An optimizer step on all ranks: every element grows by 1. */
static void write_shards(const fixture *f) {
    sim_param *p = &f->group->params[0];
    double values[2];
    for (int i = 0; i < 4; i++) {
        p->full[i] += 1.0;
    }
    sim_shard_values(p, p->full, 0, 2, f->model->scenario.rank, values);
    sim_tensor_write(p->core.sharded_data, values, "an optimizer's write");
}

/* ---- sharded state ---- */

static void unshard_starts_gather_and_wait_registers_unsharded_parameters(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = plain;
        scenario.device.streams = streams != 0;
        fixture f = begin(scenario);
        expect_state(&f, FC_SHARDED, false);
        assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
        expect_state(&f, FC_SHARDED, true);
        assert_int_equal(fc_group_wait_unshard(f.core), FC_OK);
        expect_state(&f, FC_UNSHARDED, false);
        expect_values(&f, 0.0);
        assert_int_equal(fc_group_reshard(f.core), FC_OK);
        expect_state(&f, FC_SHARDED, false);
        end(&f);
    }
}

/* Replaces the shard by another tensor, as a user may do, with values that are larger by 1. */
static void replace_shard(const fixture *f) {
    const int64_t size[1] = {2};
    double values[2];
    sim_param *p = &f->group->params[0];
    for (int i = 0; i < 4; i++) {
        p->full[i] += 1.0;
    }
    sim_shard_values(p, p->full, 0, 2, f->model->scenario.rank, values);
    p->replacement = sim_tensor_new(FCK_FLOAT32, 1, size, values);
}

static void replaced_shard_is_gathered_at_next_unshard(void **state) {
    (void)state;
    fixture f = begin(plain);
    replace_shard(&f);
    unshard(&f);
    expect_values(&f, 0.0);
    replace_shard(&f); /* while unsharded, as after an evaluation */
    f.core->training_state = FC_FORWARD;
    unshard(&f);
    expect_values(&f, 0.0);
    assert_int_equal(count_gathers(), 2);
    f.core->training_state = FC_IDLE;
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    end(&f);
}

static void transition_to_current_state_does_nothing(void **state) {
    (void)state;
    fixture f = begin(plain);
    assert_int_equal(fc_group_wait_unshard(f.core), FC_OK);
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    expect_state(&f, FC_SHARDED, false);
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_int_equal(count_gathers(), 1);
    assert_int_equal(fc_group_wait_unshard(f.core), FC_OK);
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_int_equal(count_gathers(), 1);
    expect_state(&f, FC_UNSHARDED, false);
    end(&f);
}

static void unshard_on_one_rank_issues_no_collective(void **state) {
    (void)state;
    sim_scenario scenario = plain;
    scenario.world = 1;
    fixture f = begin(scenario);
    unshard(&f);
    assert_int_equal(count_gathers(), 0);
    expect_state(&f, FC_UNSHARDED, false);
    expect_values(&f, 0.0);
    end(&f);
}

/* Autograd references the unsharded parameter between forward and backward. */
static void one_rank_keeps_autograd_leaves_if_some_parameter_cannot_alias(void **state) {
    (void)state;
    static const sim_shape others[] = {{.ndim = 1, .sizes = {0}},
                                       {.ndim = 1, .sizes = {4}, .compute = FCK_BFLOAT16}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        sim_scenario scenario = plain;
        scenario.world = 1;
        scenario.shape_count = 2;
        scenario.shapes[1] = others[i];
        fixture f = begin(scenario);
        unshard(&f);
        const fct_tensor *leaf = f.group->params[0].core.unsharded;
        assert_int_equal(fc_group_reshard(f.core), FC_OK);
        unshard(&f);
        assert_ptr_equal(f.group->params[0].core.unsharded, leaf);
        assert_false(f.group->params[0].core.aliased);
        expect_values(&f, 0.0);
        end(&f);
    }
}

static void group_of_one_rank_aliases_shards_if_all_parameters_can(void **state) {
    (void)state;
    sim_scenario scenario = plain;
    scenario.world = 1;
    scenario.shape_count = 2;
    scenario.shapes[1] = scenario.shapes[0];
    fixture f = begin(scenario);
    for (int i = 0; i < 2; i++) {
        unshard(&f);
        for (size_t j = 0; j < 2; j++) {
            fct_facts shard, unsharded;
            fct_tensor_facts(f.group->params[j].core.sharded_data, &shard);
            fct_tensor_facts(f.group->params[j].core.unsharded, &unsharded);
            assert_ptr_equal(unsharded.data, shard.data);
        }
        assert_int_equal(fc_group_reshard(f.core), FC_OK);
    }
    end(&f);
}

/* The parameter follows a single two-byte element, where CUDA's kernel cannot convert to
 * float32. */
static void parameter_is_cast_at_any_offset_in_rank_shard(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = plain;
        scenario.device.streams = streams != 0;
        scenario.shape_count = 3;
        scenario.shapes[1] = (sim_shape){.ndim = 1, .sizes = {2}, .compute = FCK_BFLOAT16};
        scenario.shapes[2] =
            (sim_shape){.ndim = 1, .sizes = {6}, .dtype = FCK_BFLOAT16, .compute = FCK_FLOAT32};
        fixture f = begin(scenario);
        for (int i = 0; i < 2; i++) {
            unshard(&f);
            for (size_t j = 0; j < 3; j++) {
                const sim_param *p = &f.group->params[j];
                sim_tensor_expect(p->core.unsharded, p->full, p->name);
            }
            assert_int_equal(fc_group_reshard(f.core), FC_OK);
        }
        end(&f);
    }
}

static void reshard_in_forward_is_skipped_without_reshard_after_forward(void **state) {
    (void)state;
    sim_scenario scenario = plain;
    scenario.no_reshard_after_forward = true;
    fixture f = begin(scenario);
    unshard(&f);
    f.core->training_state = FC_FORWARD;
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    expect_state(&f, FC_UNSHARDED, false);
    f.core->training_state = FC_POST_BACKWARD;
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    expect_state(&f, FC_SHARDED, false);
    end(&f);
}

static fixture begin_and_reshard_to_smaller_group(void) {
    sim_scenario scenario = plain;
    scenario.world = 4;
    scenario.rank = 3;
    scenario.post_forward_world = 2;
    fixture f = begin(scenario);
    unshard(&f);
    f.core->training_state = FC_FORWARD;
    assert_int_equal(fc_group_reshard(f.core), FC_OK);
    expect_state(&f, FC_SHARDED_POST_FORWARD, false);
    sim_log_clear();
    return f;
}

static void reshard_in_forward_uses_smaller_group_if_set(void **state) {
    (void)state;
    fixture f = begin_and_reshard_to_smaller_group();
    assert_non_null(f.group->params[0].core.post_forward_data);
    f.core->training_state = FC_PRE_BACKWARD;
    unshard(&f);
    assert_string_equal(sim_log_text(), "gather:0.forward");
    expect_state(&f, FC_UNSHARDED, false);
    expect_values(&f, 0.0);
    assert_null(f.group->params[0].core.post_forward_data);
    assert_null(f.group->params[0].post_forward); /* the callback has released its reference */
    end(&f);
}

/* The backward gathers post-forward shards, which are older than the write. */
static void forward_gathers_shards_that_were_written_before_backward(void **state) {
    (void)state;
    fixture f = begin_and_reshard_to_smaller_group();
    fct_tensor_bump(f.group->params[0].core.sharded_data);
    f.core->training_state = FC_PRE_BACKWARD;
    unshard(&f);
    assert_int_equal(fc_group_unshard(f.core, FC_FORWARD, false), FC_OK);
    expect_state(&f, FC_SHARDED, true);
    end(&f);
}

static void unshard_between_steps_gathers_written_shards_again(void **state) {
    (void)state;
    fixture f = begin(plain);
    unshard(&f);
    write_shards(&f);
    unshard(&f);
    assert_int_equal(count_gathers(), 2);
    expect_values(&f, 0.0); /* write_shards() has updated the expected values */
    end(&f);
}

static void unshard_discards_prefetch_if_shards_were_written_since(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_scenario scenario = plain;
        scenario.device.streams = streams != 0;
        fixture f = begin(scenario);
        fc_state *root = &f.model->layers[0].core;
        assert_int_equal(fc_state_begin_iteration(root, true), FC_OK);
        assert_int_equal(fc_group_prefetch(f.core, FC_FORWARD), FC_OK);
        assert_int_equal(fc_state_end_forward(root), FC_OK);
        expect_state(&f, FC_SHARDED, true);
        assert_int_equal(fc_comm_quiesce(&f.model->comm), FC_OK); /* ends the prefetch's reads */
        write_shards(&f);
        assert_int_equal(fc_state_begin_iteration(root, true), FC_OK);
        f.core->training_state = FC_FORWARD;
        unshard(&f);
        assert_int_equal(fc_state_end_forward(root), FC_OK);
        assert_int_equal(count_gathers(), 2);
        expect_values(&f, 0.0);
        end(&f);
    }
}

/* The address difference of the two shards equals the difference of their version counters. */
static void shard_version_differs_for_equal_sums_of_address_and_writes(void **state) {
    (void)state;
    fixture f = begin(plain);
    fc_param *p = &f.group->params[0].core;
    const int64_t size = 2;
    fct_tensor *other = sim_tensor_new(FCK_FLOAT32, 1, &size, f.group->params[0].full);
    fct_tensor *low = (uintptr_t)other < (uintptr_t)p->sharded_data ? other : p->sharded_data;
    fct_tensor *high = low == other ? p->sharded_data : other;
    uintptr_t distance = (uintptr_t)high - (uintptr_t)low;
    fct_tensor_retain(low);
    fct_tensor_retain(high);
    fc_param_set_sharded_data(p, high);
    unshard(&f);
    while (fct_tensor_version(low) < fct_tensor_version(high) + distance) {
        fct_tensor_bump(low);
    }
    fc_param_set_sharded_data(p, low);
    unshard(&f);
    assert_int_equal(count_gathers(), 2);
    fct_tensor_release(low);
    fct_tensor_release(high);
    fct_tensor_release(other);
    end(&f);
}

static void unshard_in_backward_keeps_parameters_of_forward(void **state) {
    (void)state;
    fixture f = begin(plain);
    unshard(&f);
    write_shards(&f);
    f.core->training_state = FC_PRE_BACKWARD;
    unshard(&f);
    assert_int_equal(count_gathers(), 1);
    expect_values(&f, -1.0);
    end(&f);
}

static void expect_frozen(fixture *f, const sim_param *p) {
    assert_int_equal(fc_group_to_sharded(f->core), FC_OK);
    assert_false(fct_tensor_requires_grad(p->sharded));
    unshard(f);
    assert_false(fct_tensor_requires_grad(p->core.unsharded));
}

static void freezing_unsharded_parameter_freezes_sharded_parameter(void **state) {
    (void)state;
    fixture f = begin(plain);
    sim_param *p = &f.group->params[0];
    unshard(&f);
    assert_int_equal(fct_tensor_set_requires_grad(p->core.unsharded, false), 0);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_group_to_sharded(f.core), FC_ERAISED);
    sim_fault_arm(0, SIM_ONCE);
    sim_discard_error();
    expect_state(&f, FC_UNSHARDED, false);
    expect_frozen(&f, p);
    end(&f);
}

static void freezing_sharded_parameter_while_unsharded_freezes_both(void **state) {
    (void)state;
    fixture f = begin(plain);
    sim_param *p = &f.group->params[0];
    unshard(&f);
    assert_int_equal(fct_tensor_set_requires_grad(p->sharded, false), 0);
    expect_frozen(&f, p);
    end(&f);
}

static void to_unsharded_registers_memory_filled_by_caller(void **state) {
    (void)state;
    fixture f = begin(plain);
    sim_param *p = &f.group->params[0];
    assert_int_equal(fc_group_to_unsharded(f.core), FC_ESTATE);
    expect_state(&f, FC_SHARDED, false);
    assert_int_equal(fc_param_alloc_flat(&p->core, f.core->base.device, NULL), FC_OK);
    sim_tensor_write(p->core.flat, p->full, "the flat tensor");
    assert_int_equal(fc_group_to_unsharded(f.core), FC_OK);
    expect_state(&f, FC_UNSHARDED, false);
    expect_values(&f, 0.0);
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_int_equal(count_gathers(), 0);                                  /* the data is current */
    assert_int_equal(fc_group_to_sharded_post_forward(f.core), FC_ESTATE); /* no smaller group */
    expect_state(&f, FC_UNSHARDED, false);
    end(&f);
}

static void unshard_in_backward_disabled_starts_no_gather(void **state) {
    (void)state;
    fixture f = begin(plain);
    f.core->settings.unshard_in_backward = false;
    f.core->training_state = FC_PRE_BACKWARD;
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    expect_state(&f, FC_SHARDED, false);
    f.core->training_state = FC_IDLE;
    unshard(&f);
    expect_state(&f, FC_UNSHARDED, false);
    end(&f);
}

/* ---- failures ---- */

/* Without this check a kernel would read an address that is invalid on its device. */
static void unshard_of_shard_on_other_device_fails(void **state) {
    (void)state;
    for (int64_t world = 1; world <= 2; world++) {
        sim_scenario scenario = plain;
        scenario.device.streams = true;
        scenario.world = world;
        fixture f = begin(scenario);
        const fct_device cpu = {.type = FCT_DEVICE_CPU, .index = -1};
        sim_tensor_relocate(f.group->params[0].core.sharded_data, cpu);
        fc_status status = fc_group_unshard(f.core, f.core->training_state, false);
        status = status == FC_OK ? fc_group_wait_unshard(f.core) : status;
        assert_int_equal(status, FC_EASSERT);
        assert_non_null(strstr(f.model->comm.error.message,
                               "parameter '0.0' is not on its group's device any more"));
        sim_tensor_relocate(f.group->params[0].core.sharded_data, sim_device());
        unshard(&f);
        expect_state(&f, FC_UNSHARDED, false);
        expect_values(&f, 0.0);
        end(&f);
    }
}

static void failed_wait_unshard_can_be_repeated_without_new_gather(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        for (int64_t n = 1;; n++) {
            sim_scenario scenario = plain;
            scenario.device.streams = streams != 0;
            fixture f = begin(scenario);
            assert_int_equal(fc_state_begin_iteration(&f.model->layers[0].core, true), FC_OK);
            f.core->training_state = FC_FORWARD;
            assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
            sim_fault_arm(n, SIM_ONCE);
            fc_status status = fc_group_wait_unshard(f.core);
            sim_fault_arm(0, SIM_ONCE);
            if (status != FC_OK) {
                expect_state(&f, FC_SHARDED, true);
                sim_discard_error();
                assert_int_equal(fc_group_wait_unshard(f.core), FC_OK);
            }
            assert_int_equal(count_gathers(), 1);
            expect_state(&f, FC_UNSHARDED, false);
            expect_values(&f, 0.0);
            end(&f);
            if (status == FC_OK) {
                assert_true(n > 4);
                break;
            }
        }
    }
}

static void transition_after_failed_rollback_repairs_registration_first(void **state) {
    (void)state;
    sim_scenario scenario = plain;
    scenario.shapes[0].tied = true; /* the swap fails between two modules */
    fixture f = begin(scenario);
    sim_param *p = &f.group->params[0];
    unshard(&f);
    sim_fault_arm(2, SIM_CALLBACKS_AFTER);
    assert_int_equal(fc_group_to_sharded(f.core), FC_ERAISED);
    assert_true(f.core->registration_dirty);
    assert_int_equal(f.core->sharded_state, FC_UNSHARDED);
    assert_int_equal(p->registered[0], FC_SHARDED);
    assert_int_equal(p->registered[1], FC_UNSHARDED);
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false),
                     FC_ERAISED); /* the repair fails again */
    sim_fault_arm(0, SIM_ONCE);
    sim_discard_error();
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_false(f.core->registration_dirty);
    assert_int_equal(p->registered[0], FC_UNSHARDED);
    assert_int_equal(count_gathers(), 1);
    end(&f);
}

static void reset_abandons_pending_gather_and_reshards(void **state) {
    (void)state;
    fixture f = begin(plain);
    sim_collectives_stall(true);
    f.core->training_state = FC_PRE_BACKWARD;
    assert_int_equal(fc_group_unshard(f.core, f.core->training_state, false), FC_OK);
    assert_int_equal(fc_group_reset(f.core), FC_OK);
    expect_state(&f, FC_SHARDED, false);
    assert_int_equal(f.core->training_state, FC_IDLE);
    assert_non_null(f.model->comm.deferred);
    assert_int_equal(fc_group_reset(f.core), FC_OK); /* a reset can be repeated */
    unshard(&f);
    assert_int_equal(fc_group_reset(f.core), FC_OK);
    expect_state(&f, FC_SHARDED, false);
    end(&f);
}

/* ---- training state ---- */

static void pre_forward_reports_entering_only_for_first_module(void **state) {
    (void)state;
    fixture f = begin(plain);
    bool entering = false;
    assert_int_equal(fc_group_pre_forward(f.core, &entering), FC_OK);
    assert_true(entering);
    assert_int_equal(fc_group_pre_forward(f.core, &entering), FC_OK);
    assert_false(entering);
    assert_int_equal(f.core->training_state, FC_FORWARD);
    assert_int_equal(fc_group_post_forward(f.core), FC_OK);
    assert_int_equal(f.core->training_state, FC_IDLE);
    assert_int_equal(f.model->comm.order.count, 1);
    expect_state(&f, FC_SHARDED, false);
    end(&f);
}

static void forward_inside_backward_is_not_in_post_forward_order(void **state) {
    (void)state;
    fixture f = begin(plain);
    bool entering = false;
    sim_set_in_backward(true);
    assert_int_equal(fc_group_pre_forward(f.core, &entering), FC_OK);
    assert_int_equal(fc_group_post_forward(f.core), FC_OK);
    assert_int_equal(f.model->comm.order.count, 0);
    expect_state(&f, FC_UNSHARDED, false);
    sim_set_in_backward(false);
    end(&f);
}

/* Runs the forwards of two groups and clears the log. Returns the second group. */
static fc_group *run_forwards(fixture *f) {
    fc_group *const both[] = {f->core, &f->model->layers[2].groups[0].core};
    bool entering = false;
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(fc_group_pre_forward(both[i], &entering), FC_OK);
        assert_int_equal(fc_group_post_forward(both[i]), FC_OK);
    }
    sim_log_clear();
    return both[1];
}

static void backward_prefetches_preceding_group_of_post_forward_order(void **state) {
    (void)state;
    fixture f = begin(plain);
    assert_int_equal(fc_group_pre_backward(run_forwards(&f), true), FC_OK);
    assert_string_equal(sim_log_text(), "gather:1 gather:0");
    expect_state(&f, FC_SHARDED, true);
    assert_int_equal(f.core->training_state, FC_IDLE); /* its backward has not started */
    assert_int_equal(fc_group_finalize_backward(f.core), FC_OK);
    expect_state(&f, FC_SHARDED, false); /* nothing has waited for the prefetch */
    end(&f);
}

static void backward_prefetch_skips_cpu_bound_gather(void **state) {
    (void)state;
    fixture f = begin(plain);
    sim_set_cpu_bound(true);
    assert_int_equal(fc_group_pre_backward(run_forwards(&f), true), FC_OK);
    assert_string_equal(sim_log_text(), "gather:1");
    expect_state(&f, FC_SHARDED, false);
    assert_int_equal(fc_group_prefetch(f.core, FC_PRE_BACKWARD), FC_OK); /* explicit prefetch */
    assert_string_equal(sim_log_text(), "gather:1 gather:0");
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unshard_starts_gather_and_wait_registers_unsharded_parameters),
        cmocka_unit_test(replaced_shard_is_gathered_at_next_unshard),
        cmocka_unit_test(transition_to_current_state_does_nothing),
        cmocka_unit_test(unshard_on_one_rank_issues_no_collective),
        cmocka_unit_test(one_rank_keeps_autograd_leaves_if_some_parameter_cannot_alias),
        cmocka_unit_test(group_of_one_rank_aliases_shards_if_all_parameters_can),
        cmocka_unit_test(parameter_is_cast_at_any_offset_in_rank_shard),
        cmocka_unit_test(reshard_in_forward_is_skipped_without_reshard_after_forward),
        cmocka_unit_test(reshard_in_forward_uses_smaller_group_if_set),
        cmocka_unit_test(forward_gathers_shards_that_were_written_before_backward),
        cmocka_unit_test(unshard_between_steps_gathers_written_shards_again),
        cmocka_unit_test(unshard_discards_prefetch_if_shards_were_written_since),
        cmocka_unit_test(shard_version_differs_for_equal_sums_of_address_and_writes),
        cmocka_unit_test(unshard_in_backward_keeps_parameters_of_forward),
        cmocka_unit_test(freezing_unsharded_parameter_freezes_sharded_parameter),
        cmocka_unit_test(freezing_sharded_parameter_while_unsharded_freezes_both),
        cmocka_unit_test(to_unsharded_registers_memory_filled_by_caller),
        cmocka_unit_test(unshard_in_backward_disabled_starts_no_gather),
        cmocka_unit_test(unshard_of_shard_on_other_device_fails),
        cmocka_unit_test(failed_wait_unshard_can_be_repeated_without_new_gather),
        cmocka_unit_test(transition_after_failed_rollback_repairs_registration_first),
        cmocka_unit_test(reset_abandons_pending_gather_and_reshards),
        cmocka_unit_test(pre_forward_reports_entering_only_for_first_module),
        cmocka_unit_test(forward_inside_backward_is_not_in_post_forward_order),
        cmocka_unit_test(backward_prefetches_preceding_group_of_post_forward_order),
        cmocka_unit_test(backward_prefetch_skips_cpu_bound_gather),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
