/* Hashes of blocks of labels; see label_blocks.h. */
#include "label_blocks.h"

#include <assert.h>
#include <stdlib.h>

#include "hash.h"

static_assert(OP_LABEL_BLOCKS_KEPT == OP_LABEL_BLOCKS * OP_LABEL_LEVELS, "");

typedef struct slot {
    /* Number after the last collective. 0: no block, or the hash is being written. A reader that
     * finds a new hash also finds that the number has changed. */
    _Atomic uint64_t end;
    _Atomic uint64_t hash;
} slot;

/* Row k has the blocks of level k. */
struct op_label_rows {
    slot slots[OP_LABEL_LEVELS][OP_LABEL_BLOCKS];
};

void op_label_blocks_fini(op_label_blocks *b) {
    assert(b->count > 0 || b->rows == NULL);
    free(atomic_load(&b->rows));
    *b = (op_label_blocks){0};
}

/* Returns the slot of the block that ends at `end`. */
static slot *slot_of(op_label_rows *rows, unsigned level, uint64_t end) {
    return &rows->slots[level][(end >> level) % OP_LABEL_BLOCKS];
}

static uint64_t join(uint64_t first, uint64_t second) {
    const uint64_t hash = fct_hash_add(fct_hash_add(FCT_HASH_EMPTY, first), second);
    return first == 0 || second == 0 ? 0 : hash != 0 ? hash : 1;
}

void op_label_blocks_add(op_label_blocks *b, uint64_t label) {
    assert(b->count < UINT64_MAX);
    op_label_rows *rows = atomic_load_explicit(&b->rows, memory_order_relaxed);
    const uint64_t end = ++b->count;
    if (rows == NULL) {
        rows = (op_label_rows *)calloc(1, sizeof *rows);
        atomic_store_explicit(&b->rows, rows, memory_order_release);
    }
    uint64_t hash = label;
    for (unsigned level = 0; rows != NULL && level < OP_LABEL_LEVELS; level++) {
        slot *s = slot_of(rows, level, end);
        atomic_store_explicit(&s->end, 0, memory_order_relaxed);
        atomic_store_explicit(&s->hash, hash, memory_order_release);
        atomic_store_explicit(&s->end, end, memory_order_release);
        if ((end >> level) % 2 == 1) {
            return;
        }
        const uint64_t middle = end - (UINT64_C(1) << level);
        hash = join(atomic_load(&slot_of(rows, level, middle)->hash), hash);
    }
}

size_t op_label_blocks_copy(const op_label_blocks *b, op_label_block *list) {
    assert(list != NULL);
    const op_label_rows *rows = atomic_load_explicit(&b->rows, memory_order_acquire);
    size_t count = 0;
    for (unsigned i = 0; rows != NULL && i < OP_LABEL_BLOCKS_KEPT; i++) {
        const slot *s = &rows->slots[i / OP_LABEL_BLOCKS][i % OP_LABEL_BLOCKS];
        const uint64_t size = UINT64_C(1) << i / OP_LABEL_BLOCKS;
        const uint64_t end = atomic_load_explicit(&s->end, memory_order_acquire);
        const uint64_t hash = atomic_load_explicit(&s->hash, memory_order_acquire);
        if (end != 0 && hash != 0 && end == atomic_load_explicit(&s->end, memory_order_relaxed)) {
            list[count++] = (op_label_block){end - size, size, hash};
        }
    }
    return count;
}
