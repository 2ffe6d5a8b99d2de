/* Simulated allocator and happens-before checker.
 *
 * Owns every block of a simulation. As in torch's caching allocator, a block always belongs to the
 * pool of the stream that was current at its first allocation. The next allocation on that stream
 * may reuse a freed block. With streams the free itself checks nothing. The allocation checks all
 * free blocks of the pool: their last uses must be ordered before it. Without streams memory is
 * freed at once, so the free must be ordered.
 *
 * Each block records its last write and, per stream, its last read. A read must be ordered after
 * the last write, and a write after all recorded accesses. The check uses vector clocks, so it does
 * not depend on the schedule. */
#include "sim_internal.h"

#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

enum {
    BLOCKS_MAX = 4096,
    GRAIN = 64,
    POISON = 0xff,
    SPARE_CLASSES = 64,
    SCRATCH_GRAIN = 128,
    SCRATCH_CLASSES = 16
};

static _Thread_local sim_block *blocks[BLOCKS_MAX];
static _Thread_local size_t block_count;
static _Thread_local sim_block
    *spare[SPARE_CLASSES]; /* blocks of earlier simulations, by capacity */
static _Thread_local uint64_t frees;

void sim_memory_begin(void) {
    block_count = 0;
    frees = 0;
}

void sim_memory_end(void) {
    for (size_t i = 0; i < block_count; i++) {
        sim_block *block = blocks[i];
        size_t grains = block->capacity / GRAIN;
        ASAN_UNPOISON_MEMORY_REGION(block->base, block->capacity);
        if (grains < SPARE_CLASSES) {
            block->next_spare = spare[grains];
            spare[grains] = block;
        } else {
            ASAN_UNPOISON_MEMORY_REGION(block->base + block->capacity, GRAIN);
            free(block->base);
            free(block);
        }
    }
    block_count = 0;
}

size_t sim_live_bytes(void) {
    size_t bytes = 0;
    for (size_t i = 0; i < block_count; i++) {
        bytes += blocks[i]->live ? blocks[i]->size : 0;
    }
    return bytes;
}

/* ---- scratch memory ---- */

/* Header of a scratch block; aligned like the memory behind it. */
typedef struct scratch {
    struct scratch *next;
    size_t size_class;
} scratch;

static _Thread_local scratch *scratches[SCRATCH_CLASSES]; /* class i: blocks of i + 1 grains */

void *sim_scratch(size_t bytes) {
    size_t size_class = bytes / SCRATCH_GRAIN;
    if (size_class >= SCRATCH_CLASSES) {
        scratch *large = (scratch *)sim_alloc(sizeof *large + bytes);
        large->size_class = SCRATCH_CLASSES;
        return large + 1;
    }
    scratch *s = scratches[size_class];
    if (s == NULL) {
        s = (scratch *)sim_alloc(sizeof *s + (size_class + 1) * SCRATCH_GRAIN);
        s->size_class = size_class;
    } else {
        scratches[size_class] = s->next;
        memset(s + 1, 0, bytes);
    }
    return s + 1;
}

void sim_scratch_free(void *block) {
    if (block == NULL) {
        return;
    }
    scratch *s = (scratch *)block - 1;
    if (s->size_class == SCRATCH_CLASSES) {
        free(s);
        return;
    }
    s->next = scratches[s->size_class];
    scratches[s->size_class] = s;
}

/* ---- the checker ---- */

static bool ordered(const sim_access *access, const sim_clock *now) {
    return access->seq <= now->at[access->stream];
}

/* Returns the first access that `now` is not ordered after. Reads are included if `writing`. */
static const sim_access *unordered(const sim_block *block, bool writing, const sim_clock *now) {
    if (!ordered(&block->written, now)) {
        return &block->written;
    }
    for (int s = 0; writing && s < sim_stream_count; s++) {
        if (!ordered(&block->read[s], now)) {
            return &block->read[s];
        }
    }
    return NULL;
}

static void clear_accesses(sim_block *block) {
    memset(&block->written, 0, sizeof block->written);
    memset(block->read, 0, sizeof block->read);
}

void sim_block_touch(sim_block *block, bool write, int stream, uint32_t seq, const sim_clock *now,
                     const char *what) {
    if (!block->live) {
        sim_fail("%s on stream %d uses freed memory", what, stream);
        return;
    }
    const sim_access *race = unordered(block, write, now);
    if (race != NULL) {
        sim_fail(
            "%s on stream %d %s %zu bytes that %s on stream %d %s, and is not ordered after it",
            what, stream, write ? "writes" : "reads", block->size, race->what, race->stream,
            race == &block->written ? "writes" : "reads");
        clear_accesses(block); /* one report is enough */
    }
    const sim_access access = {.seq = seq, .stream = stream, .what = what};
    if (write) {
        clear_accesses(block);
        block->written = access;
    } else {
        block->read[stream] = access;
    }
}

/* ---- allocation ---- */

static void check_pool(int stream, const sim_clock *now) {
    for (size_t i = 0; i < block_count; i++) {
        sim_block *block = blocks[i];
        if (block->live || block->stream != stream) {
            continue;
        }
        const sim_access *race = unordered(block, true, now);
        if (race != NULL) {
            sim_fail("an allocation on stream %d may reuse %zu freed bytes that %s on stream %d "
                     "still %s",
                     stream, block->size, race->what, race->stream,
                     race == &block->written ? "writes" : "reads");
            clear_accesses(block);
        }
    }
}

