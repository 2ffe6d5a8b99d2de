/* Implements pool.h. Cached blocks are a doubly linked list, newest first. A request takes the
 * newest block that fits, because its pages are the likeliest to be in a cache. The oldest block is
 * unmapped first. The list is about as long as the number of different unit sizes in a model, so a
 * linear search is enough. */
#define _DEFAULT_SOURCE 1 /* madvise */
#include "pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    HUGE_PAGE = 2 << 20,
    /* blocks of at least this size are aligned to huge pages and request huge pages */
    HUGE_FROM = 4 << 20,
    ROUNDS = 8, /* rounds whose peaks count; a step may contain rounds of several models */
    WASTE = 8,  /* a block serves requests of at least (1 - 1/WASTE) of its size */
    SLACK = 8,  /* allowance above the peak: peak/SLACK bytes */
    LEAST_SLACK = 16 << 20, /* smallest allowance in bytes */
};

static struct {
    pthread_mutex_t mutex; /* guards all other fields */
    fck_block *newest;
    fck_block *oldest;
    uint64_t peaks[ROUNDS]; /* peaks of this round and of the rounds before it */
    int round;
    int caching_disabled;
    fck_pool_facts facts;
} pool = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
#ifdef __SANITIZE_ADDRESS__
    .caching_disabled = 1, /* so that AddressSanitizer detects a use after free */
#endif
};

/* ---- fork: the child has only the forking thread, so the mutex must be unlocked in it ---- */

static void lock_before_fork(void) {
    (void)pthread_mutex_lock(&pool.mutex);
}

static void unlock_after_fork(void) {
    (void)pthread_mutex_unlock(&pool.mutex);
}

static void register_fork_handlers(void) {
    (void)pthread_atfork(lock_before_fork, unlock_after_fork, unlock_after_fork);
}

/* ---- mappings ---- */

static size_t round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* 4 KiB on x86, up to 64 KiB on Arm. */
static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Maps fresh pages at a multiple of `alignment`. `bytes` is a whole number of pages, because munmap
 * refuses an address inside of a page. Returns NULL on failure. */
static void *map_aligned(size_t bytes, size_t alignment) {
    const size_t slack = alignment > page_bytes() ? alignment : 0;
    char *base = (char *)mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == (char *)MAP_FAILED) {
        return NULL;
    }
    const size_t before = (alignment - (uintptr_t)base % alignment) % alignment;
    if (before > 0) {
        (void)munmap(base, before);
    }
    if (slack > before) {
        (void)munmap(base + before + bytes, slack - before);
    }
    return base + before;
}

