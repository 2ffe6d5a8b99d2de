/* The CPU kernels. The kernels run in the calling thread, complete before they return, and ignore
 * `stream`. They allocate nothing and keep no state. They start no threads, because the ranks share
 * the machine's cores. A call that rejects its arguments has written nothing.
 *
 * Invariant: a segment or gradient with nothing to copy is never dereferenced, so its pointers may
 * be NULL. Moves use memcpy and conversions use the loops of cast_cpu.h. Moves and conversions
 * accept any address. */
#include "kernels.h"

#include <assert.h>
#include <string.h>

#include "cast_cpu.h"
#include "checksum.h"
#include "index.h"

static const char no_cast[] = "these element types can be moved but not converted";

/* elements per step of a conversion through float32; a block of them stays in the L1 cache */
enum { FLOAT_BLOCK = 512 };

static fck_loop_type index_of_type(fck_dtype dtype) {
    assert(fck_float_size(dtype) != 0 && dtype != FCK_FLOAT32);
    return dtype == FCK_FLOAT16   ? FCK_LOOP_HALF
           : dtype == FCK_FLOAT64 ? FCK_LOOP_DOUBLE
                                  : FCK_LOOP_BFLOAT16;
}

/* Converts block by block through float32. Precondition: the two types differ, and neither type is
 * float32. */
static void cast_through_float(const fck_loops *loops, const unsigned char *src,
                               fck_dtype src_dtype, unsigned char *dst, fck_dtype dst_dtype,
                               int64_t count) {
    const fck_loop widen = loops->to_float[index_of_type(src_dtype)];
    const fck_loop narrow = loops->from_float[index_of_type(dst_dtype)];
    const int64_t src_size = fck_float_size(src_dtype);
    const int64_t dst_size = fck_float_size(dst_dtype);
    float block[FLOAT_BLOCK];

    for (int64_t done = 0; done < count; done += FLOAT_BLOCK) {
        const int64_t items = fck_min(count - done, FLOAT_BLOCK);
        widen(src + done * src_size, block, items);
        narrow(block, dst + done * dst_size, items);
    }
}

/* Moves or converts `count` elements of a pair that fck_castable() accepts. */
static void copy_elements(const fck_loops *loops, const void *src, fck_dtype src_dtype, void *dst,
                          fck_dtype dst_dtype, int64_t itemsize, int64_t count) {
    if (count <= 0) {
        return;
    }
    if (src_dtype == dst_dtype) {
        memcpy(dst, src, (size_t)(count * itemsize));
    } else if (dst_dtype == FCK_FLOAT32) {
        loops->to_float[index_of_type(src_dtype)](src, dst, count);
    } else if (src_dtype == FCK_FLOAT32) {
        loops->from_float[index_of_type(dst_dtype)](src, dst, count);
    } else {
        cast_through_float(loops, (const unsigned char *)src, src_dtype, (unsigned char *)dst,
                           dst_dtype, count);
    }
}

static const char *cpu_pack(const fck_segment *segments, size_t count, void *stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        if (!fck_castable(segments[i].src_dtype, segments[i].dst_dtype)) {
            return no_cast;
        }
    }
    const fck_loops *loops = fck_loops_best();
    for (size_t i = 0; i < count; i++) {
        const fck_segment *s = &segments[i];
        copy_elements(loops, s->src, s->src_dtype, s->dst, s->dst_dtype, s->itemsize, s->count);
    }
    return NULL;
}

/* The outer loop is over ranks, so that the gathered buffer is read sequentially. */
static const char *cpu_unpack(const void *gathered, int64_t rank_bytes, int64_t world,
                              const fck_slot *slots, size_t count, void *stream) {
    (void)stream;
    for (int64_t r = 0; r < world; r++) {
        for (size_t i = 0; i < count; i++) {
            const fck_slot *slot = &slots[i];
            const unsigned char *from =
                (const unsigned char *)gathered + r * rank_bytes + slot->offset;
            unsigned char *to = (unsigned char *)slot->dst;
            for (int64_t b = 0; slot->bytes > 0 && b < slot->blocks; b++) {
                memcpy(to + (b * world + r) * slot->bytes, from + b * slot->bytes,
                       (size_t)slot->bytes);
            }
        }
    }
    return NULL;
}

/* Writes the `chunk` elements of one rank and block of a gradient to `dst`. */
static void pack_gradient_block(const fck_loops *loops, const fck_gradient *g, int64_t rank,
                                int64_t block, unsigned char *dst, fck_dtype dst_dtype,
                                int64_t dst_size) {
    const int64_t filled = fck_rank_filled(g->numel, g->chunk, rank);
    if (filled > 0) {
        const unsigned char *src =
            (const unsigned char *)g->src + (block * g->numel + rank * g->chunk) * g->itemsize;
        copy_elements(loops, src, g->src_dtype, dst, dst_dtype, g->itemsize, filled);
    }
    if (filled < g->chunk) {
        /* Zero is all zero bytes in every dtype of torch. */
        memset(dst + filled * dst_size, 0, (size_t)((g->chunk - filled) * dst_size));
    }
}

static const char *cpu_pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                                      void *dst, int64_t rank_numel, fck_dtype dst_dtype,
                                      void *stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        if (!fck_castable(gradients[i].src_dtype, dst_dtype)) {
            return no_cast;
        }
    }
    const fck_loops *loops = fck_loops_best();
    for (int64_t r = 0; r < world; r++) {
        for (size_t i = 0; i < count; i++) {
            const fck_gradient *g = &gradients[i];
            if (g->chunk <= 0) {
                continue;
            }
            const int64_t dst_size = fck_target_size(g, dst_dtype);
            unsigned char *to = (unsigned char *)dst + (r * rank_numel + g->offset) * dst_size;
            for (int64_t b = 0; b < g->blocks; b++, to += g->chunk * dst_size) {
                pack_gradient_block(loops, g, r, b, to, dst_dtype, dst_size);
            }
        }
    }
    return NULL;
}

static int cpu_can_cast(fck_dtype src, fck_dtype dst) {
    return fck_castable(src, dst);
}

const fck_backend *fck_cpu(void) {
    static const fck_backend cpu = {.name = "cpu",
                                    .pack = cpu_pack,
                                    .unpack = cpu_unpack,
                                    .pack_gradients = cpu_pack_gradients,
                                    .can_cast = cpu_can_cast,
                                    .checksum = fck_checksum};
    return &cpu;
}
