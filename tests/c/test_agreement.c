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

/* Runs an agreement, which must be issued, and returns its difference. */
static const char *agree(shm_negotiation *n) {
    static fct_difference difference;
    bool started = false;
    require(shm_negotiation_start_agreement(n, &group, &started) == 0 && started);
    require(shm_negotiation_await_agreement(n, &group, &difference) == 0);
    return difference.text;
}

/* Returns whether an agreement was issued. */
static bool start_agreement(shm_negotiation *n) {
    bool started = true;
    require(shm_negotiation_start_agreement(n, &group, &started) == 0);
    return started;
}

/* Begins a negotiation over gloo. The ranks compare their collectives. */
static shm_negotiation *begin_over_gloo(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    return n;
}

static void agree_on_equal_collectives(void) {
    shm_negotiation *n = begin_over_gloo();
    require(!start_agreement(n) && rounds == 1);
    for (int interval = 0; interval < 3; interval++) {
        for (int i = 0; i < interval * OP_ENTRIES + 2; i++) {
            record(n, i % 2 == 0 ? "a" : "b", 1);
        }
        require(strcmp(agree(n), "") == 0 && rounds == 3 + interval);
        require(!start_agreement(n));
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
    rounds = 1; /* reuses the memory of earlier rounds */
    barrier();
    memset(shared_rounds, 0, sizeof *shared_rounds);
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

/* Adds the checksum of a collective of unit `name`. */
static void add_to_checksums(op_checksums *c, const char *name, fct_op_kind kind, uint64_t value) {
    fct_op_tag tag = {.kind = kind, .label = {.step = 3, .pass = FCT_PASS_FORWARD}};
    (void)snprintf(tag.label.name, sizeof tag.label.name, "%s", name);
    op_checksums_add(c, &tag, value);
}

static void add_checksum(shm_negotiation *n, const char *name, fct_op_kind kind, uint64_t value) {
    add_to_checksums(shm_negotiation_checksums(n), name, kind, value);
}

/* Equal checksums, and many of them, cost one round. An all-reduce may complete earlier on one
 * rank. */
static void agree_on_equal_checksums(void) {
    shm_negotiation *n = begin_over_gloo();
    record(n, "a", 1);
    for (uint64_t interval = 0; interval < 3; interval++) {
        if (me.rank == 0) {
            add_checksum(n, "b", FCT_OP_ALL_REDUCE, 9);
        }
        for (uint64_t i = 0; i < 5 + interval * OP_CHECKSUMS; i++) {
            add_checksum(n, "a", FCT_OP_ALL_GATHER, 100 + i);
        }
        if (me.rank != 0) {
            add_checksum(n, "b", FCT_OP_ALL_REDUCE, 9);
        }
        require(strcmp(agree(n), "") == 0 && rounds == 3 + (int)interval);
        require(!start_agreement(n));
    }
    end(n);
}

/* One rank of three has another checksum: first of an all-gather, then of an all-reduce, then one
 * that is not kept any more. */
static void find_the_first_different_checksum(void) {
    shm_negotiation *n = begin_over_gloo();
    const uint64_t other = me.rank == 1 ? 1 : 0;
    record(n, "a", 1);
    add_checksum(n, "a", FCT_OP_ALL_GATHER, 5);
    add_checksum(n, "b", FCT_OP_ALL_GATHER, 0x20 + other);
    add_checksum(n, "c", FCT_OP_ALL_GATHER, 0x30 + other);
    add_checksum(n, "a", FCT_OP_ALL_REDUCE, 0x40 + other);
    require(strcmp(agree(n), "different data after the all-gather of 'b' (step 3, forward): rank 1 "
                             "has checksum 0000000000000021, 2 of 3 ranks have "
                             "0000000000000020") == 0);
    add_checksum(n, "b", FCT_OP_ALL_GATHER, 6);
    add_checksum(n, "a", FCT_OP_ALL_REDUCE, 0x40 + other);
    require(strstr(agree(n), "after the all-reduce of 'a' (step 3, forward): rank 1 has") != NULL);
    add_checksum(n, "a", FCT_OP_ALL_GATHER, 1 + other);
    for (int i = 0; i < OP_CHECKSUMS; i++) {
        add_checksum(n, "b", FCT_OP_ALL_GATHER, 6);
    }
    require(strcmp(agree(n), "different data after a collective that is not recorded any more") ==
            0);
    add_checksum(n, "b", FCT_OP_ALL_GATHER, 6);
    require(strcmp(agree(n), "") == 0);
    end(n);
}

/* A rank without a checksum is equal to all. A difference of labels has precedence. */
static void agree_with_unknown_checksums(void) {
    shm_negotiation *n = begin_over_gloo();
    add_checksum(n, "a", FCT_OP_ALL_GATHER, me.rank == 1 ? 0 : 5);
    add_checksum(n, "b", FCT_OP_ALL_GATHER, me.rank == 1 ? 7 : 6);
    require(strcmp(agree(n), "") == 0);
    add_checksum(n, "b", FCT_OP_ALL_GATHER, me.rank == 1 ? 7 : 6);
    record(n, me.rank == 1 ? "b" : "a", 1);
    require(strstr(agree(n), "collective mismatch: rank 0 reduce-scatters 'a'") != NULL);
    if (me.rank == 1) { /* before a reset */
        add_checksum(n, "a", FCT_OP_ALL_GATHER, 7);
    }
    op_checksums_drop(shm_negotiation_checksums(n));
    require(!start_agreement(n));
    add_checksum(n, "a", FCT_OP_ALL_GATHER, me.rank == 1 ? 7 : 6); /* rank 1 has dropped one */
    require(strcmp(agree(n), "") == 0);
    add_checksum(n, "a", FCT_OP_ALL_GATHER, me.rank == 1 ? 7 : 6);
    require(strstr(agree(n), "different data after the all-gather of 'a'") != NULL);
    end(n);
}

static void checksums_are_compared_per_interval(void **state) {
    (void)state;
    run_negotiation(agree_on_equal_checksums, 2);
    run_negotiation(agree_on_equal_checksums, 3);
    run_negotiation(find_the_first_different_checksum, 3);
    run_negotiation(agree_with_unknown_checksums, 3);
}

/* Describes an interval of checksums of this process as that of rank 0, beside one of rank 1 whose
 * last checksum is `other`. */
static const char *describe_interval(const op_checksums *c, uint64_t number, uint64_t other) {
    static fct_difference difference;
    op_entry own[16], peer[16];
    const size_t count = op_checksums_copy(c, number, own, 16);
    assert_in_range(count, 1, 16);
    memcpy(peer, own, sizeof peer);
    peer[count - 1].hash = other;
    op_entries_describe_difference(&(op_entry_list){.rank = 0, .count = count, .entries = own},
                                   &(op_entry_list){.rank = 1, .count = count, .entries = peer},
                                   true, &difference);
    return difference.text;
}

static void checksum_interval_of_a_device_keeps_its_hash_and_checksums(void **state) {
    (void)state;
    op_checksums c = {0};
    assert_null(op_checksums_interval(&c, 0));
    op_checksums_end_interval(&c, 1); /* no checksum: no interval */
    assert_null(op_checksums_interval(&c, 0));
    for (uint64_t i = 0; i < 2 * OP_INTERVALS; i++) {
        add_to_checksums(&c, "b", FCT_OP_ALL_REDUCE, 0x20);
        add_to_checksums(&c, "a", FCT_OP_ALL_GATHER, i == 5 ? 0 : i + 1);
        op_checksums_end_interval(&c, 10 * i);
        op_checksums_end_interval(&c, 10 * i); /* no checksum since then */
        const op_interval *last =
            op_checksums_interval(&c, i < OP_INTERVALS ? i : OP_INTERVALS - 1);
        assert_int_equal(last->number, 10 * i);
        assert_int_equal(last->hash == 0, i == 5);
    }
    const op_interval *oldest = op_checksums_interval(&c, 0);
    assert_int_equal(oldest->number, 10 * OP_INTERVALS);
    assert_true(oldest->hash != op_checksums_interval(&c, 1)->hash);
    assert_null(op_checksums_interval(&c, OP_INTERVALS));
    assert_string_equal(describe_interval(&c, 10 * OP_INTERVALS, 0x21),
                        "different data after the all-reduce of 'b' (step 3, forward): rank 0 has "
                        "checksum 0000000000000020, rank 1 has 0000000000000021");
    op_entry entry;
    assert_int_equal(op_checksums_copy(&c, 10, &entry, 1), 0);
    op_checksums_fini(&c);
}

/* Two models may end a backward over one process group without a collective in between. A rank that
 * has lost an interval continues with the numbers of the others. */
static void numbers_of_intervals_increase_and_depend_on_collectives(void **state) {
    (void)state;
    op_checksums c = {0}, other = {0};
    const uint64_t first = op_checksums_number_interval(&c, 0);
    assert_true(first > 0);
    assert_true(op_checksums_number_interval(&c, 0) > first);
    const uint64_t second = op_checksums_number_interval(&c, 7);
    assert_true(second > first);
    assert_int_equal(op_checksums_number_interval(&other, 7), second);
}

static void difference_of_checksum_that_is_not_kept_names_no_unit(void **state) {
    (void)state;
    op_checksums c = {0};
    add_to_checksums(&c, "a", FCT_OP_ALL_GATHER, 1);
    op_checksums_end_interval(&c, 7);
    for (int i = 0; i < OP_CHECKSUMS_KEPT; i++) {
        add_to_checksums(&c, "a", FCT_OP_ALL_GATHER, 1);
    }
    assert_string_equal(describe_interval(&c, 7, 0x21),
                        "different data on ranks 0 and 1 after a collective that is not recorded "
                        "any more");
    op_checksums_fini(&c);
}

/* The dropped checksum has taken the place of the first one. */
static void dropped_checksum_is_not_that_of_an_older_interval(void **state) {
    (void)state;
    op_entry entry;
    op_checksums c = {0};
    add_to_checksums(&c, "a", FCT_OP_ALL_GATHER, 1);
    op_checksums_end_interval(&c, 7);
    for (int i = 1; i < OP_CHECKSUMS_KEPT; i++) {
        add_to_checksums(&c, "a", FCT_OP_ALL_GATHER, 1);
    }
    op_checksums_end_interval(&c, 8);
    add_to_checksums(&c, "b", FCT_OP_ALL_GATHER, 2);
    op_checksums_drop(&c);
    assert_int_equal(op_checksums_copy(&c, 7, &entry, 1), 1);
    assert_int_equal(entry.hash, 0);
    op_checksums_fini(&c);
}

/* Over shared memory collectives carry their labels, and only checksums need an agreement. */
static void agree_on_checksums_over_shared_memory(void) {
    require(unsetenv("FSDP_C_TRANSPORT") == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 2);
    require(!start_agreement(n));
    add_checksum(n, "a", FCT_OP_ALL_GATHER, me.rank == 1 ? 7 : 6);
    require(strstr(agree(n), "different data after the all-gather of 'a'") != NULL);
    add_checksum(n, "a", FCT_OP_ALL_GATHER, 6);
    require(start_agreement(n));
    fct_difference difference;
    interruptions = me.rank == 0 ? 1 : 0; /* rank 0 abandons the agreement */
    require(shm_negotiation_await_agreement(n, &group, &difference) == (me.rank == 0 ? -1 : 0));
    add_checksum(n, "a", FCT_OP_ALL_GATHER, 6);
    require(strcmp(agree(n), "") == 0);
    end(n);
}

static void checksums_are_compared_over_shared_memory(void **state) {
    (void)state;
    run_negotiation(agree_on_checksums_over_shared_memory, 2);
}

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

static void rank_with_unknown_collectives_is_equal_to_every_rank(void **state) {
    (void)state;
    run_negotiation(agree_without_labels, 3);
}

/* Rank 0 does not wait for its first gather, so it has not read round 1. */
static void agree_with_round_1_unread_on_rank_0(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, me.rank != 0).state ==
            (me.rank == 0 ? FCT_PLANS_UNKNOWN : FCT_PLANS_EQUAL));
    record(n, "a", 1);
    require(strcmp(agree(n), "") == 0 && rounds == 2);
    end(n);
}

