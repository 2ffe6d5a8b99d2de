/* The comparison of the sizes of collectives, between processes over a negotiation. */
#define _GNU_SOURCE 1
#include "transport_ranks.h"

#include "negotiation_ranks.h"

/* Compares and records a gather of `bytes` bytes, or of an unknown size if `bytes` is 0. Returns 0,
 * or -1 with the text of the error in `raised`, which is empty after an interruption. */
static int gather(shm_negotiation *n, const char *name, uint64_t bytes) {
    fct_op_tag tag = {.kind = FCT_OP_ALL_GATHER,
                      .label = {.unit = (uint64_t)name[0], .contents = bytes, .step = 3}};
    (void)snprintf(tag.label.name, sizeof tag.label.name, "%s", name);
    const uint64_t signature = bytes == 0 ? 0 : op_signature(FCT_OP_ALL_GATHER, bytes);
    raised[0] = '\0';
    if (shm_negotiation_compare_size(n, &group, signature, &tag) != 0) {
        return -1;
    }
    shm_negotiation_record(n, signature, &tag);
    shm_negotiation_count_gather(n);
    return 0;
}

static shm_negotiation *begin_over_gloo(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    require(compare(n, 7, true).state == FCT_PLANS_EQUAL && rounds == 1);
    return n;
}

static void train(shm_negotiation *n, int steps) {
    for (int i = 0; i < steps; i++) {
        require(gather(n, "a", 8) == 0 && gather(n, "b", 16) == 0 && gather(n, "c", 24) == 0);
    }
}

/* ---- without a prediction ---- */

static void repeat_equal_steps(void) {
    shm_negotiation *n = begin_over_gloo();
    train(n, 2);
    const int before = rounds;
    /* The plan, the first step, and 'a' and 'b' of the second step. The contexts of these two,
     * (b, c) and (c, a), are new. */
    require(before == 1 + 3 + 2);
    train(n, 50);
    require(rounds == before);
    end(n);
}

static void only_unpredicted_collectives_are_exchanged(void **state) {
    (void)state;
    run_negotiation(repeat_equal_steps, 2);
    run_negotiation(repeat_equal_steps, 3);
}

/* The last rank gathers another size. All ranks may train afterwards. */
static void differ_in_the_first_step(void) {
    shm_negotiation *n = begin_over_gloo();
    const bool differs = me.rank == me.world - 1;
    char expected[200];
    (void)snprintf(expected, sizeof expected,
                   "collective mismatch: rank 0 gathers 'b' (step 3, forward), rank %d gathers 'd' "
                   "(step 3, forward)",
                   me.world - 1);
    require(gather(n, "a", 8) == 0);
    require(gather(n, differs ? "d" : "b", differs ? 32 : 16) == -1);
    require(strncmp(raised, expected, strlen(expected)) == 0);
    require(gather(n, "b", 16) == 0 && gather(n, "c", 24) == 0);
    train(n, 3);
    end(n);
}

static void collective_of_different_size_raises_on_all_ranks_before_its_issue(void **state) {
    (void)state;
    run_negotiation(differ_in_the_first_step, 2);
    run_negotiation(differ_in_the_first_step, 3);
}

static void interrupt_an_exchange(void) {
    shm_negotiation *n = begin_over_gloo();
    interruptions = me.rank == 0 ? 1 : 0;
    require(gather(n, "a", 8) == (me.rank == 0 ? -1 : 0) && raised[0] == '\0');
    if (me.rank == 0) {
        require(gather(n, "d", 32) == -1);
        require(strstr(raised, "rank 0 issues another collective than before") != NULL);
    }
    end(n);
}

/* Rank 0 repeats the collective whose exchange was interrupted. */
static void repeat_after_an_interruption(void) {
    shm_negotiation *n = begin_over_gloo();
    interruptions = me.rank == 0 ? 1 : 0;
    require(gather(n, "a", 8) == (me.rank == 0 ? -1 : 0));
    require(me.rank != 0 || gather(n, "a", 8) == 0);
    require(rounds == 2);
    train(n, 3);
    end(n);
}

static void interrupted_exchange_belongs_to_one_collective(void **state) {
    (void)state;
    run_negotiation(interrupt_an_exchange, 2);
    run_negotiation(repeat_after_an_interruption, 2);
}

static void gather_an_unknown_size(void) {
    shm_negotiation *n = begin_over_gloo();
    require(gather(n, "a", me.rank == 0 ? 8 : 0) == 0 && rounds == 2);
    require(gather(n, "b", me.rank == 0 ? 16 : 24) == 0 && rounds == 2);
    end(n);
}

static void ranks_compare_no_sizes_after_a_collective_of_unknown_size(void **state) {
    (void)state;
    run_negotiation(gather_an_unknown_size, 2);
}

/* The caller of rank 0 does not wait for its first gather, so rank 0 reads round 1 later. Both
 * ranks begin to compare sizes at the second gather. */
