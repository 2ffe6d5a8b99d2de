/* Tensors of a pending collective: one per chunk of its plan, in the plan's order. The list holds
 * one counted reference per tensor from the pack on. A gather drops the list after the copy-out, a
 * reduction after the issue of its reduce-scatter. */
#ifndef FSDP_C_CORE_CHUNKS_H
#define FSDP_C_CORE_CHUNKS_H

#include "../bridge/types.h"
#include "status.h"

typedef struct fc_chunks {
    fct_tensor **tensors; /* [capacity]; owned array of counted references */
    size_t count;
    size_t capacity;
} fc_chunks;

/* Releases all tensors and reserves space for `count`. Returns FC_ENOMEM on failure. */
FC_CHECK fc_status fc_chunks_begin(fc_chunks *c, size_t count);
/* Takes the caller's reference. Precondition: fewer than `capacity` tensors are held. */
void fc_chunks_add(fc_chunks *c, fct_tensor *tensor);
/* Releases all tensors. The array is kept for the next collective. */
void fc_chunks_drop(fc_chunks *c);
/* Releases all tensors and frees the array. Safe on a zeroed struct. */
void fc_chunks_fini(fc_chunks *c);

#endif