/* Returns the pool's most recently freed block that is large enough. All uses of a block of host
 * memory must be complete, as in torch's allocator of pinned memory. */
static sim_block *find_reusable_block(int stream, size_t bytes, const sim_clock *host) {
    sim_block *best = NULL;
    for (size_t i = 0; i < block_count; i++) {
        sim_block *block = blocks[i];
        if (!block->live && block->stream == stream && block->capacity >= bytes &&
            (host == NULL || unordered(block, true, host) == NULL) &&
            (best == NULL || block->freed_at > best->freed_at)) {
            best = block;
        }
    }
    return best;
}

static sim_block *make_block(int stream, size_t bytes) {
    if (block_count == BLOCKS_MAX) {
        fail_msg("the simulation supports no further block");
    }
    size_t grains = (bytes + GRAIN - 1) / GRAIN;
    sim_block *block = grains < SPARE_CLASSES ? spare[grains] : NULL;
    if (block != NULL) {
        char *base = block->base;
        spare[grains] = block->next_spare;
        memset(block, 0, sizeof *block);
        block->base = base;
    } else {
        block = (sim_block *)sim_alloc(sizeof *block);
        block->base = (char *)sim_alloc((grains + 1) * GRAIN);
        ASAN_POISON_MEMORY_REGION(block->base + grains * GRAIN, GRAIN);
    }
    block->capacity = grains * GRAIN;
    block->stream = stream;
    blocks[block_count++] = block;
    return block;
}

typedef struct fill {
    char *base;
    size_t bytes;
} fill;

static void run_fill(void *args) {
    const fill *f = (const fill *)args;
    memset(f->base, POISON, f->bytes);
}

sim_block *sim_block_alloc(size_t bytes, bool of_host) {
    int stream = of_host ? sim_host_stream() : sim_stream_current();
    sim_clock now = sim_clock_of(stream);
    if (!of_host) {
        check_pool(stream, &now);
    }
    sim_block *block = find_reusable_block(stream, bytes, of_host ? &now : NULL);
    if (block == NULL) {
        block = make_block(stream, bytes);
    }
    block->live = true;
    block->of_host = of_host;
    block->of_group = false;
    block->user = NULL;
    block->shared = false;
    block->size = bytes;
    ASAN_UNPOISON_MEMORY_REGION(block->base, block->capacity);
    if (!sim_now.streams) {
        ASAN_POISON_MEMORY_REGION(block->base + bytes, block->capacity - bytes);
    }
    fill *args = (fill *)sim_scratch(sizeof *args);
    args->base = block->base;
    args->bytes = bytes;
    const sim_use use = {block, true};
    const sim_op op = {
        .what = "the allocation", .uses = &use, .use_count = 1, .run = run_fill, .args = args};
    sim_stream_push(stream, &op, NULL);
    return block;
}

void sim_block_free(sim_block *block, bool checked) {
    if (checked && block->shared) {
        sim_fail("%zu bytes are freed that an array shares", block->size);
    }
    if (!sim_now.streams) {
        sim_clock now = sim_clock_of(0);
        const sim_access *race = checked ? unordered(block, true, &now) : NULL;
        if (race != NULL) {
            sim_fail("%zu bytes are freed while %s still %s them", block->size, race->what,
                     race == &block->written ? "writes" : "reads");
        } else {
            /* A collective in flight holds its storages, so the release of the last reference is
             * ordered after it. */
            ASAN_POISON_MEMORY_REGION(block->base, block->capacity);
        }
        clear_accesses(block);
    }
    block->live = false;
    block->freed_at = ++frees;
}

sim_block *sim_block_around(const void *address, int64_t bytes, const char *what) {
    uintptr_t start = (uintptr_t)address;
    for (size_t i = 0; i < block_count; i++) {
        uintptr_t base = (uintptr_t)blocks[i]->base;
        if (blocks[i]->live && start >= base && start < base + blocks[i]->capacity) {
            if (start - base + (uintptr_t)bytes > blocks[i]->size) {
                sim_fail("%s runs over the end of %zu bytes", what, blocks[i]->size);
                return NULL;
            }
            return blocks[i];
        }
    }
    sim_fail("%s uses %lld bytes at an address where nothing is allocated", what, (long long)bytes);
    return NULL;
}

void sim_tensor_share(fct_tensor *t) {
    sim_tensor_block(t)->shared = true;
}

void sim_tensor_flip_bit(const fct_tensor *t, uint64_t bit) {
    fct_facts facts;
    fct_tensor_facts(t, &facts);
    const uint64_t bits = (uint64_t)(facts.numel * facts.itemsize) * 8;
    ((unsigned char *)facts.data)[bit % bits / 8] ^= (unsigned char)(1U << bit % 8);
}

bool fct_storage_can_free(const fct_tensor *t) {
    const sim_block *block = sim_tensor_block(t);
    return block == NULL || !block->shared;
}

/* The simulated device frees memory at once. */
void fct_memory_begin_round(void) {}

void fct_memory_trim(void) {}
