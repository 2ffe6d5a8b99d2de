/* A process group: its resolution, its collectives, its plan, and the messages of failures. */
#include "core/process_group.h"

#include <stdio.h>
#include <string.h>

#include "sim.h"

/* Rank 1 of two. Collectives complete only in a wait. */
static fc_process_group begin(void) {
    fc_process_group group = {0};
    sim_begin((sim_config){.seed = 7});
    sim_collectives_stall(true);
    sim_pg_register("world", 2, 1, NULL, NULL);
    fc_process_group_set(&group, "world", 2, 1);
    return group;
}

static void end(fc_process_group *pg) {
    sim_discard_error();
    fc_process_group_fini(pg);
    sim_end();
}

static fct_tensor *vector_of(int64_t numel, double value) {
    const double values[4] = {value, value, value, value};
    return sim_tensor_new(FCK_FLOAT32, 1, &numel, values);
}

static fc_status all_reduce(fc_process_group *pg, const char *modules, fct_tensor *output,
                            fct_work **work) {
    return fc_process_group_all_reduce(pg, modules, output, FCT_SUM, true, work);
}

static void process_group_is_resolved_once_and_released_by_fini(void **state) {
    (void)state;
    fc_process_group group = begin();
    assert_null(group.handle);
    assert_int_equal(fc_process_group_open(&group), FC_OK);
    fct_pg *pg = group.handle;
    assert_int_equal(fc_process_group_open(&group), FC_OK);
    assert_ptr_equal(group.handle, pg);
    assert_int_equal(sim_count_alive().groups, 1);
    fc_process_group_fini(&group);
    assert_int_equal(sim_count_alive().groups, 0);
    assert_null(group.name);
    end(&group);
}

static void process_group_set_releases_previous_handle(void **state) {
    (void)state;
    fc_process_group group = begin();
    assert_int_equal(fc_process_group_open(&group), FC_OK);
    sim_pg_register("other", 3, 2, NULL, NULL);
    fc_process_group_set(&group, "other", 3, 2);
    assert_int_equal(sim_count_alive().groups, 0);
    assert_null(group.handle);
    assert_int_equal(group.world, 3);
    assert_int_equal(group.rank, 2);
    end(&group);
}

static void collective_opens_process_group_and_completes_in_wait(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_work *work = NULL;
    fct_tensor *input = vector_of(4, 2.0);
    fct_tensor *output = vector_of(2, 0.0);
    assert_int_equal(
        fc_process_group_reduce_scatter(&group, "0", output, input, FCT_AVG, 1.0, true, &work),
        FC_OK);
    assert_non_null(group.handle);
    assert_non_null(work);
    assert_int_equal(fc_process_group_wait(&group, "0", FC_REDUCE_SCATTER, &work), FC_OK);
    assert_null(work);
    sim_tensor_expect(output, (const double[2]){1.5, 1.5}, "the mean of 1 and 2");
    assert_int_equal(fc_process_group_wait(&group, "0", FC_REDUCE_SCATTER, &work), FC_OK);
    assert_string_equal(sim_log_text(), "scatter:world");
    fct_tensor_release(input);
    fct_tensor_release(output);
    end(&group);
}

