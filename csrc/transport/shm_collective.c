/* All-gathers and reduce-scatters over shared memory; see shm_collective.h.
 *
 * Rank shards are divided into parts. Parts are multiples of a cache line, so no element is split
 * between messages. The message of an all-gather has a part of this rank's shard. The message of a
 * reduce-scatter has parts of all shards, and leaves the part of this rank uninitialized. */
#include "shm_collective.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/checksum.h"
#include "../kernels/kernels.h"
#include "../kernels/ring.h"
#include "hash.h"
#include "op_label.h"
#include "shm_all_reduce.h"
#include "shm_collective_state.h"
#include "shm_tag.h"

enum { CACHE_LINE = 64 };

bool shm_can_sum(int32_t dtype) {
    return fck_ring_supports((fck_dtype)dtype) != 0;
}

/* ---- messages ---- */

static size_t shards_in_message(const shm_collective *c) {
    return c->request.kind == FCT_OP_REDUCE_SCATTER ? (size_t)c->request.world : 1;
}

/* Bytes of one rank shard in a message. */
static size_t part_bytes_in(const shm_collective *c, size_t message) {
    const size_t remaining = c->request.bytes - message * c->part_bytes;
    return remaining < c->part_bytes ? remaining : c->part_bytes;
}

static size_t message_bytes(const shm_op *op, size_t message) {
    const shm_collective *c = (const shm_collective *)op;
    return shards_in_message(c) * part_bytes_in(c, message);
}

/* The bytes that a segment and the part of a message have in common. */
typedef struct overlap {
    size_t in_segment; /* byte offset in the segment */
    size_t bytes;      /* 0: none */
    size_t in_part;    /* byte offset in the part */
} overlap;

static overlap find_overlap(const shm_collective *c, const shm_segment *segment, size_t message) {
    const size_t part_begin = message * c->part_bytes;
    const size_t part_end = part_begin + part_bytes_in(c, message);
    const size_t segment_end = segment->begin + segment->bytes;
    const size_t begin = segment->begin > part_begin ? segment->begin : part_begin;
    const size_t end = segment_end < part_end ? segment_end : part_end;
    return begin < end ? (overlap){begin - segment->begin, end - begin, begin - part_begin}
                       : (overlap){0, 0, 0};
}

/* Adds the piece that ends at byte `end` of the rank's segment, if a piece ends there. A piece that
 * two messages carry is read after the second one. */
static void add_piece(const shm_collective *c, size_t segment, size_t rank, size_t end) {
    const shm_segment *s = &c->segments[segment];
    shm_rank_checksum *sum = &c->checksums[segment * (size_t)c->request.world + rank];
    if (end % FCK_CHECKSUM_PIECE == 0 || end == s->bytes) {
        const size_t begin = (end - 1) / FCK_CHECKSUM_PIECE * FCK_CHECKSUM_PIECE;
        const char *data = s->data + rank * s->stride + begin;
        sum->hash = fct_hash_add(sum->hash, fck_checksum(data, end - begin));
        sum->complete = end == s->bytes;
    }
}

/* Copies bytes of a rank's segment from or to a message. Adds each piece to the checksum when it is
 * copied, while it is in the processor's cache. */
static void copy_bytes(const shm_collective *c, size_t segment, size_t rank, overlap o, char *to,
                       const char *from) {
    if (c->checksums == NULL) {
        memcpy(to, from, o.bytes);
        return;
    }
    for (size_t done = 0, bytes = 0; done < o.bytes; done += bytes) {
        const size_t begin = o.in_segment + done;
        const size_t left_in_piece = FCK_CHECKSUM_PIECE - begin % FCK_CHECKSUM_PIECE;
        bytes = left_in_piece < o.bytes - done ? left_in_piece : o.bytes - done;
        memcpy(to + done, from + done, bytes);
        add_piece(c, segment, rank, begin + bytes);
    }
}

static void copy_shard(const shm_collective *c, size_t message, size_t shard, char *to) {
    for (size_t i = 0; i < c->request.segment_count; i++) {
        const shm_segment *segment = &c->segments[i];
        const overlap o = find_overlap(c, segment, message);
        if (o.bytes > 0) {
            copy_bytes(c, i, shard, o, to + o.in_part,
                       segment->data + shard * segment->stride + o.in_segment);
        }
    }
}

static void write_message(shm_op *op, size_t message, char *buffer) {
    const shm_collective *c = (const shm_collective *)op;
    const size_t own_rank = (size_t)c->request.rank;
    if (c->request.kind == FCT_OP_ALL_GATHER) {
        copy_shard(c, message, own_rank, buffer);
        return;
    }
    const size_t bytes = part_bytes_in(c, message);
    for (size_t shard = 0; shard < (size_t)c->request.world; shard++) {
        if (shard != own_rank) {
            copy_shard(c, message, shard, buffer + shard * bytes);
        }
    }
}

/* Copies the peers' data of a segment. `parts` has one entry for each rank. */
static void gather_segment(const shm_collective *c, size_t segment, overlap o,
                           const char *const *parts) {
    const shm_segment *s = &c->segments[segment];
    for (size_t rank = 0; rank < (size_t)c->request.world; rank++) {
        if (parts[rank] != NULL) {
            copy_bytes(c, segment, rank, o, s->data + rank * s->stride + o.in_segment, parts[rank]);
        }
    }
}

