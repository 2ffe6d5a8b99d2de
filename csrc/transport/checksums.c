/* Checksums of the data of collectives; see checksums.h. */
#include "checksums.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"

enum { GATHERS = 0, ALL_REDUCES };
enum { VALUES = OP_CHECKSUM_KINDS * OP_CHECKSUMS };

void op_checksums_fini(op_checksums *c) {
    for (int kind = 0; kind < OP_CHECKSUM_KINDS; kind++) {
        assert(c->kinds[kind].count <= c->kinds[kind].total);
        free(c->kinds[kind].entries);
    }
    free(c->intervals);
    memset(c, 0, sizeof *c);
}

void op_checksums_add(op_checksums *c, const fct_op_tag *tag, uint64_t value) {
    assert(tag->kind != FCT_OP_REDUCE_SCATTER);
    op_checksum_list *list = &c->kinds[tag->kind == FCT_OP_ALL_GATHER ? GATHERS : ALL_REDUCES];
    if (list->entries == NULL) {
        list->entries = (op_checksum *)calloc(OP_CHECKSUMS_KEPT, sizeof *list->entries);
    }
    /* If the allocation failed, op_checksums_describe() cannot name the collective. */
    if (list->entries != NULL) {
        list->entries[list->total % OP_CHECKSUMS_KEPT] = (op_checksum){value, tag->label};
    }
    list->unknown = list->unknown || value == 0;
    list->hash = fct_hash_add(list->count == 0 ? FCT_HASH_EMPTY : list->hash, value);
    list->count++;
    list->total++;
}

void op_checksums_drop(op_checksums *c) {
    for (int kind = 0; kind < OP_CHECKSUM_KINDS; kind++) {
        assert(c->kinds[kind].count <= c->kinds[kind].total);
        c->kinds[kind].unknown = c->kinds[kind].unknown || c->kinds[kind].count > 0;
        c->kinds[kind].count = 0;
    }
}

bool op_checksums_any(const op_checksums *c) {
    return c->kinds[GATHERS].count + c->kinds[ALL_REDUCES].count > 0;
}

uint64_t op_checksums_close(op_checksums *c) {
    uint64_t hash = FCT_HASH_EMPTY;
    bool known = op_checksums_any(c);
    assert(c->kinds[GATHERS].count <= c->kinds[GATHERS].total);
    for (int kind = 0; kind < OP_CHECKSUM_KINDS; kind++) {
        op_checksum_list *list = &c->kinds[kind];
        known = known && !list->unknown;
        hash = fct_hash_add(hash, list->count);
        hash = fct_hash_add(hash, list->count > 0 ? list->hash : 0);
        list->closed = list->count;
        list->first = list->total - list->count;
        list->count = 0;
        list->unknown = false;
    }
    return !known ? 0 : hash != 0 ? hash : 1;
}

/* Returns a checksum by its number. Returns NULL if there is none, or if a later one has replaced
 * it. */
static const op_checksum *find(const op_checksum_list *list, uint64_t number) {
    const bool is_kept =
        list->entries != NULL && number < list->total && number + OP_CHECKSUMS_KEPT >= list->total;
    return is_kept ? &list->entries[number % OP_CHECKSUMS_KEPT] : NULL;
}

/* ---- intervals on devices with streams ---- */

uint64_t op_checksums_number_interval(op_checksums *c, uint64_t collectives) {
    enum { PLACE_BITS = 16 };
    assert(collectives < UINT64_MAX >> PLACE_BITS);
    const uint64_t first = (collectives << PLACE_BITS) + 1;
    c->last_number = c->last_number >= first ? c->last_number + 1 : first;
    return c->last_number;
}

void op_checksums_end_interval(op_checksums *c, uint64_t number) {
    assert(c->intervals != NULL || c->interval_count == 0);
    if (!op_checksums_any(c)) {
        return;
    }
    op_interval interval = {.number = number, .hash = op_checksums_close(c)};
    for (int kind = 0; kind < OP_CHECKSUM_KINDS; kind++) {
        interval.first[kind] = c->kinds[kind].first;
        interval.count[kind] = c->kinds[kind].closed;
    }
    if (c->intervals == NULL) {
        c->intervals = (op_interval *)calloc(OP_INTERVALS, sizeof *c->intervals);
    }
    if (c->intervals != NULL) { /* otherwise the interval is not compared */
        c->intervals[c->interval_count++ % OP_INTERVALS] = interval;
    }
}

const op_interval *op_checksums_interval(const op_checksums *c, size_t index) {
    const uint64_t oldest = c->interval_count > OP_INTERVALS ? c->interval_count - OP_INTERVALS : 0;
    return oldest + index < c->interval_count ? &c->intervals[(oldest + index) % OP_INTERVALS]
                                              : NULL;
}

