/* Kernels of these tests: the CPU's (through the linker's --wrap) and, in place of kernels_none.c,
 * CUDA's. Both run the real CPU kernels as operations on a simulated stream. First they check every
 * address: its block, its extent and other uses. Descriptor arrays are copied, as the interface
 * requires. */
#include "sim_internal.h"

#include <string.h>

const fck_backend *__real_fck_cpu(void);
const fck_backend *__wrap_fck_cpu(void);

/* Blocks that one launch uses. */
typedef struct uses {
    sim_use items[SIM_USES_MAX];
    size_t count;
} uses;

static void add_use(uses *u, const void *address, int64_t bytes, bool write, const char *what) {
    sim_block *block = bytes > 0 ? sim_block_around(address, bytes, what) : NULL;
    if (block == NULL) {
        return;
    }
    for (size_t i = 0; i < u->count; i++) {
        if (u->items[i].block == block) {
            u->items[i].write = u->items[i].write || write;
            return;
        }
    }
    if (u->count == SIM_USES_MAX) {
        fail_msg("the simulation does not support a launch with that many buffers");
    }
    u->items[u->count++] = (sim_use){block, write};
}

typedef struct launch {
    void *dst;
    const void *gathered;
    int64_t rank_bytes;
    int64_t rank_numel;
    int64_t world;
    fck_dtype dtype;
    size_t count;
    union {
        const fck_segment *segments;
        const fck_slot *slots;
        const fck_gradient *gradients;
        void *copy;
    } of;
} launch;

/* Allocates a launch with a copy of its descriptors behind it. */
static launch *launch_new(const void *descriptors, size_t count, size_t size) {
    launch *l = (launch *)sim_scratch(sizeof *l + count * size);
    l->count = count;
    l->of.copy = l + 1;
    if (count > 0) {
        memcpy(l->of.copy, descriptors, count * size);
    }
    return l;
}

static void queue_launch(const uses *u, void *native, void (*run)(void *), void *args,
                         const char *what) {
    const sim_op op = {
        .what = what, .uses = u->items, .use_count = u->count, .run = run, .args = args};
    sim_stream_push(sim_stream_of_native(native), &op, NULL);
}

/* ---- pack ---- */

static void run_pack(void *args) {
    const launch *l = (const launch *)args;
    if (__real_fck_cpu()->pack(l->of.segments, l->count, NULL) != NULL) {
        sim_fail("the pack kernel failed");
    }
}

static const char *sim_pack(const fck_segment *segments, size_t count, void *stream) {
    static const char what[] = "the pack kernel";
    uses u = {.count = 0};
    sim_tick();
    if (sim_fault(SIM_FAULT_KERNEL, "pack")) {
        return "injected";
    }
    for (size_t i = 0; i < count; i++) {
        const fck_segment *s = &segments[i];
        if (s->count > 0 && s->itemsize != sim_itemsize(s->src_dtype)) {
            sim_fail("a segment's itemsize is %d, its type's %lld", (int)s->itemsize,
                     (long long)sim_itemsize(s->src_dtype));
        }
        if (s->src_dtype != s->dst_dtype && sim_device().type == FCT_DEVICE_CUDA &&
            ((uintptr_t)s->src % (uintptr_t)sim_itemsize(s->src_dtype) != 0 ||
             (uintptr_t)s->dst % (uintptr_t)sim_itemsize(s->dst_dtype) != 0)) {
            return "an address is no multiple of the element size";
        }
        add_use(&u, s->src, s->count * sim_itemsize(s->src_dtype), false, what);
        add_use(&u, s->dst, s->count * sim_itemsize(s->dst_dtype), true, what);
    }
    queue_launch(&u, stream, run_pack, launch_new(segments, count, sizeof *segments), what);
    return NULL;
}

/* ---- unpack ---- */

static void run_unpack(void *args) {
    const launch *l = (const launch *)args;
    if (__real_fck_cpu()->unpack(l->gathered, l->rank_bytes, l->world, l->of.slots, l->count,
                                 NULL) != NULL) {
        sim_fail("the unpack kernel failed");
    }
}

static const char *sim_unpack(const void *gathered, int64_t rank_bytes, int64_t world,
                              const fck_slot *slots, size_t count, void *stream) {
    static const char what[] = "the unpack kernel";
    uses u = {.count = 0};
    sim_tick();
    if (sim_fault(SIM_FAULT_KERNEL, "unpack")) {
        return "injected";
    }
    add_use(&u, gathered, rank_bytes * world, false, what);
    for (size_t i = 0; i < count; i++) {
        int64_t bytes = slots[i].bytes * slots[i].blocks;
        if (slots[i].offset < 0 || slots[i].offset + bytes > rank_bytes) {
            sim_fail("a slot ends outside its rank shard");
        }
        add_use(&u, slots[i].dst, bytes * world, true, what);
    }
    launch *l = launch_new(slots, count, sizeof *slots);
    l->gathered = gathered;
    l->rank_bytes = rank_bytes;
    l->world = world;
    queue_launch(&u, stream, run_unpack, l, what);
    return NULL;
}

