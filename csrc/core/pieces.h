/* Memory that a row's pieces come from or go to, while a collective is put together and until its
 * result has been handed out: counted references, in the order of the plan's cuts, the rest last.
 * The room between plans, which say what the pieces are, and links, which send them. */
#ifndef FSDP_C_CORE_PIECES_H
#define FSDP_C_CORE_PIECES_H

#include "../torch/torch_abi.h"
#include "status.h"

typedef struct fc_pieces {
    fct_tensor **tensors; /* [capacity]; owned array of counted references */
    size_t count;
    size_t capacity;
} fc_pieces;

/* Room for `count` pieces; there are none then. FC_ENOMEM. */
FC_CHECK fc_status fc_pieces_begin(fc_pieces *p, size_t count);
/* Takes the reference; there must be room. */
void fc_pieces_add(fc_pieces *p, fct_tensor *piece);
/* Lets all pieces go, and keeps the room. */
void fc_pieces_drop(fc_pieces *p);
void fc_pieces_fini(fc_pieces *p);

#endif
