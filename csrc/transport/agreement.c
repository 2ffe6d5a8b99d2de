/* The agreement on issued collectives; see agreement.h. */
#include "agreement.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "op_label.h"

/* Integers of an agreement. COUNT is compared together with HASH. */
enum { HASH = 0, COUNT, CHECKSUMS, SUMMARY_INTEGERS };
enum { ENTRY_INTEGERS = sizeof(op_entry) / sizeof(int64_t) };

void op_agreement_fini(op_agreement *a) {
    assert(a->closed <= a->total);
    fct_exchange_release(a->round);
    free(a->entries);
    op_label_blocks_fini(&a->blocks);
    op_checksums_fini(&a->checksums);
    *a = (op_agreement){0};
}

/* Precondition: the label is known. */
static uint64_t add_label(uint64_t hash, const fct_op_tag *tag) {
    hash = fct_hash_add(hash, (uint64_t)tag->kind);
    hash = fct_hash_add(hash, tag->label.unit);
    hash = fct_hash_add(hash, tag->label.params);
    hash = fct_hash_add(hash, tag->label.contents);
    return hash != 0 ? hash : 1;
}

static bool is_known(const fct_op_tag *tag) {
    return tag != NULL && tag->label.unit != 0;
}

void op_agreement_add(op_agreement *a, const fct_op_tag *tag) {
    assert(a->count <= a->total);
    if (a->entries == NULL) {
        a->entries = (op_entry *)calloc(OP_ENTRIES, sizeof *a->entries); /* NULL: no names */
    }
    op_entry entry = {0};
    if (is_known(tag)) {
        a->hash = add_label(a->count == 0 ? FCT_HASH_EMPTY : a->hash, tag);
        entry = (op_entry){a->hash, tag->kind, tag->label};
    } else {
        a->unknown = true;
    }
    if (a->entries != NULL) {
        a->entries[a->total % OP_ENTRIES] = entry;
    }
    a->count++;
    atomic_store_explicit(&a->total, a->total + 1, memory_order_release);
}

void op_agreement_add_of_device(op_agreement *a, const fct_op_tag *tag) {
    assert(a->blocks.count <= a->total);
    op_label_blocks_add(&a->blocks, is_known(tag) ? add_label(FCT_HASH_EMPTY, tag) : 0);
    op_agreement_add(a, tag);
}

bool op_agreement_is_needed(const op_agreement *a) {
    return a->count > 0 || op_checksums_any(&a->checksums);
}

int op_agreement_start(op_agreement *a, fct_pg *pg, bool *issued) {
    assert(pg != NULL && a->count <= a->total && a->round == NULL);
    *issued = false;
    if (!op_agreement_is_needed(a)) {
        return 0;
    }
    const bool known = a->count > 0 && !a->unknown;
    const int64_t summary[SUMMARY_INTEGERS] = {known ? (int64_t)a->hash : 0, (int64_t)a->count,
                                               (int64_t)op_checksums_close(&a->checksums)};
    fct_exchange *round = NULL;
    if (fct_exchange_start_distinct(pg, summary, SUMMARY_INTEGERS, &round) != 0) {
        return -1;
    }
    a->round = round;
    a->first = a->total - a->count;
    a->closed = a->count;
    a->count = 0;
    a->unknown = false;
    *issued = true;
    return 0;
}

/* ---- the first difference ---- */

/* Two ranks that differ. */
typedef struct rank_pair {
    int64_t first, second;
} rank_pair;

/* Exchanges integers and copies those of the two ranks. */
static int exchange(fct_pg *pg, const int64_t *values, size_t count, rank_pair ranks,
                    int64_t *first, int64_t *second) {
    const int64_t *results = NULL;
    fct_exchange *round = NULL;
    if (fct_exchange_start_distinct(pg, values, count, &round) != 0) {
        return -1;
    }
    const int status = fct_exchange_wait(round, &results);
    if (status == 0) {
        memcpy(first, results + (size_t)ranks.first * count, count * sizeof *first);
        memcpy(second, results + (size_t)ranks.second * count, count * sizeof *second);
    }
    fct_exchange_release(round);
    return status;
}

/* Returns the entry of a collective of the closed interval; an empty entry if it is not kept. */
static op_entry entry_at(const op_agreement *a, uint64_t index) {
    const uint64_t number = a->first + index;
    const bool kept = a->entries != NULL && index < a->closed && number + OP_ENTRIES >= a->total;
    return kept ? a->entries[number % OP_ENTRIES] : (op_entry){0};
}

/* Bisects the hashes of the two ranks in [low, high). Writes the index of the first collective that
 * differs, or `high`. */
static int find_index(const op_agreement *a, fct_pg *pg, rank_pair ranks, uint64_t low,
                      uint64_t high, uint64_t *index) {
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        const int64_t hash = (int64_t)entry_at(a, middle).hash;
        int64_t first = 0, second = 0;
        if (exchange(pg, &hash, 1, ranks, &first, &second) != 0) {
            return -1;
        }
        if (first != second) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    *index = low;
    return 0;
}