static void agreement_reads_round_1_first(void **state) {
    (void)state;
    run_negotiation(agree_with_round_1_unread_on_rank_0, 2);
}

static void veto_agreements_on_rank_1(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    if (me.rank == 1) {
        require(setenv("TORCH_FR_BUFFER_SIZE", "100", 1) == 0);
    }
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL);
    record(n, "a", 1);
    require(!start_agreement(n) && rounds == 1);
    end(n);
}

static void agree_without_a_plan_on_rank_1(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, me.rank == 1 ? 0 : 7, true).state == FCT_PLANS_EQUAL);
    record(n, "a", 1);
    require(!start_agreement(n) && rounds == 1);
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

static void ranks_start_no_agreement_if_one_of_them_cannot(void **state) {
    (void)state;
    run_negotiation(veto_agreements_on_rank_1, 2);
    run_negotiation(agree_without_a_plan_on_rank_1, 2);
}

/* Rank 0 abandons an agreement. The next agreement of all ranks is not affected. */
static void interrupt_an_agreement(void) {
    shm_negotiation *n = begin_over_gloo();
    record(n, "a", 1);
    require(start_agreement(n) && !shm_negotiation_agreement_waits(n));
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

static void agreement_is_not_affected_by_an_interrupted_one(void **state) {
    (void)state;
    run_negotiation(interrupt_an_agreement, 2);
}

/* Rank 0 abandons an agreement with a difference. Rank 1 searches, so rank 0 takes part before its
 * next collective, and both describe the same difference. */
static void interrupt_an_agreement_with_a_difference(void) {
    shm_negotiation *n = begin_over_gloo();
    fct_difference difference;
    record(n, me.rank == 0 ? "a" : "b", 1);
    require(start_agreement(n));
    const char *text = difference.text;
    interruptions = me.rank == 0 ? 1 : 0;
    require(shm_negotiation_await_agreement(n, &group, &difference) == (me.rank == 0 ? -1 : 0));
    if (me.rank == 0) {
        const fct_op_tag tag = {.kind = FCT_OP_ALL_GATHER};
        require(shm_negotiation_compare_size(n, &group, 0, &tag) == -1);
        text = raised;
    }
    require(strcmp(text, "collective mismatch: rank 0 reduce-scatters 'a' (step 3, backward), "
                         "rank 1 reduce-scatters 'b' (step 3, backward)") == 0);
    record(n, "c", 1);
    require(strcmp(agree(n), "") == 0);
    end(n);
}

static void collective_after_an_interrupted_agreement_finishes_it(void **state) {
    (void)state;
    run_negotiation(interrupt_an_agreement_with_a_difference, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_collectives_cost_one_round_per_interval),
        cmocka_unit_test(checksums_are_compared_per_interval),
        cmocka_unit_test(checksum_interval_of_a_device_keeps_its_hash_and_checksums),
        cmocka_unit_test(difference_of_checksum_that_is_not_kept_names_no_unit),
        cmocka_unit_test(numbers_of_intervals_increase_and_depend_on_collectives),
        cmocka_unit_test(dropped_checksum_is_not_that_of_an_older_interval),
        cmocka_unit_test(checksums_are_compared_over_shared_memory),
        cmocka_unit_test(first_difference_is_described_on_all_ranks),
        cmocka_unit_test(difference_without_a_label_is_described),
        cmocka_unit_test(rank_with_unknown_collectives_is_equal_to_every_rank),
        cmocka_unit_test(agreement_reads_round_1_first),
        cmocka_unit_test(ranks_agree_without_a_comparison_of_plans),
        cmocka_unit_test(ranks_start_no_agreement_if_one_of_them_cannot),
        cmocka_unit_test(agreement_is_not_affected_by_an_interrupted_one),
        cmocka_unit_test(collective_after_an_interrupted_agreement_finishes_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
