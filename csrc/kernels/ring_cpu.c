/* Sums in the order of a ring all-reduce.
 *
 * A ring all-reduce divides the buffer into as many blocks as there are ranks. Block b starts on
 * rank b - 1 and is sent to the next lower rank at each hop. Each rank adds its own values to the
 * received sum, and rank b has the complete sum. Sums of floating-point numbers depend on this
 * order, so this file adds in the same order.
 *
 * A block is a whole number of segments. Segments have the sizes of gloo's: at most a mebibyte
 * each, at least two per rank. tests/distributed/test_shm_collectives.py compares the results with
 * gloo. Each hop rounds to the element type, because gloo sends elements of that type. */
#include "ring.h"

#include <assert.h>
#include <string.h>

#include "cast_cpu.h"
#include "index.h"

enum {
    SEGMENT_BYTES = 1 << 20, /* largest segment of gloo */
    SEGMENTS_PER_RANK = 2,   /* fewest segments per rank of gloo */
    TILE_BYTES = 8192,       /* bytes per step; they stay in L1 */
    VECTOR_BYTES = 16,       /* fits in one register of every supported processor */
};

/* Adds `bytes` bytes of a rank's own elements (`input`) to the received elements (`sum`). If both
 * are NaN, the result is the rank's own NaN, as in gloo. The loop adds that NaN to itself, because
 * compilers may swap the operands of an addition. */
typedef void (*add_loop)(void *sum, const void *input, int64_t bytes);

#define ADD_LOOP(name, type, bits)                                                                 \
    static void name(void *sum, const void *input, int64_t bytes) {                                \
        typedef type vector __attribute__((vector_size(VECTOR_BYTES)));                            \
        typedef bits mask __attribute__((vector_size(VECTOR_BYTES)));                              \
        unsigned char *to = (unsigned char *)sum;                                                  \
        const unsigned char *from = (const unsigned char *)input;                                  \
        int64_t i = 0;                                                                             \
        for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES) {                                     \
            vector received, own;                                                                  \
            memcpy(&received, to + i, sizeof received);                                            \
            memcpy(&own, from + i, sizeof own);                                                    \
            const mask is_nan = (mask)(own != own);                                                \
            own += (vector)(((mask)received & ~is_nan) | ((mask)own & is_nan));                    \
            memcpy(to + i, &own, sizeof own);                                                      \
        }                                                                                          \
        for (; i < bytes; i += (int64_t)sizeof(type)) {                                            \
            type received, own;                                                                    \
            memcpy(&received, to + i, sizeof received);                                            \
            memcpy(&own, from + i, sizeof own);                                                    \
            own += own != own ? own : received;                                                    \
            memcpy(to + i, &own, sizeof own);                                                      \
        }                                                                                          \
    }

ADD_LOOP(add_floats, float, int32_t)
ADD_LOOP(add_doubles, double, int64_t)

/* Adds elements of a 16-bit type in float and rounds the sums to the type. */
static void add_through_float(fck_loop_type type, void *sum, const void *input, int64_t bytes) {
    const fck_loops *loops = fck_loops_best();
    float received[TILE_BYTES / 2], own[TILE_BYTES / 2];
    loops->to_float[type](sum, received, bytes / 2);
    loops->to_float[type](input, own, bytes / 2);
    add_floats(received, own, bytes * 2);
    loops->from_float[type](received, sum, bytes / 2);
}

/* Rewrites the NaNs of a sum as gloo writes them: keeps the bits in `kept_bits` and sets the other
 * bits to `nan_bits`. */
static void rewrite_nans(void *sum, int64_t bytes, uint16_t infinity, uint16_t kept_bits,
                         uint16_t nan_bits) {
    unsigned char *to = (unsigned char *)sum;
    for (int64_t i = 0; i < bytes; i += 2) {
        uint16_t bits;
        memcpy(&bits, to + i, sizeof bits);
        const int is_nan = (bits & 0x7fff) > infinity;
        bits = is_nan ? (uint16_t)((bits & kept_bits) | nan_bits) : bits;
        memcpy(to + i, &bits, sizeof bits);
    }
}

static void add_halves(void *sum, const void *input, int64_t bytes) {
    add_through_float(FCK_LOOP_HALF, sum, input, bytes);
    rewrite_nans(sum, bytes, 0x7c00, 0x8000, 0x7e00);
}

static void add_bfloat16(void *sum, const void *input, int64_t bytes) {
    add_through_float(FCK_LOOP_BFLOAT16, sum, input, bytes);
    rewrite_nans(sum, bytes, 0x7f80, 0, 0x7fc0);
}

static add_loop select_loop(fck_dtype dtype) {
    switch (dtype) {
    case FCK_FLOAT16:
        return add_halves;
    case FCK_FLOAT32:
        return add_floats;
    case FCK_FLOAT64:
        return add_doubles;
    case FCK_BFLOAT16:
        return add_bfloat16;
    default:
        return NULL;
    }
}

int fck_ring_supports(fck_dtype dtype) {
    return select_loop(dtype) != NULL;
}

/* Returns the elements per block of a buffer of `total` elements of `size` bytes. */
static int64_t block_elements(int64_t total, int64_t size, int64_t world) {
    const int64_t bytes = total * size;
    const int64_t min_segments = world * SEGMENTS_PER_RANK;
    const int64_t segments = fck_max(fck_ceil_div(bytes, SEGMENT_BYTES), min_segments);
    const int64_t per_rank = fck_ceil_div(segments, world);
    return per_rank * fck_ceil_div(fck_ceil_div(bytes, per_rank * world), size);
}

/* Sums `bytes` bytes from byte `offset` on, tile by tile. All bytes belong to block `block`. */
static void sum_block(fck_dtype dtype, unsigned char *out, const void *const *inputs, int64_t world,
                      int64_t block, int64_t offset, int64_t bytes) {
    const add_loop add = select_loop(dtype);
    unsigned char sum[TILE_BYTES];
    for (int64_t done = 0; done < bytes; done += TILE_BYTES) {
        const int64_t tile = fck_min(bytes - done, TILE_BYTES);
        for (int64_t hop = 1; hop <= world; hop++) {
            const int64_t rank = (block + world - hop) % world;
            const unsigned char *input = (const unsigned char *)inputs[rank] + offset + done;
            if (hop == 1) {
                memcpy(sum, input, (size_t)tile);
            } else {
                add(sum, input, tile);
            }
        }
        memcpy(out + offset + done, sum, (size_t)tile);
    }
}

void fck_ring_sum(fck_dtype dtype, void *out, const void *const *inputs, int64_t world,
                  int64_t total, int64_t first, int64_t count) {
    assert(fck_ring_supports(dtype) && world > 1 && first >= 0 && first + count <= total);
    const int64_t size = fck_float_size(dtype);
    const int64_t elements = block_elements(total, size, world);
    for (int64_t done = 0; done < count;) {
        const int64_t block = (first + done) / elements;
        const int64_t end = fck_min(count, (block + 1) * elements - first);
        sum_block(dtype, (unsigned char *)out, inputs, world, block, done * size,
                  (end - done) * size);
        done = end;
    }
}