size_t op_checksums_copy(const op_checksums *c, uint64_t number, op_entry *entries,
                         size_t capacity) {
    static const uint64_t kinds[] = {OP_GATHERED_DATA, OP_REDUCED_DATA};
    const op_interval *interval = op_checksums_interval(c, 0);
    size_t count = 0;
    for (size_t i = 1; interval != NULL && interval->number != number; i++) {
        interval = op_checksums_interval(c, i);
    }
    for (int kind = 0; interval != NULL && kind < OP_CHECKSUM_KINDS; kind++) {
        for (uint64_t i = 0; i < interval->count[kind] && count < capacity; i++) {
            const op_checksum *checksum = find(&c->kinds[kind], interval->first[kind] + i);
            op_entry *entry = &entries[count++];
            *entry = (op_entry){.kind = kinds[kind]};
            if (checksum != NULL) {
                entry->hash = checksum->value;
                entry->label = checksum->label;
            }
        }
    }
    return count;
}

/* ---- the first difference ---- */

/* Returns checksum `index` among the last OP_CHECKSUMS checksums of the closed interval, the oldest
 * first. Returns NULL if there is none. */
static const op_checksum *entry_at(const op_checksum_list *list, uint64_t index) {
    const uint64_t skipped = list->closed > OP_CHECKSUMS ? list->closed - OP_CHECKSUMS : 0;
    return skipped + index < list->closed ? find(list, list->first + skipped + index) : NULL;
}

/* Returns the number of ranks with this value. */
static int64_t count_ranks(const int64_t *values, int64_t world, int64_t value) {
    int64_t ranks = 0;
    for (int64_t rank = 0; rank < world; rank++) {
        ranks += values[rank * VALUES] == value ? 1 : 0;
    }
    return ranks;
}

/* Finds the value of most ranks, and the first rank with another value. Unknown values are equal to
 * all. Returns false if no rank differs. The value of rank r is values[r * VALUES]. */
static bool find_rank(const int64_t *values, int64_t world, int64_t *rank, int64_t *common) {
    int64_t most = 0;
    *common = 0;
    for (int64_t i = 0; i < world; i++) {
        const int64_t value = values[i * VALUES];
        const int64_t ranks =
            value != 0 && value != *common ? count_ranks(values, world, value) : 0;
        if (ranks > most) {
            most = ranks;
            *common = value;
        }
    }
    for (*rank = 0; *rank < world; (*rank)++) {
        const int64_t value = values[*rank * VALUES];
        if (value != 0 && value != *common) {
            return true;
        }
    }
    return false;
}

/* Describes the first all-gather with different checksums, or else the first such all-reduce.
 * `values`: VALUES integers for each rank. */
static void describe(const op_checksums *c, const int64_t *values, int64_t world, char *text,
                     size_t bytes) {
    static const char *const names[] = {"all-gather", "all-reduce"};
    for (int64_t i = 0; i < VALUES; i++) {
        int64_t rank = 0, common = 0;
        if (!find_rank(values + i, world, &rank, &common)) {
            continue;
        }
        const op_checksum *entry =
            entry_at(&c->kinds[i / OP_CHECKSUMS], (uint64_t)i % OP_CHECKSUMS);
        const fct_op_label unknown = {0};
        const fct_op_label *label = entry != NULL ? &entry->label : &unknown;
        (void)snprintf(
            text, bytes,
            "different data after the %s of '%s' (step %u, %s): rank %d has checksum "
            "%016llx, %d of %d ranks have %016llx",
            names[i / OP_CHECKSUMS], label->name, (unsigned)label->step, fct_pass_name(label->pass),
            (int)rank, (unsigned long long)values[rank * VALUES + i],
            (int)count_ranks(values + i, world, common), (int)world, (unsigned long long)common);
        return;
    }
    (void)snprintf(text, bytes, "different data after a collective that is not recorded any more");
}

int op_checksums_describe(const op_checksums *c, fct_pg *pg, char *text, size_t bytes) {
    assert(pg != NULL && bytes > 0);
    int64_t own[VALUES];
    const int64_t *values = NULL;
    fct_exchange *round = NULL;
    for (size_t i = 0; i < VALUES; i++) {
        const op_checksum *entry = entry_at(&c->kinds[i / OP_CHECKSUMS], i % OP_CHECKSUMS);
        own[i] = entry != NULL ? (int64_t)entry->value : 0;
    }
    if (fct_exchange_start_distinct(pg, own, VALUES, &round) != 0) {
        return -1;
    }
    const int status = fct_exchange_wait(round, &values);
    if (status == 0) {
        describe(c, values, fct_pg_world_size(pg), text, bytes);
    }
    fct_exchange_release(round);
    return status;
}
