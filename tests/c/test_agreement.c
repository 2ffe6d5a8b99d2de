/* The agreement on issued collectives, between processes over a negotiation. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

#include "negotiation_ranks.h"

/* Records a reduce-scatter of `params`. Its size is unknown, so the ranks exchange sizes in one
 * round before the first collective, and not afterwards. */
static void record(shm_negotiation *n, const char *name, uint64_t params) {
    fct_op_tag tag = {.kind = FCT_OP_REDUCE_SCATTER,
                      .label = {.unit = (uint64_t)name[0],
                                .params = params,
                                .divisor = 2,
                                .step = 3,
                                .pass = FCT_PASS_BACKWARD}};
    (void)snprintf(tag.label.name, sizeof tag.label.name, "%s", name);
    require(shm_negotiation_compare_size(n, &group, 0, &tag) == 0);
    shm_negotiation_record(n, 0, &tag);
}

static void record_unknown(shm_negotiation *n) {
    require(shm_negotiation_compare_size(n, &group, 0, NULL) == 0);
    shm_negotiation_record(n, 0, NULL);
}

/* Returns the difference of an agreement, which is started. */
static const char *agree(shm_negotiation *n) {
    static fct_difference difference;
    bool started = false;
    require(shm_negotiation_start_agreement(n, &group, &started) == 0 && started);
    require(shm_negotiation_await_agreement(n, &group, &difference) == 0);
    return difference.text;
}

static bool issues(shm_negotiation *n) {
    bool started = true;
    require(shm_negotiation_start_agreement(n, &group, &started) == 0);
    return started;
}

/* A process group over gloo whose ranks compare. */
static shm_negotiation *begin_over_gloo(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    return n;
}

static void agree_on_equal_collectives(void) {
    shm_negotiation *n = begin_over_gloo();
    require(!issues(n) && rounds == 1);
    for (int interval = 0; interval < 3; interval++) {
        for (int i = 0; i < interval * OP_ENTRIES + 2; i++) {
            record(n, i % 2 == 0 ? "a" : "b", 1);
        }
        require(strcmp(agree(n), "") == 0 && rounds == 3 + interval);
        require(!issues(n));
    }
    end(n);
}

static void equal_collectives_cost_one_round_per_interval(void **state) {
    (void)state;
    run_negotiation(agree_on_equal_collectives, 2);
    run_negotiation(agree_on_equal_collectives, 3);
}

/* Rank 1 reduces other parameters of unit c. Later collectives are equal. */
static void find_the_first_difference(void) {
    shm_negotiation *n = begin_over_gloo();
    for (int i = 0; i < 700; i++) {
        record(n, "a", 1);
    }
    record(n, "c", me.rank == 1 ? 3 : 5);
    for (int i = 0; i < 40; i++) {
        record(n, "b", 1);
    }
    require(strcmp(agree(n),
                   "collective mismatch: rank 0 reduce-scatters 'c' with the gradients of "
                   "parameters 0, 2 (step 3, backward), rank 1 reduce-scatters 'c' with the "
                   "gradients of parameters 0, 1 (step 3, backward)") == 0);
    record(n, "a", 1);
    require(strcmp(agree(n), "") == 0);
    end(n);
}

static void first_difference_is_described_on_all_ranks(void **state) {
    (void)state;
    run_negotiation(find_the_first_difference, 2);
    run_negotiation(find_the_first_difference, 3);
}

/* Rank 2 differs where no rank keeps the labels, and where it has fewer collectives. */
static void find_other_differences(void) {
    shm_negotiation *n = begin_over_gloo();
    record(n, me.rank == 2 ? "b" : "a", 1);
    for (int i = 0; i < OP_ENTRIES; i++) {
        record(n, "a", 1);
    }
    require(strstr(agree(n), "mismatch at or before this collective: rank 0 reduce-sc") != NULL);
    rounds = 1;
    barrier();
    memset(wire, 0, sizeof *wire);
    barrier();
    record(n, "a", 1);
    if (me.rank != 2) {
        record(n, "b", 1);
    }
    require(strcmp(agree(n), "collective mismatch: rank 0 reduce-scatters 'b' (step 3, backward), "
                             "rank 2 issues no other collective") == 0);
    end(n);
}

static void difference_without_a_label_is_described(void **state) {
    (void)state;
    run_negotiation(find_other_differences, 3);
}