static void describe_entry(const op_entry *entry, const op_entry *peer, int64_t rank, char *text,
                           size_t bytes) {
    if (entry->kind <= FCT_OP_ALL_REDUCE && entry->hash != 0) {
        op_label_describe(&entry->label, &peer->label, (fct_op_kind)entry->kind, (int)rank, text,
                          bytes);
        return;
    }
    (void)snprintf(text, bytes, "rank %d %s", (int)rank,
                   entry->kind == OP_AGREEMENT         ? "ends its backward"
                   : entry->kind == OP_PLAN_COMPARISON ? "begins another model"
                   : entry->kind == OP_OF_TORCH        ? "issues a collective of torch's functions"
                                                       : "issues no other collective");
}

/* `note` follows "collective mismatch". */
static void write_difference(const op_entry *first, const op_entry *second, rank_pair ranks,
                             const char *note, fct_difference *difference) {
    char texts[2][176];
    describe_entry(first, second, ranks.first, texts[0], sizeof texts[0]);
    describe_entry(second, first, ranks.second, texts[1], sizeof texts[1]);
    (void)snprintf(difference->text, sizeof difference->text, "collective mismatch%s: %s, %s", note,
                   texts[0], texts[1]);
}

static int exchange_entries(const op_entry *own, fct_pg *pg, rank_pair ranks, op_entry *first,
                            op_entry *second) {
    return exchange(pg, (const int64_t *)(const void *)own, ENTRY_INTEGERS, ranks,
                    (int64_t *)(void *)first, (int64_t *)(void *)second);
}

int op_entry_describe_difference(const op_entry *own, fct_pg *pg, int64_t rank,
                                 fct_difference *difference) {
    assert(own != NULL && rank > 0 && rank < fct_pg_world_size(pg));
    const rank_pair ranks = {0, rank};
    op_entry first, second;
    if (exchange_entries(own, pg, ranks, &first, &second) != 0) {
        return -1;
    }
    write_difference(&first, &second, ranks, "", difference);
    return 0;
}

/* Writes what the two ranks issue where their intervals first differ. `counts` are their numbers of
 * collectives. All ranks call this function. */
static int describe_difference(const op_agreement *a, fct_pg *pg, rank_pair ranks,
                               const uint64_t counts[2], fct_difference *difference) {
    const uint64_t common = counts[0] < counts[1] ? counts[0] : counts[1];
    const uint64_t longest = counts[0] < counts[1] ? counts[1] : counts[0];
    uint64_t index = longest > OP_ENTRIES ? longest - OP_ENTRIES : 0;
    const uint64_t oldest = index;
    if (index < common && find_index(a, pg, ranks, index, common, &index) != 0) {
        return -1;
    }
    op_entry own = entry_at(a, index), first, second;
    if (exchange_entries(&own, pg, ranks, &first, &second) != 0) {
        return -1;
    }
    if (first.hash == 0 && second.hash == 0) {
        (void)snprintf(difference->text, sizeof difference->text,
                       "collective mismatch: ranks %d and %d issued different collectives",
                       (int)ranks.first, (int)ranks.second);
        return 0;
    }
    write_difference(&first, &second, ranks,
                     index == oldest && oldest > 0 ? " at or before this collective" : "",
                     difference);
    return 0;
}

/* Finds the first rank whose value `field` is known, and the first rank that differs from it. The
 * `length` integers from `field` on are compared. */
static bool find_ranks(const int64_t *summaries, int64_t world, int field, size_t length,
                       rank_pair *ranks) {
    int64_t first = 0;
    while (first < world && summaries[first * SUMMARY_INTEGERS + field] == 0) {
        first++;
    }
    for (int64_t rank = first + 1; rank < world; rank++) {
        const int64_t *values = summaries + rank * SUMMARY_INTEGERS + field;
        if (values[0] != 0 && memcmp(values, summaries + first * SUMMARY_INTEGERS + field,
                                     length * sizeof *values) != 0) {
            *ranks = (rank_pair){first, rank};
            return true;
        }
    }
    return false;
}

/* Finds and describes the first difference. All ranks call this function. Checksums are compared
 * only if the ranks have issued the same collectives. */
static int compare_summaries(const op_agreement *a, fct_pg *pg, const int64_t *summaries,
                             fct_difference *difference) {
    const int64_t world = fct_pg_world_size(pg);
    rank_pair ranks;
    if (find_ranks(summaries, world, HASH, 2, &ranks)) {
        const uint64_t counts[2] = {(uint64_t)summaries[ranks.first * SUMMARY_INTEGERS + COUNT],
                                    (uint64_t)summaries[ranks.second * SUMMARY_INTEGERS + COUNT]};
        return describe_difference(a, pg, ranks, counts, difference);
    }
    if (find_ranks(summaries, world, CHECKSUMS, 1, &ranks)) {
        return op_checksums_describe(&a->checksums, pg, difference->text, sizeof difference->text);
    }
    return 0;
}

