/* All-reduces in shared memory; see shm_all_reduce.h.
 *
 * If the ring can hold the tensors of all ranks, each rank writes its whole tensor and sums the
 * tensors of all ranks. This case needs one phase of messages and no thread. A larger tensor is
 * divided into parts. Each rank sums a share of each part, and then the ranks exchange the sums.
 * The next part is sent before the sums of the previous part, so that ranks need not run in
 * lockstep:
 *
 *     part 0, part 1, sums of 0, part 2, sums of 1, ...
 *
 * Sums overwrite the tensor. A part is summed only after this rank has written it to the ring
 * (shm_op_methods.read). Elements are added in the order of gloo's ring over the whole tensor. */
#include "shm_all_reduce.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/ring.h"

static int64_t min_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- ranges ---- */

static shm_range share_of_rank(const shm_collective *c, shm_range part, int64_t rank) {
    const int64_t world = c->request.world;
    const int64_t share = (part.end - part.begin + world - 1) / world;
    const int64_t begin = min_of(part.begin + rank * share, part.end);
    return (shm_range){begin, min_of(begin + share, part.end)};
}

/* The elements of a part that this rank sums. */
static shm_range summed_range(const shm_collective *c, shm_range part) {
    return c->sums_whole ? part : share_of_rank(c, part, c->request.rank);
}

static char *address_of(const shm_collective *c, int64_t element) {
    return c->request.output + (size_t)element * c->request.itemsize;
}

static size_t byte_count(const shm_collective *c, int64_t begin, int64_t end) {
    return (size_t)(end - begin) * c->request.itemsize;
}

/* ---- messages ---- */

/* Messages with sums have the size of rank 0's share, which is the largest. */
static size_t message_bytes(const shm_op *op, size_t message) {
    const shm_collective *c = (const shm_collective *)op;
    const shm_step *step = &c->steps[message];
    const shm_range range = step->is_sum ? share_of_rank(c, step->part, 0) : step->part;
    return byte_count(c, range.begin, range.end);
}

static bool can_write(const shm_op *op, size_t message, size_t messages_read) {
    return messages_read >= ((const shm_collective *)op)->steps[message].after;
}

/* Does not write this rank's own share of a part: no peer reads it. */
static void write_message(shm_op *op, size_t message, char *buffer) {
    const shm_collective *c = (const shm_collective *)op;
    const shm_step *step = &c->steps[message];
    const shm_range own_range = summed_range(c, step->part), part = step->part;
    if (step->is_sum) {
        memcpy(buffer, address_of(c, own_range.begin),
               byte_count(c, own_range.begin, own_range.end));
    } else if (c->sums_whole) {
        memcpy(buffer, address_of(c, part.begin), byte_count(c, part.begin, part.end));
    } else {
        const size_t before = byte_count(c, part.begin, own_range.begin);
        memcpy(buffer, address_of(c, part.begin), before);
        memcpy(buffer + before + byte_count(c, own_range.begin, own_range.end),
               address_of(c, own_range.end), byte_count(c, own_range.end, part.end));
    }
}

static void add_inputs(const shm_collective *c, shm_range part, const char *const *peer_data) {
    const shm_request *r = &c->request;
    const shm_range own_range = summed_range(c, part);
    if (own_range.begin == own_range.end) {
        return;
    }
    const void *inputs[SHM_RING_MAX_RANKS];
    for (int rank = 0; rank < r->world; rank++) {
        const char *data = peer_data[rank];
        inputs[rank] = data == NULL ? address_of(c, own_range.begin)
                                    : data + byte_count(c, part.begin, own_range.begin);
    }
    fck_ring_sum((fck_dtype)r->dtype, address_of(c, own_range.begin), inputs, r->world,
                 (int64_t)(r->bytes / r->itemsize), own_range.begin,
                 own_range.end - own_range.begin);
}

static void read_message(shm_op *op, size_t message, const char *const *peer_data) {
    const shm_collective *c = (const shm_collective *)op;
    const shm_step *step = &c->steps[message];
    if (!step->is_sum) {
        add_inputs(c, step->part, peer_data);
        return;
    }
    for (int rank = 0; rank < c->request.world; rank++) {
        if (rank != c->request.rank) {
            const shm_range share = share_of_rank(c, step->part, rank);
            memcpy(address_of(c, share.begin), peer_data[rank],
                   byte_count(c, share.begin, share.end));
        }
    }
}

static const shm_op_methods all_reduce_methods = {
    .message_bytes = message_bytes,
    .can_write = can_write,
    .write = write_message,
    .read = read_message,
};

/* ---- steps ---- */

bool shm_all_reduce_plan(shm_collective *c) {
    const shm_request *r = &c->request;
    assert(r->kind == FCT_OP_ALL_REDUCE && r->itemsize > 0 && c->steps == NULL);
    const int64_t numel = (int64_t)(r->bytes / r->itemsize);
    const int64_t part_numel = (int64_t)(SHM_MAX_MESSAGE / r->itemsize);
    const size_t parts = (size_t)((numel + part_numel - 1) / part_numel);
    c->sums_whole = r->bytes * (size_t)r->world <= SHM_CAPACITY;
    c->steps = (shm_step *)malloc(2 * parts * sizeof *c->steps);
    if (c->steps == NULL) {
        return false;
    }
    size_t count = 0, previous_part = 0;
    for (int64_t begin = 0; begin < numel; begin += part_numel) {
        const size_t index = count++;
        const shm_range part = {begin, min_of(begin + part_numel, numel)};
        c->steps[index] = (shm_step){false, part, 0};
        if (!c->sums_whole && begin > 0) {
            c->steps[count++] = (shm_step){true, c->steps[previous_part].part, previous_part + 1};
        }
        previous_part = index;
    }
    if (!c->sums_whole) {
        c->steps[count++] = (shm_step){true, c->steps[previous_part].part, previous_part + 1};
    }
    c->op.methods = &all_reduce_methods;
    c->op.message_count = count;
    return true;
}
