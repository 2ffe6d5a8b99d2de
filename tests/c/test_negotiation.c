/* The negotiation about shared memory, between processes. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

#include "negotiation_ranks.h"

/* ---- acceptance ---- */

/* Rank r has r + 1 parameter groups. The number of fallback gathers is twice the largest number. */
static void accept_after_the_same_gathers(void) {
    shm_negotiation *n = begin();
    for (int i = 0; i <= me.rank; i++) {
        require(fct_group_users_add("group"));
    }
    require(fct_group_users_add("another group"));
    require(shm_negotiation_active_transport(n) == NULL);
    require(count_fallback_gathers(n) == 2 * me.world && rounds == 2 && attached == 1);
    shm_transport *transport = shm_negotiation_active_transport(n);
    require(transport != NULL && negotiate(n, FCT_USE_REDUCE) && rounds == 2);
    barrier(); /* a peer may map this rank's ring */
    shm_negotiation_close(n);
    require(shm_negotiation_active_transport(n) == NULL && !negotiate(n, FCT_USE_GATHER));
    float value = 0;
    shm_request request = {.kind = FCT_OP_ALL_REDUCE,
                           .dtype = FCK_FLOAT32,
                           .itemsize = sizeof value,
                           .rank = me.rank,
                           .world = me.world,
                           .bytes = sizeof value,
                           .output = (char *)&value,
                           .timeout_ms = 1000,
                           .dtype_name = name_dtype};
    issued op = {0};
    op.collective = shm_collective_new(&request);
    require(shm_collective_start(op.collective, transport,
                                 (shm_owner){&op.work, complete_work, release_work},
                                 me.error) == SHM_SUBMIT_FAILED);
    require(strcmp(me.error, "the process group has ended") == 0);
    shm_collective_free(op.collective);
    shm_transport_release(transport);
    end(n);
}

static void all_ranks_accept_after_the_same_number_of_gathers(void **state) {
    (void)state;
    run_negotiation(accept_after_the_same_gathers, 2);
    run_negotiation(accept_after_the_same_gathers, 3);
}

static void query_both_rounds(void) {
    shm_negotiation *n = begin();
    require(negotiate(n, FCT_USE_QUERY) && rounds == 2);
    barrier();
    end(n);
}

static void negotiation_query_waits_for_both_rounds(void **state) {
    (void)state;
    run_negotiation(query_both_rounds, 2);
}

/* A reduce-scatter may wait for round 1, and not for round 2. */
static void reduce_between_the_rounds(void) {
    shm_negotiation *n = begin();
    require(!negotiate(n, FCT_USE_GATHER) && rounds == 1);
    shm_negotiation_count_gather(n);
    require(!negotiate(n, FCT_USE_REDUCE) && rounds == 2);
    require(!negotiate(n, FCT_USE_GATHER) && rounds == 2);
    shm_negotiation_count_gather(n);
    require(negotiate(n, FCT_USE_GATHER));
    barrier();
    end(n);
}

static void reduce_scatter_issues_the_second_round(void **state) {
    (void)state;
    run_negotiation(reduce_between_the_rounds, 2);
}

static void paused_gathers_are_not_counted(void **state) {
    (void)state;
    shm_negotiation *n = shm_negotiation_new();
    shm_negotiation_set_paused(n, true);
    assert_true(shm_negotiation_is_paused(n));
    for (int i = 0; i < 10; i++) {
        shm_negotiation_count_gather(n);
    }
    shm_negotiation_set_paused(n, false);
    group = (struct fct_pg){0, 2, true};
    bool accepted = true;
    shared_rounds = (exchanged *)calloc(1, sizeof *shared_rounds);
    rounds = 0;
    assert_int_equal(shm_negotiation_run(n, &group, FCT_USE_GATHER, attach, &accepted), 0);
    assert_false(accepted); /* after counted gathers the call would wait for rank 1 */
    shm_negotiation_release(n);
    free(shared_rounds);
}

/* ---- plans ---- */

/* All ranks wait in round 1, so the fallback moves no gather. */
static void compare_equal_plans(void) {
    shm_negotiation *n = begin();
    require(fct_group_users_add("group"));
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 2);
    require(count_fallback_gathers(n) == 0);
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL);
    /* Later plans are in the labels of messages. */
    require(compare(n, 8, true).state == FCT_PLANS_EQUAL && rounds == 2);
    barrier();
    end(n);
}

static void plans_are_compared_in_round_1_and_shared_memory_follows(void **state) {
    (void)state;
    run_negotiation(compare_equal_plans, 2);
    run_negotiation(compare_equal_plans, 3);
}