static fck_block *map_block(size_t bytes) {
    fck_block *block = (fck_block *)calloc(1, sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    const int large = bytes >= HUGE_FROM;
    block->bytes = bytes;
    block->data = map_aligned(bytes, large ? HUGE_PAGE : page_bytes());
    if (block->data == NULL) {
        free(block);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (large) {
        (void)madvise(block->data, bytes, MADV_HUGEPAGE);
    }
#endif
    return block;
}

static void unmap_block(fck_block *block) {
    (void)munmap(block->data, block->bytes);
    free(block);
}

/* ---- the list of cached blocks; the caller holds the mutex ---- */

static void unlink_block(fck_block *block) {
    *(block->newer != NULL ? &block->newer->older : &pool.newest) = block->older;
    *(block->older != NULL ? &block->older->newer : &pool.oldest) = block->newer;
    block->newer = block->older = NULL;
    pool.facts.cached_bytes -= block->bytes;
}

static void push_block(fck_block *block) {
    block->older = pool.newest;
    block->newer = NULL;
    *(pool.newest != NULL ? &pool.newest->newer : &pool.oldest) = block;
    pool.newest = block;
    pool.facts.cached_bytes += block->bytes;
}

static fck_block *find_block(size_t bytes) {
    for (fck_block *block = pool.newest; block != NULL; block = block->older) {
        if (block->bytes >= bytes && block->bytes - bytes <= block->bytes / WASTE) {
            return block;
        }
    }
    return NULL;
}

/* Returns the limit of bytes in use plus cached bytes, if `more` bytes are put in use next. The
 * limit is above the peak of bytes in use, because block sizes alternate within a step. Forward
 * allocates gathers, the end of backward allocates gradients. */
static uint64_t max_pool_bytes(uint64_t more) {
    const uint64_t used = pool.facts.used_bytes + more;
    const uint64_t peak = used > pool.facts.peak_bytes ? used : pool.facts.peak_bytes;
    const uint64_t slack = peak / SLACK;
    return peak + (slack > LEAST_SLACK ? slack : LEAST_SLACK);
}

/* Removes the oldest cached blocks until at most `limit` bytes are in use or cached. Returns the
 * removed blocks as a list. */
static fck_block *remove_oldest(uint64_t limit) {
    fck_block *removed = NULL;
    while (pool.oldest != NULL && pool.facts.used_bytes + pool.facts.cached_bytes > limit) {
        fck_block *block = pool.oldest;
        unlink_block(block);
        block->older = removed;
        removed = block;
    }
    return removed;
}

static void update_peak(void) {
    uint64_t *peak = &pool.peaks[pool.round];
    *peak = pool.facts.used_bytes > *peak ? pool.facts.used_bytes : *peak;
    pool.facts.peak_bytes = *peak > pool.facts.peak_bytes ? *peak : pool.facts.peak_bytes;
}

static void add_used(uint64_t bytes) {
    pool.facts.used_bytes += bytes;
    update_peak();
}

/* ---- without the mutex ---- */

static void unmap_all(fck_block *removed) {
    while (removed != NULL) {
        fck_block *next = removed->older;
        unmap_block(removed);
        removed = next;
    }
}

/* Maps a block, which is counted only if the mapping succeeds. Returns NULL on failure. */
static fck_block *map_used_block(size_t bytes) {
    (void)pthread_mutex_lock(&pool.mutex);
    fck_block *removed = remove_oldest(max_pool_bytes(bytes) - bytes);
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(removed);
    fck_block *block = map_block(bytes);
    if (block == NULL) {
        return NULL;
    }
    (void)pthread_mutex_lock(&pool.mutex);
    pool.facts.mapped++;
    add_used(bytes);
    removed = remove_oldest(max_pool_bytes(0)); /* other threads may have mapped, too */
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(removed);
    return block;
}

fck_block *fck_pool_take(size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, register_fork_handlers);
    const size_t needed = round_up(bytes, page_bytes());
    (void)pthread_mutex_lock(&pool.mutex);
    fck_block *block = find_block(needed);
    pool.facts.taken++;
    if (block != NULL) {
        unlink_block(block);
        add_used(block->bytes);
    }
    (void)pthread_mutex_unlock(&pool.mutex);
    return block != NULL ? block : map_used_block(needed);
}

void fck_pool_give(fck_block *block) {
    if (block == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&pool.mutex);
    assert(block->bytes <= pool.facts.used_bytes);
    pool.facts.used_bytes -= block->bytes;
    push_block(block);
    fck_block *removed = remove_oldest(pool.caching_disabled ? 0 : max_pool_bytes(0));
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(removed);
}

void fck_pool_begin_round(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    pool.round = (pool.round + 1) % ROUNDS;
    pool.peaks[pool.round] = 0;
    pool.facts.peak_bytes = 0;
    for (int i = 0; i < ROUNDS; i++) {
        if (pool.peaks[i] > pool.facts.peak_bytes) {
            pool.facts.peak_bytes = pool.peaks[i];
        }
    }
    update_peak();
    fck_block *removed = remove_oldest(max_pool_bytes(0));
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(removed);
}

void fck_pool_trim(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    fck_block *removed = remove_oldest(0);
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(removed);
}

void fck_pool_set_caching(int on) {
    (void)pthread_mutex_lock(&pool.mutex);
    pool.caching_disabled = !on;
    (void)pthread_mutex_unlock(&pool.mutex);
    if (!on) {
        fck_pool_trim();
    }
}

fck_pool_facts fck_pool_stats(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    const fck_pool_facts facts = pool.facts;
    (void)pthread_mutex_unlock(&pool.mutex);
    return facts;
}
