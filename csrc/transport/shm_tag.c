/* Tags of messages; see shm_tag.h. Bits 0-1: operation. Bits 2-7: dtype. Bits 8-31: cache
 * lines modulo 2^24. */
#include "shm_tag.h"

#include <assert.h>
#include <stdio.h>

enum { CACHE_LINE = 64 };

static const char *const kind_names[] = {"all_gather", "reduce_scatter", "all_reduce", "?"};

uint32_t shm_tag_make(fct_op_kind kind, int32_t dtype, size_t bytes) {
    const uint32_t lines = (uint32_t)((bytes + CACHE_LINE - 1) / CACHE_LINE);
    assert(dtype >= 0 && dtype < 0x40);
    return lines << 8 | (uint32_t)dtype << 2 | (uint32_t)kind;
}

fct_op_kind shm_tag_kind(uint32_t tag) {
    const uint32_t kind = tag & 3;
    return kind <= FCT_OP_ALL_REDUCE ? (fct_op_kind)kind : FCT_OP_ALL_REDUCE;
}

void shm_tag_describe(uint32_t tag, const char *(*dtype_name)(int32_t), char *text, size_t bytes) {
    (void)snprintf(text, bytes, "%s of %s, up to %llu bytes per rank", kind_names[tag & 3],
                   dtype_name((int32_t)(tag >> 2 & 0x3f)),
                   (unsigned long long)(tag >> 8) * CACHE_LINE);
}
