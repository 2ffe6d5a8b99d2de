/* Tensors of a pending collective; see chunks.h. Owns the array and one reference per tensor. */
#include "chunks.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/tensor.h"

fc_status fc_chunks_begin(fc_chunks *c, size_t count) {
    assert(c->count <= c->capacity);
    fc_chunks_drop(c);
    if (count <= c->capacity) {
        return FC_OK;
    }
    fct_tensor **grown = (fct_tensor **)calloc(count, sizeof *grown);
    if (grown == NULL) {
        return FC_ENOMEM;
    }
    free((void *)c->tensors);
    c->tensors = grown;
    c->capacity = count;
    return FC_OK;
}

void fc_chunks_add(fc_chunks *c, fct_tensor *tensor) {
    assert(c->count < c->capacity);
    c->tensors[c->count++] = tensor;
}

void fc_chunks_drop(fc_chunks *c) {
    assert(c->count <= c->capacity);
    while (c->count > 0) {
        fct_tensor_release(c->tensors[--c->count]);
    }
}

void fc_chunks_fini(fc_chunks *c) {
    assert(c->count <= c->capacity);
    fc_chunks_drop(c);
    free((void *)c->tensors);
    memset(c, 0, sizeof *c);
}