static void compare_different_plans(void) {
    shm_negotiation *n = begin();
    for (int i = 0; i < 2; i++) {
        const fct_plan_result result = compare(n, me.rank == 1 ? 8 : 7, true);
        require(result.state == FCT_PLANS_DIFFER && result.rank == 1);
        require(result.hashes[0] == 7 && result.hashes[1] == 8);
    }
    barrier();
    end(n);
}

static void different_plan_of_one_rank_is_detected_on_all_ranks(void **state) {
    (void)state;
    run_negotiation(compare_different_plans, 3);
}

/* Rank 0 does not wait, so the rounds are read after gathers, as without plans. */
static void compare_without_a_wait(void) {
    shm_negotiation *n = begin();
    const fct_plan_result first = compare(n, 7, me.rank != 0);
    require(first.state == (me.rank == 0 ? FCT_PLANS_UNKNOWN : FCT_PLANS_EQUAL) && rounds == 1);
    require(!negotiate(n, FCT_USE_GATHER));
    shm_negotiation_count_gather(n);
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL);
    require(count_fallback_gathers(n) == 1 && rounds == 2);
    barrier();
    end(n);
}

static void rank_that_does_not_wait_compares_its_plan_later(void **state) {
    (void)state;
    run_negotiation(compare_without_a_wait, 2);
}

/* Rank 1 joins after rank 0 has issued gathers of two plans without a wait. */
static void issue_two_plans_without_a_wait(void) {
    shm_negotiation *n = begin();
    if (me.rank == 1) {
        barrier();
    }
    require(compare(n, 7, false).state == FCT_PLANS_UNKNOWN && rounds == 1);
    require(compare(n, 8, false).state == FCT_PLANS_EQUAL && rounds == 1);
    if (me.rank == 0) {
        barrier();
    }
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    require(compare(n, 8, true).state == FCT_PLANS_EQUAL && rounds == 1);
    barrier();
    end(n);
}

static void later_plan_is_not_compared_if_a_rank_did_not_wait(void **state) {
    (void)state;
    run_negotiation(issue_two_plans_without_a_wait, 2);
}

static int64_t rank_without_plan;

/* One rank has no plan: no rank compares, now or later. */
static void compare_with_a_rank_without_plan(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    const uint64_t plan = me.rank == rank_without_plan ? 0 : (uint64_t)(7 + me.rank);
    require(compare(n, plan, true).state == FCT_PLANS_EQUAL && rounds == 1);
    require(compare(n, plan == 0 ? 0 : 9, true).state == FCT_PLANS_EQUAL && rounds == 1);
    end(n);
}

static void rank_without_plan_is_reported_as_equal_to_all_ranks(void **state) {
    (void)state;
    for (rank_without_plan = 0; rank_without_plan < 2; rank_without_plan++) {
        run_negotiation(compare_with_a_rank_without_plan, 3);
    }
}

/* Over gloo, each later plan costs two exchanges: one of signatures, because there is no prediction
 * yet, then one of plan hashes. Rank 0 reads the exchange of plan 8 later. */
static void compare_later_plans_over_gloo(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    const fct_plan_result second = compare(n, 8, me.rank != 0);
    require(second.state == (me.rank == 0 ? FCT_PLANS_UNKNOWN : FCT_PLANS_EQUAL) && rounds == 3);
    interruptions = me.rank == 0 ? 1 : 0;
    fct_plan_result result;
    require(shm_negotiation_compare_plan(n, &group, 8, true, attach, &result) ==
            (me.rank == 0 ? -1 : 0));
    require(compare(n, 8, true).state == FCT_PLANS_EQUAL && rounds == 3);
    require(compare(n, 9 + (uint64_t)me.rank, true).state == FCT_PLANS_DIFFER && rounds == 5);
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 5);
    end(n);
}

static void later_plan_is_compared_once_over_gloo(void **state) {
    (void)state;
    run_negotiation(compare_later_plans_over_gloo, 2);
}

static shm_negotiation *shared;

/* Compares plan 9 as another thread may, during the issue of the exchange of plan 8. */
static void compare_plan_9(void) {
    if (rounds == 3) {
        during_start = NULL;
        require(compare(shared, 9, true).state == FCT_PLANS_EQUAL && rounds == 5);
    }
}

