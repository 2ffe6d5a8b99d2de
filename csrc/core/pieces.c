/* Pieces of a row; see pieces.h. */
#include "pieces.h"

#include <stdlib.h>
#include <string.h>

fc_status fc_pieces_begin(fc_pieces *p, size_t count) {
    fc_pieces_drop(p);
    if (count <= p->capacity) {
        return FC_OK;
    }
    fct_tensor **grown = (fct_tensor **)calloc(count, sizeof *grown);
    if (grown == NULL) {
        return FC_ENOMEM;
    }
    free((void *)p->tensors);
    p->tensors = grown;
    p->capacity = count;
    return FC_OK;
}

void fc_pieces_add(fc_pieces *p, fct_tensor *piece) {
    p->tensors[p->count++] = piece;
}

void fc_pieces_drop(fc_pieces *p) {
    while (p->count > 0) {
        fct_tensor_release(p->tensors[--p->count]);
    }
}

void fc_pieces_fini(fc_pieces *p) {
    fc_pieces_drop(p);
    free((void *)p->tensors);
    memset(p, 0, sizeof *p);
}