static void compare_after_round_1(void) {
    require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    shm_negotiation *n = begin();
    (void)compare(n, 7, me.rank != 0);
    require(!negotiate(n, FCT_USE_GATHER) && gather(n, "a", 8) == 0 && rounds == 1);
    require(!negotiate(n, FCT_USE_GATHER) && gather(n, "b", 16) == 0 && rounds == 2);
    end(n);
}

static int first_rank_with_veto;

/* Rank r has r + 1 parameter groups, and no rank waits for its first gather. All ranks begin to
 * compare sizes after as many gathers as the last rank has groups. */
static void compare_after_the_largest_number_of_groups(void) {
    if (me.rank >= first_rank_with_veto) {
        require(setenv("FSDP_C_TRANSPORT", "gloo", 1) == 0);
    }
    shm_negotiation *n = begin();
    for (int i = 0; i <= me.rank; i++) {
        require(fct_group_users_add("group"));
    }
    (void)compare(n, 7, false);
    for (int i = 0; i < me.world; i++) {
        require(!negotiate(n, FCT_USE_GATHER) && !shm_negotiation_compares_sizes(n));
        require(gather(n, "a", 8) == 0);
    }
    require(!negotiate(n, FCT_USE_GATHER) && shm_negotiation_compares_sizes(n));
    end(n);
}

static void ranks_begin_to_compare_at_the_same_collective(void **state) {
    (void)state;
    run_negotiation(compare_after_round_1, 2);
    for (first_rank_with_veto = 0; first_rank_with_veto < 3; first_rank_with_veto++) {
        run_negotiation(compare_after_the_largest_number_of_groups, 3);
    }
}

/* ---- with a prediction ---- */

static struct {
    int calls, result;
    bool is_certain;
    uint64_t number, signature;
    op_entry entry;
} departed;

static int depart(fct_pg *pg, uint64_t number, uint64_t signature, const op_entry *entry,
                  bool *is_certain) {
    require(pg == &group);
    *is_certain = departed.is_certain;
    departed.calls++;
    departed.number = number;
    departed.signature = signature;
    departed.entry = *entry;
    return departed.result;
}

static void depart_from_the_prediction(void) {
    shm_negotiation *n = begin_over_gloo();
    op_sequence_set_handler(depart);
    departed.calls = 0;
    train(n, 4);
    const int before = rounds;
    departed.result = -1;
    require(gather(n, "e", 40) == -1 && departed.calls == 1 && departed.number == 12);
    require(departed.signature == op_signature(FCT_OP_ALL_GATHER, 40));
    require(strcmp(departed.entry.label.name, "e") == 0);
    train(n, 1); /* nothing was added */
    require(departed.calls == 1);
    departed.result = 0;
    require(gather(n, "e", 40) == 0 && departed.calls == 2 && departed.number == 15);
    require(rounds == before);
    require(shm_negotiation_signature_at(n, 15) == departed.signature);
    require(shm_negotiation_signature_at(n, 16) == 0);
    require(gather(n, "f", 0) == 0); /* size unknown: matches any prediction */
    end(n);
}

/* A signal arrives when it is certain that the other ranks issue 'e'. */
static void interrupt_a_certain_departure(void) {
    shm_negotiation *n = begin_over_gloo();
    op_sequence_set_handler(depart);
    train(n, 4);
    departed.result = -1;
    departed.is_certain = true;
    departed.calls = 0;
    require(gather(n, "e", 40) == -1);
    for (int i = 0; i < 2; i++) { /* also the predicted collective */
        require(gather(n, "a", 8) == -1);
        require(strstr(raised, "issues another collective than before") != NULL);
    }
    require(gather(n, "e", 40) == 0 && departed.calls == 1);
    departed.is_certain = false;
    train(n, 1);
    end(n);
}

static void interrupted_rank_must_issue_the_collective_that_all_ranks_issue(void **state) {
    (void)state;
    run_negotiation(interrupt_a_certain_departure, 2);
}

static void collective_of_another_size_than_predicted_is_a_departure(void **state) {
    (void)state;
    run_negotiation(depart_from_the_prediction, 2);
}

static void stop_the_group(void) {
    shm_negotiation *n = begin_over_gloo();
    train(n, 4);
    require(shm_negotiation_stop(n, &group, "the text") == 0);
    require(gather(n, "a", 8) == -1 && strcmp(raised, "the text") == 0);
    end(n);
}

static void collectives_of_a_stopped_group_raise(void **state) {
    (void)state;
    run_negotiation(stop_the_group, 2);
}

/* ---- lists of two ranks ---- */

static op_entry entry(uint64_t kind, const char *name) {
    const uint64_t unit = (uint64_t)name[0];
    op_entry result = {.hash = 1 + unit, .kind = kind, .label = {.unit = unit, .step = 1}};
    (void)snprintf(result.label.name, sizeof result.label.name, "%s", name);
    return result;
}