/* ---- pack_gradients ---- */

static void run_pack_gradients(void *args) {
    const launch *l = (const launch *)args;
    if (__real_fck_cpu()->pack_gradients(l->of.gradients, l->count, l->world, l->dst, l->rank_numel,
                                         l->dtype, NULL) != NULL) {
        sim_fail("the gradient kernel failed");
    }
}

static const char *sim_pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                                      void *dst, int64_t rank_numel, fck_dtype dst_dtype,
                                      void *stream) {
    static const char what[] = "the gradient kernel";
    uses u = {.count = 0};
    sim_tick();
    if (sim_fault(SIM_FAULT_KERNEL, "pack_gradients")) {
        return "injected";
    }
    add_use(&u, dst, world * rank_numel * sim_itemsize(dst_dtype), true, what);
    for (size_t i = 0; i < count; i++) {
        const fck_gradient *g = &gradients[i];
        if (g->offset < 0 || g->offset + g->blocks * g->chunk > rank_numel ||
            g->chunk * world < g->numel) {
            sim_fail("a gradient does not fit its rank shard");
        }
        add_use(&u, g->src, g->blocks * g->numel * sim_itemsize(g->src_dtype), false, what);
    }
    launch *l = launch_new(gradients, count, sizeof *gradients);
    l->world = world;
    l->dst = dst;
    l->rank_numel = rank_numel;
    l->dtype = dst_dtype;
    queue_launch(&u, stream, run_pack_gradients, l, what);
    return NULL;
}

static int sim_can_cast(fck_dtype src, fck_dtype dst) {
    return __real_fck_cpu()->can_cast(src, dst);
}

/* ---- checksum ---- */

typedef struct checksum_launch {
    const void *data;
    size_t bytes;
    uint64_t *checksum;
} checksum_launch;

static void run_checksum(void *args) {
    const checksum_launch *l = (const checksum_launch *)args;
    *l->checksum = __real_fck_cpu()->checksum(l->data, l->bytes);
}

/* Precondition: a device without streams, where a launch runs at once. */
static uint64_t sim_checksum_of(const void *data, size_t bytes) {
    static const char what[] = "the checksum";
    uint64_t checksum = 0;
    uses u = {.count = 0};
    checksum_launch *l = (checksum_launch *)sim_scratch(sizeof *l);
    *l = (checksum_launch){data, bytes, &checksum};
    add_use(&u, data, (int64_t)bytes, false, what);
    const sim_op op = {
        .what = what, .uses = u.items, .use_count = u.count, .run = run_checksum, .args = l};
    sim_stream_push(sim_stream_of_native(NULL), &op, NULL);
    return checksum;
}

typedef struct checksums_launch {
    fck_range ranges[FCK_RANGES];
    size_t count;
    uint64_t *sum;
} checksums_launch;

static void run_add_checksums(void *args) {
    const checksums_launch *l = (const checksums_launch *)args;
    for (size_t i = 0; i < l->count; i++) {
        const fck_range *range = &l->ranges[i];
        *l->sum += range->factor * __real_fck_cpu()->checksum(range->data, (size_t)range->bytes);
    }
}

static const char *sim_add_checksums(const fck_range *ranges, size_t count, uint64_t *sum,
                                     void *stream) {
    static const char what[] = "the checksum kernel";
    uses u = {.count = 0};
    sim_tick();
    if (sim_fault(SIM_FAULT_KERNEL, "add_checksums")) {
        return "injected";
    }
    checksums_launch *l = (checksums_launch *)sim_scratch(sizeof *l);
    *l = (checksums_launch){.count = count, .sum = sum};
    for (size_t i = 0; i < count; i++) {
        l->ranges[i] = ranges[i];
        add_use(&u, ranges[i].data, ranges[i].bytes, false, what);
    }
    /* Kernels on several streams add to different sums of a table. The simulation compares whole
     * blocks, so it would report these additions as races. An addition therefore counts as a read.
     * The simulation checks that it follows the zeroing of the table and precedes the reuse of the
     * table's memory. */
    add_use(&u, sum, sizeof *sum, false, what);
    queue_launch(&u, stream, run_add_checksums, l, what);
    return NULL;
}

static _Thread_local bool captures;

void sim_capture(bool capturing) {
    captures = capturing;
}

bool sim_captures(void) {
    return captures;
}

static int sim_is_capturing(void *stream) {
    (void)sim_stream_of_native(stream);
    return captures ? 1 : 0;
}

static const fck_backend backend = {"simulated",        sim_pack,        sim_unpack,
                                    sim_pack_gradients, sim_can_cast,    sim_checksum_of,
                                    sim_add_checksums,  sim_is_capturing};

const fck_backend *__wrap_fck_cpu(void) {
    return &backend;
}

const fck_backend *fck_cuda(void) {
    return &backend;
}

int fck_cuda_built(void) {
    return 1;
}
