/* Checksums of the data of collectives; see checksum.h. */
#include "checksum.h"

#include <assert.h>

#include "../transport/transport.h"
#include "dtype.h"

static int64_t piece_bytes(int64_t remaining) {
    return remaining < FCK_CHECKSUM_PIECE ? remaining : FCK_CHECKSUM_PIECE;
}

void fc_checksum_add_sum(fc_checksum *c, size_t slot, fc_checksum_shard shard, uint64_t sum) {
    assert(c != NULL && shard.rank >= 0);
    const uint64_t of_slot = fct_hash_add(sum, slot + 1);
    c->all += fct_hash_add(of_slot, (uint64_t)shard.rank + 1);
    c->own += shard.is_own ? of_slot : 0;
}

const char *fc_checksum_pack(fc_checksum *c, size_t slot, const fck_segment *segment,
                             const fck_backend *kernels) {
    assert(kernels->checksum != NULL && c != NULL);
    const bool casts = segment->src_dtype != segment->dst_dtype;
    const int64_t target_size = casts ? fc_dtype_size(segment->dst_dtype) : segment->itemsize;
    uint64_t sum = FCT_HASH_EMPTY;
    fck_segment piece = *segment;
    for (int64_t done = 0; done < segment->count; done += piece.count) {
        const int64_t bytes = piece_bytes((segment->count - done) * target_size);
        piece.count = bytes / target_size;
        piece.src = (const char *)segment->src + done * segment->itemsize;
        piece.dst = (char *)segment->dst + done * target_size;
        const char *failure = kernels->pack(&piece, 1, NULL);
        if (failure != NULL) {
            return failure;
        }
        sum = fct_hash_add(sum, kernels->checksum(piece.dst, (size_t)bytes));
    }
    fc_checksum_add_sum(c, slot, (fc_checksum_shard){.is_own = true}, sum);
    return NULL;
}

const char *fc_checksum_add(fc_checksum *c, size_t slot, fc_checksum_shard shard, const void *data,
                            int64_t bytes, void *to, const fck_backend *kernels) {
    assert(kernels->checksum != NULL && c != NULL);
    uint64_t sum = FCT_HASH_EMPTY;
    for (int64_t done = 0; done < bytes; done += FCK_CHECKSUM_PIECE) {
        const int64_t piece = piece_bytes(bytes - done);
        const char *from = (const char *)data + done;
        if (to != NULL) {
            const fck_slot part = {.dst = (char *)to + done, .bytes = piece, .blocks = 1};
            const char *failure = kernels->unpack(from, piece, 1, &part, 1, NULL);
            if (failure != NULL) {
                return failure;
            }
        }
        sum = fct_hash_add(sum, kernels->checksum(from, (size_t)piece));
    }
    fc_checksum_add_sum(c, slot, shard, sum);
    return NULL;
}

uint64_t fc_checksum_of_shards(const fc_checksum *gathered, const fc_checksum *packed) {
    const uint64_t sum = gathered->own == packed->own ? gathered->all : ~gathered->all;
    return gathered->unknown || packed->unknown ? 0 : sum != 0 ? sum : 1;
}