/* Writes the sum of the data of all ranks to the output. Sets this rank's entry of `parts`. */
static void sum_segment(const shm_collective *c, const shm_segment *segment, overlap o,
                        const char **parts) {
    const shm_request *r = &c->request;
    const size_t own_rank = (size_t)r->rank;
    const int64_t numel = (int64_t)(r->bytes / r->itemsize);
    const int64_t first = (int64_t)((segment->begin + o.in_segment) / r->itemsize);
    parts[own_rank] = segment->data + own_rank * segment->stride + o.in_segment;
    const void *inputs[SHM_RING_MAX_RANKS];
    memcpy(inputs, parts, (size_t)r->world * sizeof *parts);
    fck_ring_sum((fck_dtype)r->dtype, r->output + segment->begin + o.in_segment, inputs, r->world,
                 r->world * numel, r->rank * numel + first, (int64_t)(o.bytes / r->itemsize));
}

static void read_message(shm_op *op, size_t message, const char *const *peer_data) {
    const shm_collective *c = (const shm_collective *)op;
    const bool sums = c->request.kind == FCT_OP_REDUCE_SCATTER;
    const size_t own_part = sums ? (size_t)c->request.rank * part_bytes_in(c, message) : 0;
    const char *parts[SHM_RING_MAX_RANKS] = {NULL};
    for (size_t i = 0; i < c->request.segment_count; i++) {
        const overlap o = find_overlap(c, &c->segments[i], message);
        if (o.bytes == 0) {
            continue;
        }
        for (int rank = 0; rank < c->request.world; rank++) {
            const char *data = peer_data[rank];
            parts[rank] = data == NULL ? NULL : data + own_part + o.in_part;
        }
        if (sums) {
            sum_segment(c, &c->segments[i], o, parts);
        } else {
            gather_segment(c, i, o, parts);
        }
    }
}

static const shm_op_methods shard_methods = {
    .message_bytes = message_bytes,
    .can_write = NULL,
    .write = write_message,
    .read = read_message,
};

/* ---- life ---- */

/* Returns false if there is no memory. */
static bool begin_checksums(shm_collective *c) {
    const size_t count = c->request.segment_count * (size_t)c->request.world;
    c->checksums = (shm_rank_checksum *)calloc(count, sizeof *c->checksums);
    if (c->checksums == NULL) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        c->checksums[i].hash = FCT_HASH_EMPTY;
    }
    c->checksum_segments = c->request.segment_count;
    return true;
}

static bool plan_shards(shm_collective *c) {
    const shm_request *r = &c->request;
    c->segments = (shm_segment *)malloc(r->segment_count * sizeof *c->segments);
    if (c->segments == NULL) {
        return false;
    }
    memcpy(c->segments, r->segments, r->segment_count * sizeof *c->segments);
    if (r->kind == FCT_OP_ALL_GATHER && r->checksums && !begin_checksums(c)) {
        return false;
    }
    c->part_bytes = SHM_MAX_MESSAGE / shards_in_message(c) / CACHE_LINE * CACHE_LINE;
    c->op.methods = &shard_methods;
    c->op.message_count = (r->bytes + c->part_bytes - 1) / c->part_bytes;
    return true;
}

shm_collective *shm_collective_new(const shm_request *request) {
    assert(request->world >= 2 && request->world <= SHM_RING_MAX_RANKS && request->bytes > 0);
    assert(request->kind == FCT_OP_ALL_GATHER || shm_can_sum(request->dtype));
    shm_collective *c = (shm_collective *)calloc(1, sizeof *c);
    if (c == NULL) {
        return NULL;
    }
    c->request = *request;
    c->op.tag = shm_tag_make(request->kind, request->dtype, request->bytes);
    c->op.dtype_name = request->dtype_name;
    c->op.label = op_label_take_next();
    c->op.timeout_ms = request->timeout_ms;
    const bool planned =
        request->kind == FCT_OP_ALL_REDUCE ? shm_all_reduce_plan(c) : plan_shards(c);
    c->request.segments = NULL;
    if (!planned) {
        shm_collective_free(c);
        return NULL;
    }
    return c;
}

void shm_collective_free(shm_collective *c) {
    assert(c == NULL || c->op.start_ns == 0 || __atomic_load_n(&c->op.done, __ATOMIC_ACQUIRE) != 0);
    if (c != NULL) {
        free(c->segments);
        free(c->checksums);
        free(c->steps);
        free(c);
    }
}

void shm_collective_drop_segments(shm_collective *c) {
    assert(c->op.read == c->op.message_count);
    c->request.segment_count = 0;
    free(c->segments);
    c->segments = NULL;
}

shm_submit_result shm_collective_start(shm_collective *c, shm_transport *t, shm_owner owner,
                                       char error[SHM_ERROR_BYTES]) {
    assert(c->op.start_ns == 0 && owner.complete != NULL && owner.release != NULL);
    size_t bytes = 0;
    for (size_t message = 0; message < c->op.message_count; message++) {
        bytes += c->op.methods->message_bytes(&c->op, message);
    }
    c->cpu_bound = shm_transport_is_cpu_bound(t, bytes);
    return shm_transport_submit(t, &c->op, owner, error);
}

int shm_collective_wait(shm_collective *c, shm_transport *t, int64_t max_ms,
                        char error[SHM_ERROR_BYTES]) {
    assert(c->op.start_ns != 0);
    return shm_transport_wait(t, &c->op, max_ms, error);
}

bool shm_collective_is_cpu_bound(const shm_collective *c) {
    return c->cpu_bound;
}

bool shm_collective_rank_checksum(const shm_collective *c, size_t segment, int64_t rank,
                                  uint64_t *checksum) {
    if (c == NULL || segment >= c->checksum_segments || rank < 0 || rank >= c->request.world) {
        return false;
    }
    const shm_rank_checksum *sum = &c->checksums[segment * (size_t)c->request.world + (size_t)rank];
    *checksum = sum->hash;
    return sum->complete;
}
