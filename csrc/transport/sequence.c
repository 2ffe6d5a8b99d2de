/* Comparison of the sizes of collectives; see sequence.h. Owns the handler of this process. */
#include "sequence.h"

#include <assert.h>
#include <stdio.h>

#include "../bridge/error.h"
#include "hash.h"

static op_departure_handler handler;

void op_sequence_set_handler(op_departure_handler new_handler) {
    handler = new_handler;
}

void op_sequence_fini(op_sequence *s) {
    assert(s->round == NULL || !s->ended);
    fct_exchange_release(s->round);
    op_prediction_fini(&s->prediction);
    *s = (op_sequence){0};
}

uint64_t op_signature(uint64_t kind, uint64_t bytes) {
    const uint64_t hash = fct_hash_add(fct_hash_add(FCT_HASH_EMPTY, kind), bytes);
    return hash != 0 ? hash : 1;
}

bool op_sequence_expects(const op_sequence *s, uint64_t signature) {
    if (s->ended) {
        return true;
    }
    if (s->required != 0) {
        return signature == 0 || signature == s->required;
    }
    const uint64_t predicted = s->round == NULL ? op_prediction_next(&s->prediction) : 0;
    return predicted != 0 && (signature == 0 || signature == predicted);
}

/* Issues an exchange. gloo must not match it with a collective of another size. So the exchange is
 * an all-to-all, up to 64 ranks. Agreements are all-to-alls, too: if the other ranks may issue one,
 * the exchange is an all-gather. */
static int start_exchange(op_sequence *s, fct_pg *pg, uint64_t signature) {
    const int64_t value = (int64_t)signature;
    const int status = s->agreement_may_follow
                           ? fct_exchange_start(pg, &value, 1, &s->round)
                           : fct_exchange_start_distinct(pg, &value, 1, &s->round);
    s->offered = signature;
    return status;
}

/* Waits for the exchange. Writes the first rank whose signature differs from that of rank 0, or 0.
 */
static int read_round(op_sequence *s, fct_pg *pg, int64_t *rank) {
    const int64_t world = fct_pg_world_size(pg);
    const int64_t *signatures = NULL;
    fct_exchange *round = s->round;
    *rank = 0;
    fct_exchange_retain(round); /* a signal handler may run another collective during the wait */
    const int status = fct_exchange_wait(round, &signatures);
    if (status == 0 && s->round == round) {
        for (int64_t i = 0; i < world; i++) {
            s->ended = s->ended || signatures[i] == 0;
            *rank = *rank == 0 && signatures[i] != signatures[0] ? i : *rank;
        }
        fct_exchange_release(s->round);
        s->round = NULL;
    }
    fct_exchange_release(round);
    return status;
}

/* Describes that this rank issues another collective than the other ranks. */
static void describe_change(fct_pg *pg, fct_difference *difference) {
    (void)snprintf(difference->text, sizeof difference->text,
                   "collective mismatch: rank %d issues another collective than before an "
                   "exception interrupted it",
                   (int)fct_pg_rank(pg));
}

static int raise_issued_by_handler(void) {
    fct_error_runtime("a signal handler issued a collective while this rank waited to issue one");
    return -1;
}

/* Waits until all ranks depart. Fails if a signal handler has issued another collective meanwhile.
 */
static int depart(op_sequence *s, fct_pg *pg, uint64_t signature, const op_entry *entry) {
    const uint64_t number = s->prediction.count;
    bool is_certain = handler == NULL;
    const int status = handler != NULL ? handler(pg, number, signature, entry, &is_certain) : 0;
    if (s->prediction.count == number) {
        s->required = is_certain ? signature : 0;
    } else if (status == 0) {
        return raise_issued_by_handler();
    }
    return status;
}

int op_sequence_compare(op_sequence *s, fct_pg *pg, uint64_t signature, const op_entry *entry,
                        fct_difference *difference) {
    assert(!op_sequence_expects(s, signature) && difference != NULL);
    int64_t rank = 0;
    difference->text[0] = '\0';
    if (!op_prediction_reserve(&s->prediction)) {
        fct_error_no_memory();
        return -1;
    }
    if (s->required != 0) {
        describe_change(pg, difference);
        return 0;
    }
    if (s->round == NULL && op_prediction_next(&s->prediction) != 0) {
        return depart(s, pg, signature, entry);
    }
    if (s->round == NULL) {
        if (start_exchange(s, pg, signature) != 0) {
            return -1;
        }
    }
    const uint64_t offered = s->offered, number = s->prediction.count;
    if (read_round(s, pg, &rank) != 0) {
        return -1;
    }
    if (s->prediction.count != number) {
        return raise_issued_by_handler();
    }
    if (s->ended) {
        return 0;
    }
    if (rank != 0) {
        return op_entry_describe_difference(entry, pg, rank, difference);
    }
    if (offered != signature) { /* a signal handler had interrupted the wait */
        s->agreement_may_follow = offered == op_signature(OP_AGREEMENT, 0);
        describe_change(pg, difference);
    }
    return 0;
}

void op_sequence_add(op_sequence *s, uint64_t signature) {
    assert(s->round == NULL);
    if (!s->ended) {
        const uint64_t expected =
            s->required != 0 ? s->required : op_prediction_next(&s->prediction);
        op_prediction_add(&s->prediction, signature != 0 ? signature : expected);
    }
    s->required = 0;
    s->agreement_may_follow = false;
}
