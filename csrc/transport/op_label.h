/* Labels of collectives: their comparison, and the text of a mismatch. */
#ifndef FSDP_C_TRANSPORT_OP_LABEL_H
#define FSDP_C_TRANSPORT_OP_LABEL_H

#include <stdbool.h>

#include "op_tag.h"

/* Sets the label of the next collective that this thread submits. NULL: no label. The calls of
 * c10d between the caller and the transport have no parameter for the label. */
void op_label_set_next(const fct_op_label *label);
/* Returns the label of op_label_set_next, and removes it. Without one, returns an unknown label. */
fct_op_label op_label_take_next(void);

/* Whether two ranks issue the same collective. An unknown label is equal to all labels. */
bool op_label_is_equal(const fct_op_label *a, const fct_op_label *b);
/* Writes what a rank issues, for example "rank 0 gathers 'blocks.3' (step 17, forward)". `peer` is
 * the label that differs. If the names are equal and both labels are of gathers or both of
 * reductions, the text adds the first difference. The order is: model, first 64 parameters,
 * divisor, size, reduction operation, further parameters or factors. A peer may write to `label`
 * and `peer` (shared memory) during the call; the function reads copies. */
void op_label_describe(const fct_op_label *label, const fct_op_label *peer, fct_op_kind kind,
                       int rank, char *text, size_t bytes);

#endif
