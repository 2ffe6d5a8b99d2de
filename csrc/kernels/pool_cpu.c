/* The pool; see pool.h. Blocks that wait are a list, newest first: the newest that fits is the one
 * whose pages are likeliest in a cache, and the oldest is the first to go. The list is as long as
 * the units of different sizes that a model has, so it is searched from end to end. */
#define _DEFAULT_SOURCE 1 /* madvise */
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    PAGE = 4096,
    HUGE_PAGE = 2 << 20,
    HUGE_FROM = 4 << 20,    /* blocks of that size on are aligned to huge pages, and want them */
    ROUNDS = 8,             /* whose peaks count: a step may have several models' rounds */
    WASTE = 8,              /* a block serves what is at least (1 - 1/WASTE) of it */
    SLACK = 8,              /* for blocks of other sizes: 1/SLACK of the peak, */
    LEAST_SLACK = 16 << 20, /* and so many bytes at least */
};

static struct {
    pthread_mutex_t mutex; /* guards all of it */
    fck_block *newest;
    fck_block *oldest;
    uint64_t peaks[ROUNDS]; /* of this round and those before */
    int round;
    int closed; /* nothing waits */
    fck_pool_facts facts;
} pool = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
#ifdef __SANITIZE_ADDRESS__
    .closed = 1, /* a use after free is to be one */
#endif
};

/* ---- forks: a child has only the thread that made it, and must find the mutex free ---- */

static void lock_before_fork(void) {
    (void)pthread_mutex_lock(&pool.mutex);
}

static void unlock_after_fork(void) {
    (void)pthread_mutex_unlock(&pool.mutex);
}

static void heed_forks(void) {
    (void)pthread_atfork(lock_before_fork, unlock_after_fork, unlock_after_fork);
}

/* ---- the system's memory ---- */

static size_t rounded(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* Fresh pages at a multiple of `alignment`; NULL where there are none. */
static void *map_aligned(size_t bytes, size_t alignment) {
    const size_t slack = alignment > PAGE ? alignment : 0;
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
    block->data = map_aligned(bytes, large ? HUGE_PAGE : PAGE);
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

/* ---- what waits; with the mutex held ---- */

static void take_out(fck_block *block) {
    *(block->newer != NULL ? &block->newer->older : &pool.newest) = block->older;
    *(block->older != NULL ? &block->older->newer : &pool.oldest) = block->newer;
    block->newer = block->older = NULL;
    pool.facts.waiting_bytes -= block->bytes;
}

static void put_in(fck_block *block) {
    block->older = pool.newest;
    block->newer = NULL;
    *(pool.newest != NULL ? &pool.newest->newer : &pool.oldest) = block;
    pool.newest = block;
    pool.facts.waiting_bytes += block->bytes;
}

static fck_block *find(size_t bytes) {
    for (fck_block *block = pool.newest; block != NULL; block = block->older) {
        if (block->bytes >= bytes && block->bytes - bytes <= block->bytes / WASTE) {
            return block;
        }
    }
    return NULL;
}

/* A step needs more than its peak where sizes take turns, as forward's gathers and the gradients at
 * the end of backward do. */
static uint64_t bound(void) {
    const uint64_t peak = pool.facts.peak_bytes, slack = peak / SLACK;
    return peak + (slack > LEAST_SLACK ? slack : LEAST_SLACK);
}

/* The oldest go until what is out and what waits are within that many bytes. Returns them as a
 * list. */
static fck_block *shrink(uint64_t most) {
    fck_block *gone = NULL;
    while (pool.oldest != NULL && pool.facts.out_bytes + pool.facts.waiting_bytes > most) {
        fck_block *block = pool.oldest;
        take_out(block);
        block->older = gone;
        gone = block;
    }
    return gone;
}

static void note_peak(void) {
    uint64_t *peak = &pool.peaks[pool.round];
    *peak = pool.facts.out_bytes > *peak ? pool.facts.out_bytes : *peak;
    pool.facts.peak_bytes = *peak > pool.facts.peak_bytes ? *peak : pool.facts.peak_bytes;
}

/* ---- without it ---- */

static void unmap_all(fck_block *gone) {
    while (gone != NULL) {
        fck_block *next = gone->older;
        unmap_block(gone);
        gone = next;
    }
}

fck_block *fck_pool_take(size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, heed_forks);
    const size_t wanted = rounded(bytes, PAGE);
    (void)pthread_mutex_lock(&pool.mutex);
    fck_block *block = find(wanted);
    fck_block *gone = NULL;
    if (block != NULL) {
        take_out(block);
    } else {
        pool.facts.mapped++;
    }
    pool.facts.taken++;
    pool.facts.out_bytes += block != NULL ? block->bytes : wanted;
    note_peak();
    gone = shrink(bound());
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(gone);
    if (block == NULL) {
        block = map_block(wanted);
    }
    if (block == NULL) {
        (void)pthread_mutex_lock(&pool.mutex);
        pool.facts.out_bytes -= wanted;
        (void)pthread_mutex_unlock(&pool.mutex);
    }
    return block;
}

void fck_pool_give(fck_block *block) {
    if (block == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&pool.mutex);
    pool.facts.out_bytes -= block->bytes;
    put_in(block);
    fck_block *gone = shrink(pool.closed ? 0 : bound());
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(gone);
}

void fck_pool_round(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    pool.round = (pool.round + 1) % ROUNDS;
    pool.peaks[pool.round] = 0;
    pool.facts.peak_bytes = 0;
    for (int i = 0; i < ROUNDS; i++) {
        if (pool.peaks[i] > pool.facts.peak_bytes) {
            pool.facts.peak_bytes = pool.peaks[i];
        }
    }
    note_peak();
    fck_block *gone = shrink(bound());
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(gone);
}

void fck_pool_trim(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    fck_block *gone = shrink(0);
    (void)pthread_mutex_unlock(&pool.mutex);
    unmap_all(gone);
}

void fck_pool_keep(int on) {
    (void)pthread_mutex_lock(&pool.mutex);
    pool.closed = !on;
    (void)pthread_mutex_unlock(&pool.mutex);
    if (!on) {
        fck_pool_trim();
    }
}

fck_pool_facts fck_pool_look(void) {
    (void)pthread_mutex_lock(&pool.mutex);
    const fck_pool_facts facts = pool.facts;
    (void)pthread_mutex_unlock(&pool.mutex);
    return facts;
}
