/* Links: a process group that is resolved once, its collectives, and the messages of failures. */
#include "core/link.h"

#include <string.h>

#include "sim.h"

/* Rank 1 of two. Collectives complete only in a wait. */
static fc_link begin(void) {
    fc_link link = {NULL, NULL, 0, 0};
    sim_begin((sim_config){.seed = 7});
    sim_collectives_stall(true);
    sim_pg_register("world", 2, 1, NULL, NULL);
    fc_link_set(&link, "world", 2, 1);
    return link;
}

static void end(fc_link *link) {
    fct_error_put_back(NULL);
    fc_link_fini(link);
    sim_end();
}

static fct_tensor *vector_of(int64_t numel, double value) {
    const double values[4] = {value, value, value, value};
    return sim_tensor_new(FCK_FLOAT32, 1, &numel, values);
}

static fc_status all_reduce(fc_link *link, const char *whose, fct_tensor *row, fct_work **work) {
    return fc_link_all_reduce(link, whose, row, FCT_SUM, true, work);
}

static void link_resolves_process_group_once_and_fini_releases_it(void **state) {
    (void)state;
    fc_link link = begin();
    assert_null(link.pg);
    assert_int_equal(fc_link_open(&link), FC_OK);
    fct_pg *pg = link.pg;
    assert_int_equal(fc_link_open(&link), FC_OK);
    assert_ptr_equal(link.pg, pg);
    assert_int_equal(sim_count_alive().groups, 1);
    fc_link_fini(&link);
    assert_int_equal(sim_count_alive().groups, 0);
    assert_null(link.name);
    end(&link);
}

static void link_set_releases_previous_process_group(void **state) {
    (void)state;
    fc_link link = begin();
    assert_int_equal(fc_link_open(&link), FC_OK);
    sim_pg_register("other", 3, 2, NULL, NULL);
    fc_link_set(&link, "other", 3, 2);
    assert_int_equal(sim_count_alive().groups, 0);
    assert_null(link.pg);
    assert_int_equal(link.world, 3);
    assert_int_equal(link.rank, 2);
    end(&link);
}

static void collective_opens_link_and_completes_in_wait(void **state) {
    (void)state;
    fc_link link = begin();
    fct_work *work = NULL;
    fct_tensor *input = vector_of(4, 2.0);
    fct_tensor *row = vector_of(2, 0.0);
    assert_int_equal(fc_link_reduce_scatter(&link, "0", row, input, FCT_AVG, 1.0, true, &work),
                     FC_OK);
    assert_non_null(link.pg);
    assert_non_null(work);
    assert_int_equal(fc_link_wait(&link, "0", FC_REDUCE_SCATTER, &work), FC_OK);
    assert_null(work);
    sim_tensor_expect(row, (const double[2]){1.5, 1.5}, "the mean of 1 and 2");
    assert_int_equal(fc_link_wait(&link, "0", FC_REDUCE_SCATTER, &work), FC_OK);
    assert_string_equal(sim_log_text(), "scatter:world");
    fct_tensor_release(input);
    fct_tensor_release(row);
    end(&link);
}

static void failed_collective_names_modules_operation_and_rank(void **state) {
    (void)state;
    fc_link link = begin();
    fct_work *work = NULL;
    fct_tensor *row = vector_of(2, 2.0);
    assert_int_equal(fc_link_open(&link), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(all_reduce(&link, "blocks.3", row, &work), FC_ERAISED);
    assert_string_equal(sim_error_explanation(),
                        "all-reduce of parameter group 'blocks.3' failed on rank 1 of 2 of process "
                        "group 'world'");
    for (int root = 0; root < 2; root++) {
        fct_error_put_back(NULL);
        sim_fault_arm(1, SIM_ONCE);
        assert_int_equal(all_reduce(&link, root ? "" : NULL, row, &work), FC_ERAISED);
        assert_non_null(
            strstr(sim_error_explanation(), "all-reduce of the root's parameter group failed on"));
    }
    assert_null(work);
    fct_tensor_release(row);
    end(&link);
}

/* A signal handler may have raised: the collective continues, and cleanup needs the work. */
static void failed_wait_keeps_work(void **state) {
    (void)state;
    fc_link link = begin();
    fct_work *work = NULL;
    fct_tensor *row = vector_of(2, 2.0);
    assert_int_equal(all_reduce(&link, "0", row, &work), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_link_wait(&link, "0", FC_ALL_GATHER, &work), FC_ERAISED);
    assert_non_null(work);
    assert_non_null(strstr(sim_error_explanation(), "all-gather of parameter group '0' failed"));
    fct_error_put_back(NULL);
    assert_int_equal(fc_link_wait(&link, "0", FC_ALL_REDUCE, &work), FC_OK);
    assert_null(work);
    fct_tensor_release(row);
    end(&link);
}

static void unresolved_process_group_is_not_reported_as_failed_collective(void **state) {
    (void)state;
    fc_link link = begin();
    fct_work *work = NULL;
    fct_tensor *row = vector_of(2, 2.0);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(all_reduce(&link, "0", row, &work), FC_ERAISED);
    assert_null(link.pg);
    assert_string_equal(sim_error_explanation(), "");
    fct_tensor_release(row);
    end(&link);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(link_resolves_process_group_once_and_fini_releases_it),
        cmocka_unit_test(link_set_releases_previous_process_group),
        cmocka_unit_test(collective_opens_link_and_completes_in_wait),
        cmocka_unit_test(failed_collective_names_modules_operation_and_rank),
        cmocka_unit_test(failed_wait_keeps_work),
        cmocka_unit_test(unresolved_process_group_is_not_reported_as_failed_collective),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
