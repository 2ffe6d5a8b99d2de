/* The prediction of a sequence; see prediction.h. */
#include "prediction.h"

#include <assert.h>
#include <stdlib.h>

/* The lengths of contexts. A step of gradient accumulation is predicted if it has fewer collectives
 * than the longest context. */
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

/* Returns the key of the current context of a length. */
static uint64_t key_of(const op_prediction *p, int length) {
    uint64_t key = (p->contexts[length] ^ lengths[length]) * base;
    key ^= key >> 29;
    return key != 0 ? key : 1;
}

void op_prediction_add(op_prediction *p, uint64_t value) {
    assert(value != 0 && p->recent != NULL);
    for (int i = 0; i < OP_CONTEXTS; i++) {
        const bool complete = p->count >= lengths[i];
        if (complete) {
            const uint64_t key = key_of(p, i);
            op_successor *successor = &p->successors[key % OP_SUCCESSORS];
            if (successor->context != key) {
                *successor = (op_successor){key, value};
            } else if (successor->value != value) {
                successor->value = 0;
            }
        }
        const uint64_t oldest = complete ? op_prediction_at(p, p->count - lengths[i]) : 0;
        p->contexts[i] = (p->contexts[i] - oldest * p->factors[i]) * base + value;
    }
    p->recent[p->count % OP_RECENT] = value;
    p->count++;
}

uint64_t op_prediction_next(const op_prediction *p) {
    for (int i = OP_CONTEXTS - 1; i >= 0; i--) {
        if (p->count >= lengths[i]) {
            const uint64_t key = key_of(p, i);
            const op_successor *successor = &p->successors[key % OP_SUCCESSORS];
            if (successor->context == key) {
                return successor->value;
            }
        }
    }
    return 0;
}

uint64_t op_prediction_at(const op_prediction *p, uint64_t number) {
    const bool kept = number < p->count && number + OP_RECENT >= p->count;
    return kept ? p->recent[number % OP_RECENT] : 0;
}
