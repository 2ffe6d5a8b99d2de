/* Hashes of the labels of the latest collectives of a process group, in blocks of different sizes.
 * Ranks compare these hashes at different times, while they issue any number of collectives.
 *
 * A block of level k has 2^k collectives, and its first number is a multiple of 2^k. Of each level
 * the latest OP_LABEL_BLOCKS complete blocks are kept. So a block is kept until the rank has issued
 * 15 * 2^k further collectives: large blocks bridge long times, small ones locate a difference. */
#ifndef FSDP_C_TRANSPORT_LABEL_BLOCKS_H
#define FSDP_C_TRANSPORT_LABEL_BLOCKS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { OP_LABEL_BLOCKS = 16, OP_LABEL_LEVELS = 21, OP_LABEL_BLOCKS_KEPT = 336 };

typedef struct op_label_block {
    uint64_t first; /* number of the first collective */
    uint64_t count; /* of collectives */
    uint64_t hash;
} op_label_block;

typedef struct op_label_rows op_label_rows;

/* One thread at a time adds. Other threads may read meanwhile. Precondition of all functions: the
 * struct was zeroed before its first use. */
typedef struct op_label_blocks {
    uint64_t count;              /* of collectives so far */
    op_label_rows *_Atomic rows; /* NULL: none yet, or no memory */
} op_label_blocks;

/* Releases the memory. The struct can be used again. */
void op_label_blocks_fini(op_label_blocks *b);
/* Adds a collective. `label`: the hash of its label; 0: unknown. */
void op_label_blocks_add(op_label_blocks *b, uint64_t label);
/* Copies the blocks without unknown labels to `list`, which has space for OP_LABEL_BLOCKS_KEPT.
 * Small blocks come first. Returns how many there are. */
size_t op_label_blocks_copy(const op_label_blocks *b, op_label_block *list);

#endif