int op_agreement_await(op_agreement *a, fct_pg *pg, fct_difference *difference) {
    assert(pg != NULL && difference != NULL);
    difference->text[0] = '\0';
    fct_exchange *round = a->round;
    const int64_t *summaries = NULL;
    if (round == NULL) {
        return 0;
    }
    fct_exchange_retain(round); /* a signal handler may run another backward during the wait */
    int status = fct_exchange_wait(round, &summaries);
    if (status == 0 && a->round == round) {
        fct_exchange_release(a->round);
        a->round = NULL;
        status = compare_summaries(a, pg, summaries, difference);
    }
    fct_exchange_release(round);
    return status;
}

/* ---- lists of two ranks ---- */

size_t op_agreement_copy(const op_agreement *a, op_entry *entries, uint64_t *first) {
    const uint64_t kept = a->entries == NULL ? 0 : a->total < OP_ENTRIES ? a->total : OP_ENTRIES;
    assert(entries != NULL && first != NULL);
    *first = a->total - kept;
    for (uint64_t i = 0; i < kept; i++) {
        entries[i] = a->entries[(*first + i) % OP_ENTRIES];
    }
    return (size_t)kept;
}

/* Returns the entry with this number, or an empty one. */
static op_entry entry_with_number(const op_entry_list *list, uint64_t number) {
    const bool is_listed = number >= list->first && number - list->first < list->count;
    op_entry entry = {0};
    if (is_listed) {
        const char *entries = (const char *)list->entries;
        memcpy(&entry, entries + (number - list->first) * sizeof entry, sizeof entry);
    }
    return entry;
}

/* A collective without a label counts as equal to all others. */
static bool is_equal(const op_entry *a, const op_entry *b) {
    return a->hash == 0 || b->hash == 0 ||
           (a->kind == b->kind && op_label_is_equal(&a->label, &b->label));
}

/* Describes the first checksum that differs between two ranks. Unknown checksums do not differ. */
static void describe_data(const op_entry_list *a, const op_entry_list *b, char *text,
                          size_t bytes) {
    const size_t count = a->count < b->count ? a->count : b->count;
    for (uint64_t i = 0; i < count; i++) {
        const op_entry first = entry_with_number(a, i), second = entry_with_number(b, i);
        if (first.hash == 0 || second.hash == 0 || first.hash == second.hash ||
            first.kind != second.kind) {
            continue;
        }
        (void)snprintf(
            text, bytes,
            "different data after the %s of '%s' (step %u, %s): rank %d has checksum "
            "%016llx, rank %d has %016llx",
            first.kind == OP_GATHERED_DATA ? "all-gather" : "all-reduce", first.label.name,
            (unsigned)first.label.step, fct_pass_name(first.label.pass), (int)a->rank,
            (unsigned long long)first.hash, (int)b->rank, (unsigned long long)second.hash);
        return;
    }
    (void)snprintf(text, bytes,
                   "different data on ranks %d and %d after a collective that is not recorded any "
                   "more",
                   (int)a->rank, (int)b->rank);
}

void op_entries_describe_difference(const op_entry_list *a, const op_entry_list *b, bool issued,
                                    fct_difference *difference) {
    assert(a != NULL && b != NULL && difference != NULL);
    const rank_pair ranks = {a->rank, b->rank};
    const uint64_t end_a = a->first + a->count, end_b = b->first + b->count;
    const uint64_t end = end_a < end_b ? end_a : end_b;
    const uint64_t largest_end = end_a < end_b ? end_b : end_a;
    const uint64_t oldest = a->first < b->first ? b->first : a->first;
    uint64_t number = oldest;
    op_entry first = entry_with_number(a, number), second = entry_with_number(b, number);
    if (first.kind >= OP_GATHERED_DATA || second.kind >= OP_GATHERED_DATA) {
        describe_data(a, b, difference->text, sizeof difference->text);
        return;
    }
    /* An equal label may follow a different one; an equal hash does not. */
    const bool may_be_earlier = issued && oldest > 0 && first.hash != second.hash;
    while (number < end && is_equal(&first, &second)) {
        number++;
        first = entry_with_number(a, number);
        second = entry_with_number(b, number);
    }
    if (issued && number >= end && a->count > 0 && b->count > 0) {
        first = entry_with_number(a, end_a - 1);
        second = entry_with_number(b, end_b - 1);
        write_difference(&first, &second, ranks, " before these collectives", difference);
    } else if (number < largest_end) {
        write_difference(&first, &second, ranks,
                         may_be_earlier ? " at or before this collective" : "", difference);
    } else {
        (void)snprintf(difference->text, sizeof difference->text,
                       "collective mismatch: ranks %d and %d issued collectives of different sizes",
                       (int)a->rank, (int)b->rank);
    }
}
