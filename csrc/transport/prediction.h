/* Predicts the next value of a sequence from its earlier values.
 *
 * Ranks that have added the same values predict the same. For several lengths n the struct maps the
 * last n values (the context) to the value that followed. The longest context in the table gives
 * the prediction. If two different values have followed it, there is no prediction, and
 * op_prediction_add also adds the next longer context. So a sequence that repeats itself is
 * predicted after a few repetitions.
 *
 * Precondition of all functions: the struct was zeroed before its first use. */
#ifndef FSDP_C_TRANSPORT_PREDICTION_H
#define FSDP_C_TRANSPORT_PREDICTION_H

#include <stdbool.h>
#include <stdint.h>

enum { OP_CONTEXTS = 4, OP_RECENT = 512, OP_SUCCESSORS = 8192 };

/* The value that followed a context. */
typedef struct op_successor {
    uint64_t context; /* hash of its values and their number; 0: the entry is empty */
    uint64_t value;   /* 0: different values have followed; no prediction */
} op_successor;

typedef struct op_prediction {
    uint64_t count;                 /* values of the sequence */
    uint64_t contexts[OP_CONTEXTS]; /* hashes of the last n values, for each length n */
    uint64_t factors[OP_CONTEXTS];  /* weight of the oldest value in each hash */
    uint64_t *recent;               /* [OP_RECENT] the last values, by number; owned */
    op_successor *successors;       /* [OP_SUCCESSORS] in buckets by hash of the context; owned */
    op_successor *next;             /* of the longest current context that is known; NULL: none */
    int longer;                     /* index of the next longer length */
} op_prediction;

/* Releases the memory. The struct can be used again. */
void op_prediction_fini(op_prediction *p);
/* Allocates the memory, unless it is allocated. Returns false on failure. Call it before the first
 * value. */
bool op_prediction_reserve(op_prediction *p);
/* Adds the next value, which is not 0. */
void op_prediction_add(op_prediction *p, uint64_t value);
/* Returns the predicted next value, or 0 if there is none. */
uint64_t op_prediction_next(const op_prediction *p);
/* Returns the value with this number, from 0 on, or 0 if it is not among the last OP_RECENT. */
uint64_t op_prediction_at(const op_prediction *p, uint64_t number);

#endif