/* Both ranks have issued all collectives of the lists, and maybe many others before. */
static void difference_before_the_issued_collectives_of_two_lists_is_described(void **state) {
    (void)state;
    const op_entry a[] = {entry(FCT_OP_ALL_GATHER, "a"), entry(FCT_OP_ALL_GATHER, "b")};
    const op_entry_list first = {.rank = 0, .first = 4, .count = 2, .entries = a};
    op_entry_list second = {.rank = 2, .first = 5, .count = 1, .entries = a + 1};
    fct_difference difference;
    const char *latest = "collective mismatch before these collectives: rank 0 gathers 'b' (step "
                         "1, forward), rank 2 gathers 'b' (step 1, forward)";
    op_entries_describe_difference(&first, &second, true, &difference);
    assert_string_equal(difference.text, latest);
    second.first = 90; /* no common collective */
    op_entries_describe_difference(&first, &second, true, &difference);
    assert_string_equal(difference.text, latest);
    second = (op_entry_list){.rank = 2, .first = 4, .count = 1, .entries = a + 1};
    op_entries_describe_difference(&first, &second, true, &difference);
    assert_string_equal(difference.text,
                        "collective mismatch at or before this collective: rank 0 gathers 'a' "
                        "(step 1, forward), rank 2 gathers 'b' (step 1, forward)");
}

/* The lists begin with an equal label. Equal hashes show that all earlier labels are equal, too. */
static void first_different_collective_is_exact_only_if_hashes_were_equal_before(void **state) {
    (void)state;
    const op_entry a[] = {entry(FCT_OP_ALL_GATHER, "a"), entry(FCT_OP_ALL_GATHER, "b")};
    op_entry b[] = {entry(FCT_OP_ALL_GATHER, "a"), entry(FCT_OP_ALL_GATHER, "c")};
    const op_entry_list first = {.rank = 0, .first = 4, .count = 2, .entries = a};
    const op_entry_list second = {.rank = 1, .first = 4, .count = 2, .entries = b};
    fct_difference difference;
    op_entries_describe_difference(&first, &second, true, &difference);
    assert_string_equal(difference.text, "collective mismatch: rank 0 gathers 'b' (step 1, "
                                         "forward), rank 1 gathers 'c' (step 1, forward)");
    b[0].hash++;
    op_entries_describe_difference(&first, &second, true, &difference);
    assert_string_equal(difference.text,
                        "collective mismatch at or before this collective: rank 0 gathers 'b' "
                        "(step 1, forward), rank 1 gathers 'c' (step 1, forward)");
}

static void first_difference_of_the_collectives_of_two_ranks_is_described(void **state) {
    (void)state;
    const op_entry a[] = {entry(FCT_OP_ALL_GATHER, "a"), entry(FCT_OP_ALL_GATHER, "b"),
                          entry(FCT_OP_ALL_GATHER, "c")};
    const op_entry b[] = {entry(FCT_OP_ALL_GATHER, "b"), {0}, entry(OP_AGREEMENT, "")};
    const op_entry_list first = {.rank = 0, .first = 4, .count = 3, .entries = a};
    op_entry_list second = {.rank = 2, .first = 5, .count = 2, .entries = b};
    fct_difference difference;
    /* An entry without a label equals every entry. */
    op_entries_describe_difference(&first, &second, false, &difference);
    assert_string_equal(difference.text, "collective mismatch: ranks 0 and 2 issued collectives of "
                                         "different sizes");
    second.count = 3;
    op_entries_describe_difference(&first, &second, false, &difference);
    assert_non_null(strstr(difference.text, "rank 0 issues no other collective, rank 2 ends its "
                                            "backward"));
    second.first = 4;
    op_entries_describe_difference(&first, &second, false, &difference);
    assert_string_equal(difference.text, "collective mismatch: rank 0 gathers 'a' (step 1, "
                                         "forward), rank 2 gathers 'b' (step 1, forward)");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_unpredicted_collectives_are_exchanged),
        cmocka_unit_test(collective_of_different_size_raises_on_all_ranks_before_its_issue),
        cmocka_unit_test(interrupted_exchange_belongs_to_one_collective),
        cmocka_unit_test(ranks_compare_no_sizes_after_a_collective_of_unknown_size),
        cmocka_unit_test(ranks_begin_to_compare_at_the_same_collective),
        cmocka_unit_test(collective_of_another_size_than_predicted_is_a_departure),
        cmocka_unit_test(interrupted_rank_must_issue_the_collective_that_all_ranks_issue),
        cmocka_unit_test(collectives_of_a_stopped_group_raise),
        cmocka_unit_test(difference_before_the_issued_collectives_of_two_lists_is_described),
        cmocka_unit_test(first_different_collective_is_exact_only_if_hashes_were_equal_before),
        cmocka_unit_test(first_difference_of_the_collectives_of_two_ranks_is_described),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