static void failed_collective_names_operation_modules_position_and_rank(void **state) {
    (void)state;
    fc_process_group group = begin();
    group.label.step = 4;
    group.label.pass = FCT_PASS_BACKWARD;
    fct_work *work = NULL;
    fct_tensor *output = vector_of(2, 2.0);
    assert_int_equal(fc_process_group_open(&group), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(all_reduce(&group, "blocks.3", output, &work), FC_ERAISED);
    assert_string_equal(sim_error_explanation(),
                        "all-reduce of parameter group 'blocks.3' (step 4, backward) failed on "
                        "rank 1 of 2 of process group 'world'");
    for (int root = 0; root < 2; root++) {
        sim_discard_error();
        sim_fault_arm(1, SIM_ONCE);
        assert_int_equal(all_reduce(&group, root ? "" : NULL, output, &work), FC_ERAISED);
        assert_non_null(
            strstr(sim_error_explanation(),
                   "all-reduce of the root's parameter group (step 4, backward) failed on"));
    }
    assert_null(work);
    fct_tensor_release(output);
    end(&group);
}

static void failed_collective_of_many_modules_names_the_first_and_the_last(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_work *work = NULL;
    char modules[800] = "";
    fct_tensor *output = vector_of(2, 2.0);
    for (int i = 0; i < 40; i++) {
        (void)snprintf(modules + strlen(modules), 20, "%sblocks.%d", i > 0 ? ", " : "", i);
    }
    assert_int_equal(fc_process_group_open(&group), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(all_reduce(&group, modules, output, &work), FC_ERAISED);
    assert_non_null(
        strstr(sim_error_explanation(),
               "parameter group 'blocks.0, ... blocks.39 (40 modules)' (step 0, forward)"
               " failed on rank 1 of 2 of process group 'world'"));
    fct_tensor_release(output);
    end(&group);
}

static void label_has_the_last_whole_characters_of_a_long_name(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_op_tag tag;
    char modules[64] = "";
    for (int i = 0; i < 20; i++) {
        strcat(modules, "\xE5\xB1\x82");
    }
    fc_process_group_set_plan(&group, FCT_PLAN_UNKNOWN + 1, 1);
    assert_true(fc_process_group_describe_checksum(&group, modules, FC_ALL_GATHER, &tag));
    assert_string_equal(tag.label.name, modules + 15); /* 15 of 20 characters */
    end(&group);
}

/* A signal handler may have raised: the collective continues, and cleanup needs the work. */
static void failed_wait_keeps_work(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_work *work = NULL;
    fct_tensor *output = vector_of(2, 2.0);
    assert_int_equal(all_reduce(&group, "0", output, &work), FC_OK);
    group.label.step++; /* of a later collective */
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_process_group_wait(&group, "0", FC_ALL_GATHER, &work), FC_ERAISED);
    assert_non_null(work);
    assert_non_null(strstr(sim_error_explanation(),
                           "all-gather of parameter group '0' (step 0, forward) failed"));
    sim_discard_error();
    assert_int_equal(fc_process_group_wait(&group, "0", FC_ALL_REDUCE, &work), FC_OK);
    assert_null(work);
    fct_tensor_release(output);
    end(&group);
}

static void unresolved_process_group_is_not_reported_as_failed_collective(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_work *work = NULL;
    fct_tensor *output = vector_of(2, 2.0);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(all_reduce(&group, "0", output, &work), FC_ERAISED);
    assert_null(group.handle);
    assert_string_equal(sim_error_explanation(), "");
    fct_tensor_release(output);
    end(&group);
}

static fc_status compare_plan(fc_process_group *group, bool waits, fct_plan_result *result) {
    const fct_device cpu = {FCT_DEVICE_CPU, -1};
    return fc_process_group_compare_plan(group, "0", FC_ALL_GATHER, cpu, waits, result);
}

static void plan_is_compared_until_the_answers_are_read(void **state) {
    (void)state;
    fc_process_group group = begin();
    fct_plan_result result;
    assert_int_equal(compare_plan(&group, false, &result), FC_OK);
    assert_true(group.compared); /* there is no plan */
    fc_process_group_set_plan(&group, 7, 3);
    assert_int_equal(compare_plan(&group, false, &result), FC_OK);
    assert_int_equal(result.state, FCT_PLANS_UNKNOWN);
    assert_false(group.compared);
    assert_int_equal(group.number, 3);
    sim_set_plans_differ(true);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(compare_plan(&group, true, &result), FC_OK);
        assert_int_equal(result.state, FCT_PLANS_DIFFER);
        assert_int_equal(result.rank, 1);
    }
    sim_set_plans_differ(false);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(compare_plan(&group, true, &result), FC_ERAISED);
    assert_non_null(strstr(sim_error_explanation(),
                           "all-gather of parameter group '0' (step 0, forward) failed"));
    assert_int_equal(compare_plan(&group, true, &result), FC_OK);
    assert_true(group.compared);
    end(&group);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(process_group_is_resolved_once_and_released_by_fini),
        cmocka_unit_test(process_group_set_releases_previous_handle),
        cmocka_unit_test(collective_opens_process_group_and_completes_in_wait),
        cmocka_unit_test(failed_collective_names_operation_modules_position_and_rank),
        cmocka_unit_test(failed_collective_of_many_modules_names_the_first_and_the_last),
        cmocka_unit_test(label_has_the_last_whole_characters_of_a_long_name),
        cmocka_unit_test(failed_wait_keeps_work),
        cmocka_unit_test(unresolved_process_group_is_not_reported_as_failed_collective),
        cmocka_unit_test(plan_is_compared_until_the_answers_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