static void compare_plans_of_two_threads(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shared = begin();
    require(compare(shared, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    during_start = compare_plan_9;
    require(compare(shared, 8, true).state == FCT_PLANS_EQUAL && rounds == 5);
    end(shared);
}

static void plan_added_during_the_issue_of_another_keeps_both(void **state) {
    (void)state;
    run_negotiation(compare_plans_of_two_threads, 2);
}

static void roots_are_numbered_in_the_order_of_first_use(void **state) {
    (void)state;
    static const uint64_t roots[] = {5, 3, 0, 5, 9}, numbers[] = {1, 2, 0, 1, 3};
    shm_negotiation *n = shm_negotiation_new();
    for (int i = 0; i < 5; i++) {
        uint64_t number = 99;
        assert_int_equal(shm_negotiation_number_root(n, roots[i], &number), 0);
        assert_int_equal(number, numbers[i]);
    }
    shm_negotiation_release(n);
}

/* ---- vetoes ---- */

static void veto_on_rank_1(void) {
    if (me.rank == 1) {
        require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    }
    shm_negotiation *n = begin();
    require(count_fallback_gathers(n) == -1 && rounds == 1);
    require(attached == (me.rank == 1 ? 0 : 1));
    end(n);
}

static void veto_of_one_rank_declines_on_all(void **state) {
    (void)state;
    run_negotiation(veto_on_rank_1, 2);
}

static void decline_without_gloo(void) {
    shm_negotiation *n = begin();
    group.plain_gloo = false;
    require(count_fallback_gathers(n) == -1 && rounds == 0);
    end(n);
}

static void backends_other_than_gloo_decline_shared_memory_without_a_round(void **state) {
    (void)state;
    run_negotiation(decline_without_gloo, 2);
}

/* ---- failures ---- */

static void interrupt_each_wait(void) {
    shm_negotiation *n = begin();
    bool accepted = false;
    interruptions = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_QUERY, attach, &accepted) == -1 && rounds == 1);
    interruptions = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_QUERY, attach, &accepted) == -1 && rounds == 1);
    interruptions = 0;
    require(negotiate(n, FCT_USE_QUERY) && rounds == 2);
    barrier();
    end(n);
}

static void interrupted_wait_may_be_repeated(void **state) {
    (void)state;
    run_negotiation(interrupt_each_wait, 2);
}

static void fail_to_issue_round_1(void) {
    shm_negotiation *n = begin();
    bool accepted = false;
    failing_starts = 1;
    require(shm_negotiation_run(n, &group, FCT_USE_GATHER, attach, &accepted) == -1 && rounds == 0);
    require(negotiate(n, FCT_USE_QUERY) && rounds == 2 && attached == 1);
    barrier();
    end(n);
}

static void negotiation_round_is_issued_again_after_failed_issue(void **state) {
    (void)state;
    run_negotiation(fail_to_issue_round_1, 2);
}

static void close_while_connecting(void) {
    shm_negotiation *n = begin();
    require(!negotiate(n, FCT_USE_GATHER));
    shm_negotiation_count_gather(n);
    require(!negotiate(n, FCT_USE_REDUCE) && rounds == 2);
    barrier(); /* all ranks have mapped the rings */
    shm_negotiation_close(n);
    require(count_fallback_gathers(n) == -1);
    end(n);
}

static void negotiation_declines_if_the_group_ends_meanwhile(void **state) {
    (void)state;
    run_negotiation(close_while_connecting, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_accept_after_the_same_number_of_gathers),
        cmocka_unit_test(negotiation_query_waits_for_both_rounds),
        cmocka_unit_test(reduce_scatter_issues_the_second_round),
        cmocka_unit_test(paused_gathers_are_not_counted),
        cmocka_unit_test(plans_are_compared_in_round_1_and_shared_memory_follows),
        cmocka_unit_test(different_plan_of_one_rank_is_detected_on_all_ranks),
        cmocka_unit_test(later_plan_is_not_compared_if_a_rank_did_not_wait),
        cmocka_unit_test(rank_that_does_not_wait_compares_its_plan_later),
        cmocka_unit_test(rank_without_plan_is_reported_as_equal_to_all_ranks),
        cmocka_unit_test(later_plan_is_compared_once_over_gloo),
        cmocka_unit_test(plan_added_during_the_issue_of_another_keeps_both),
        cmocka_unit_test(roots_are_numbered_in_the_order_of_first_use),
        cmocka_unit_test(veto_of_one_rank_declines_on_all),
        cmocka_unit_test(backends_other_than_gloo_decline_shared_memory_without_a_round),
        cmocka_unit_test(interrupted_wait_may_be_repeated),
        cmocka_unit_test(negotiation_round_is_issued_again_after_failed_issue),
        cmocka_unit_test(negotiation_declines_if_the_group_ends_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