/* Rank 0 issues a collective without label, so ranks 1 and 2 are compared. */
static void agree_without_labels(void) {
    shm_negotiation *n = begin_over_gloo();
    if (me.rank == 0) {
        record_unknown(n);
    } else {
        record(n, "a", 1);
    }
    require(strcmp(agree(n), "") == 0);
    if (me.rank == 0) {
        record_unknown(n);
    } else {
        record(n, me.rank == 1 ? "a" : "b", 1);
    }
    require(strstr(agree(n), "rank 1 reduce-scatters 'a' (step 3, backward), rank 2 ") != NULL);
    record(n, me.rank == 0 ? "a" : "b", 1);
    require(strstr(agree(n), "rank 0 reduce-scatters 'a' (step 3, backward), rank 1 ") != NULL);
    end(n);
}

static void rank_with_unknown_collectives_is_equal_to_all(void **state) {
    (void)state;
    run_negotiation(agree_without_labels, 3);
}

/* Rank 0 does not wait for its first gather, so it has not read round 1. */
static void agree_before_round_1_is_read(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, me.rank != 0).state ==
            (me.rank == 0 ? FCT_PLANS_UNKNOWN : FCT_PLANS_EQUAL));
    record(n, "a", 1);
    require(strcmp(agree(n), "") == 0 && rounds == 2);
    end(n);
}

static void agreement_starts_after_round_1_is_read(void **state) {
    (void)state;
    run_negotiation(agree_before_round_1_is_read, 2);
}

static void veto_agreements_on_rank_1(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    if (me.rank == 1) {
        require(setenv("TORCH_FR_BUFFER_SIZE", "100", 1) == 0);
    }
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL);
    record(n, "a", 1);
    require(!issues(n) && rounds == 1);
    end(n);
}

static void agree_without_a_plan_on_rank_1(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, me.rank == 1 ? 0 : 7, true).state == FCT_PLANS_EQUAL);
    record(n, "a", 1);
    require(!issues(n) && rounds == 1);
    end(n);
}

/* The first collective is an unshard before the first forward of the root. */
static void agree_with_an_unknown_plan(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, me.rank == 1 ? 7 : FCT_PLAN_UNKNOWN, true).state == FCT_PLANS_EQUAL);
    require(compare(n, me.rank == 1 ? 7 : 8, true).state == FCT_PLANS_EQUAL && rounds == 1);
    record(n, me.rank == 1 ? "b" : "a", 1);
    require(strstr(agree(n), "rank 0 reduce-scatters 'a' (step 3, backward), rank 1 ") != NULL);
    end(n);
}

static void ranks_agree_without_a_comparison_of_plans(void **state) {
    (void)state;
    run_negotiation(agree_with_an_unknown_plan, 2);
}

static void ranks_do_not_agree_if_one_of_them_cannot(void **state) {
    (void)state;
    run_negotiation(veto_agreements_on_rank_1, 2);
    run_negotiation(agree_without_a_plan_on_rank_1, 2);
}

/* Rank 0 abandons an agreement. The next agreement of all ranks is not affected. */
static void interrupt_an_agreement(void) {
    shm_negotiation *n = begin_over_gloo();
    record(n, "a", 1);
    require(issues(n));
    fct_difference difference;
    interruptions = me.rank == 0 ? 1 : 0;
    require(shm_negotiation_await_agreement(n, &group, &difference) == (me.rank == 0 ? -1 : 0));
    record(n, "b", 1);
    require(strcmp(agree(n), "") == 0 && rounds == 4);
    failing_starts = 1;
    bool started = true;
    record(n, "c", 1);
    require(shm_negotiation_start_agreement(n, &group, &started) == -1 && !started);
    require(strcmp(agree(n), "") == 0 && rounds == 5);
    end(n);
}

static void agreement_after_an_interrupted_agreement_compares(void **state) {
    (void)state;
    run_negotiation(interrupt_an_agreement, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_collectives_cost_one_round_per_interval),
        cmocka_unit_test(first_difference_is_described_on_all_ranks),
        cmocka_unit_test(difference_without_a_label_is_described),
        cmocka_unit_test(rank_with_unknown_collectives_is_equal_to_all),
        cmocka_unit_test(agreement_starts_after_round_1_is_read),
        cmocka_unit_test(ranks_agree_without_a_comparison_of_plans),
        cmocka_unit_test(ranks_do_not_agree_if_one_of_them_cannot),
        cmocka_unit_test(agreement_after_an_interrupted_agreement_compares),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
