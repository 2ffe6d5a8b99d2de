/* The prediction of a sequence; see prediction.h. */
#include "prediction.h"

#include <assert.h>
#include <stdlib.h>

enum { BUCKET_ENTRIES = 4, BUCKETS = OP_SUCCESSORS / BUCKET_ENTRIES };

/* The lengths of contexts. A repeated sequence is predicted if its longest ambiguous part is
 * shorter than the longest context. A step of gradient accumulation may have 500 collectives. */
static const uint64_t lengths[OP_CONTEXTS] = {2, 8, 64, OP_RECENT};

/* The hash of a context is a polynomial in this base. So one value can be added and one removed. */
static const uint64_t base = UINT64_C(0x9E3779B97F4A7C15);

void op_prediction_fini(op_prediction *p) {
    assert((p->recent == NULL) == (p->successors == NULL));
    free(p->recent);
    free(p->successors);
    *p = (op_prediction){0};
}

/* Returns base to the power of `exponent`. */
static uint64_t power(uint64_t exponent) {
    uint64_t result = 1;
    while (exponent-- > 0) {
        result *= base;
    }
    return result;
}

bool op_prediction_reserve(op_prediction *p) {
    assert((p->recent == NULL) == (p->successors == NULL));
    if (p->recent != NULL) {
        return true;
    }
    uint64_t *recent = (uint64_t *)calloc(OP_RECENT, sizeof *recent);
    op_successor *successors = (op_successor *)calloc(OP_SUCCESSORS, sizeof *successors);
    if (recent == NULL || successors == NULL) {
        free(recent);
        free(successors);
        return false;
    }
    p->recent = recent;
    p->successors = successors;
    for (int i = 0; i < OP_CONTEXTS; i++) {
        p->factors[i] = power(lengths[i] - 1);
    }
    return true;
}

/* Returns the key of the current context of length lengths[i]. */
static uint64_t context_key(const op_prediction *p, int i) {
    uint64_t key = (p->contexts[i] ^ lengths[i]) * base;
    key ^= key >> 29;
    return key != 0 ? key : 1;
}

/* Returns the entry of a context, or NULL. */
static op_successor *find_successor(const op_prediction *p, uint64_t key) {
    op_successor *bucket = &p->successors[key % BUCKETS * BUCKET_ENTRIES];
    for (int i = 0; i < BUCKET_ENTRIES; i++) {
        if (bucket[i].context == key) {
            return &bucket[i];
        }
    }
    return NULL;
}

/* Adds an entry. In a full bucket it replaces another one. */
static void add_successor(op_prediction *p, uint64_t key, uint64_t value) {
    op_successor *bucket = &p->successors[key % BUCKETS * BUCKET_ENTRIES];
    int i = 0;
    while (i < BUCKET_ENTRIES && bucket[i].context != 0) {
        i++;
    }
    bucket[i < BUCKET_ENTRIES ? (uint64_t)i : (key >> 32) % BUCKET_ENTRIES] =
        (op_successor){key, value};
}

/* Finds the longest current context that is known. */
static void find_longest(op_prediction *p) {
    int i = OP_CONTEXTS;
    p->next = NULL;
    while (i > 0 && p->next == NULL) {
        p->next = p->count >= lengths[i - 1] ? find_successor(p, context_key(p, i - 1)) : NULL;
        i -= p->next == NULL ? 1 : 0;
    }
    p->longer = i;
}

uint64_t op_prediction_next(const op_prediction *p) {
    return p->next != NULL ? p->next->value : 0;
}

/* Adds the next longer context only after a failed prediction, so that the table has space for long
 * sequences. */
static void learn(op_prediction *p, uint64_t value) {
    if (p->next != NULL && p->next->value == value) {
        return;
    }
    if (p->next != NULL) {
        p->next->value = 0;
    }
    if (p->longer < OP_CONTEXTS && p->count >= lengths[p->longer]) {
        add_successor(p, context_key(p, p->longer), value);
    }
}

void op_prediction_add(op_prediction *p, uint64_t value) {
    assert(value != 0 && p->recent != NULL);
    learn(p, value);
    for (int i = 0; i < OP_CONTEXTS; i++) {
        const bool complete = p->count >= lengths[i];
        const uint64_t oldest = complete ? op_prediction_at(p, p->count - lengths[i]) : 0;
        p->contexts[i] = (p->contexts[i] - oldest * p->factors[i]) * base + value;
    }
    p->recent[p->count % OP_RECENT] = value;
    p->count++;
    find_longest(p);
}

uint64_t op_prediction_at(const op_prediction *p, uint64_t number) {
    const bool kept = number < p->count && number + OP_RECENT >= p->count;
    return kept ? p->recent[number % OP_RECENT] : 0;
}
