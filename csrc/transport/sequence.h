/* Compares the sizes of collectives between ranks before a backend moves the data.
 *
 * gloo ends the process if a message has another size than expected. So before each collective over
 * gloo a rank determines whether all ranks issue one with the same signature: kind and size. Most
 * collectives need no message, because a training step repeats the previous one:
 *
 *     prediction on all ranks   collective of this rank   action of this rank
 *     signature                 equals the prediction     issues the collective
 *     signature                 differs from it           calls the handler before it issues
 *     none                      any                       exchanges signatures with all ranks
 *
 * In the second case the rank departs. Other ranks may have issued the predicted collective
 * already, and cannot join an exchange over gloo. So the handler (op_departure_handler) uses the
 * stores of torch.distributed (fsdp_c/_runtime/departures.py).
 *
 * The struct belongs to the negotiation of the process group, and the GIL guards it. Precondition
 * of all functions: the struct was zeroed before its first use. */
#ifndef FSDP_C_TRANSPORT_SEQUENCE_H
#define FSDP_C_TRANSPORT_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "../bridge/group.h"
#include "agreement.h"
#include "prediction.h"

typedef struct op_sequence {
    op_prediction prediction; /* of signatures */
    fct_exchange *round;      /* exchange of the next signature; NULL: none, or read */
    uint64_t offered;         /* this rank's signature in `round` */
    uint64_t required; /* this rank must issue this signature next, as the others do; 0: none */
    bool agreement_may_follow; /* the other ranks may issue an agreement next */
    bool ended;                /* a rank sent signature 0: the ranks compare no further sizes */
} op_sequence;

/* Returns 0 if all ranks issue the collective with this number and signature. Returns -1 with a
 * Python exception if a rank issues another one, or if a signal handler has raised an exception
 * meanwhile. `entry` describes this rank's collective. Always writes *is_certain: whether the other
 * ranks issue this collective. Then the next collective of this rank must be the same one, also
 * after -1. */
typedef int (*op_departure_handler)(fct_pg *pg, uint64_t number, uint64_t signature,
                                    const op_entry *entry, bool *is_certain);
/* Sets the handler of this process. Without one, a rank that departs issues its collective at once.
 */
void op_sequence_set_handler(op_departure_handler handler);

/* Releases the memory. The struct can be used again. */
void op_sequence_fini(op_sequence *s);
/* Returns the signature of a collective: a hash of its kind (of an op_entry) and the bytes of this
 * rank's input. Never 0. */
uint64_t op_signature(uint64_t kind, uint64_t bytes);
/* Whether the rank may issue a collective with this signature without a comparison. Signature 0
 * means that the size is unknown; it matches any prediction. */
bool op_sequence_expects(const op_sequence *s, uint64_t signature);
/* Compares the signature of the next collective with those of all ranks. Precondition: it is not
 * expected. Writes the difference of an exchange, or "". If this rank departs, a difference is a
 * Python exception. A signal handler may interrupt the wait; a repeated call continues the same
 * exchange. */
FCT_CHECK int op_sequence_compare(op_sequence *s, fct_pg *pg, uint64_t signature,
                                  const op_entry *entry, fct_difference *difference);
/* Adds a collective that this rank has issued, after it was expected or compared. */
void op_sequence_add(op_sequence *s, uint64_t signature);

#endif
