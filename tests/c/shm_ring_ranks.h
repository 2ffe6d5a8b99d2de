/* What the tests of rings share: ranks that are processes of their own, and messages of which each
 * byte is known. The source of the capacity is included: tests check_next at what is behind its functions.
 *
 * No test measures time. Who waits for ever is killed by an alarm. */
#ifndef FSDP_C_TESTS_BOARD_RANKS_H
#define FSDP_C_TESTS_BOARD_RANKS_H

#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "transport/shm_ring.c"

#include <signal.h>
#include <sys/wait.h>

/* ---- ranks ---- */

enum { CAPACITY = 4096, ALARM = 100 /* seconds */, FAILED = 'f', HERE = 'h' };

/* What a test wants to know of the ranks that it starts. */
typedef struct scenario {
    void (*does)(void);
    int world_size;
    size_t capacity;
    uint32_t first;    /* the number of the first message */
    uint32_t messages; /* of each rank */
    int dies;          /* the rank that is killed; 0: none, for rank 0 looks on */
} scenario;

/* A rank: the pid that this is. */
static struct {
    const scenario *of;
    shm_ring *ring;
    int rank, world_size;
    int up, down; /* pipes to and from the pid of the test */
    uint32_t written, read;
    uint64_t random;
} me;

#define require(what) ((what) ? (void)0 : fail_requirement(#what, __LINE__))

static inline void fail_requirement(const char *what, int line) {
    const char failed = FAILED;
    (void)fprintf(stderr, "shm_ring:%d: rank %d: not so: %s\n", line, me.rank, what);
    (void)!write(me.up, &failed, 1);
    _exit(1);
}

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint32_t random_below(uint32_t below) {
    me.random = mix(me.random);
    return (uint32_t)(me.random >> 32) % below;
}

/* All ranks have come as far. */
static inline void barrier(void) {
    char answer = HERE;
    require(write(me.up, &answer, 1) == 1);
    require(read(me.down, &answer, 1) == 1);
}

static inline void run_as_rank(void) {
    struct {
        int rank;
        shm_ring_handle handle;
    } mine;
    shm_ring_handle handles[SHM_RING_MAX_RANKS];
    const size_t bytes = sizeof handles[0] * (size_t)me.world_size;
    (void)alarm(ALARM);
    me.random = (uint64_t)me.rank;
    me.ring = shm_ring_create(me.of->capacity);
    require(me.ring != NULL);
    me.ring->own.page->committed = me.ring->own.page->released = me.ring->read_seq = me.of->first;
    memset(&mine, 0, sizeof mine);
    mine.rank = me.rank;
    mine.handle = shm_ring_get_handle(me.ring);
    require(write(me.up, &mine, sizeof mine) == (ssize_t)sizeof mine);
    require(read(me.down, handles, bytes) == (ssize_t)bytes);
    require(shm_ring_connect(me.ring, me.rank, me.world_size, handles));
    barrier(); /* who ends before others have found it was never there */
    me.of->does();
    shm_ring_destroy(me.ring);
    _exit(0);
}

static inline void distribute_handles(int world_size, int from, const int *to) {
    struct {
        int rank;
        shm_ring_handle handle;
    } one;
    shm_ring_handle handles[SHM_RING_MAX_RANKS];
    for (int i = 0; i < world_size; i++) {
        assert_int_equal(read(from, &one, sizeof one), sizeof one);
        handles[one.rank] = one.handle;
    }
    for (int i = 0; i < world_size; i++) {
        const size_t bytes = sizeof handles[0] * (size_t)world_size;
        assert_int_equal(write(to[i], handles, bytes), bytes);
    }
}

/* Answers each meeting, until no rank is left. */
static inline void serve_barriers(int world_size, int from, const int *to, const pid_t *ranks) {
    char said = 0;
    for (int here = 0; read(from, &said, 1) == 1; here = here == world_size ? 0 : here) {
        for (int i = 0; said == FAILED && i < world_size; i++) {
            (void)kill(ranks[i], SIGKILL);
        }
        here++;
        for (int i = 0; said == HERE && here == world_size && i < world_size; i++) {
            assert_int_equal(write(to[i], &said, 1), 1);
        }
    }
}

static inline void start_rank(const scenario *of, int rank, int from, int to) {
    me.of = of;
    me.rank = rank;
    me.world_size = of->world_size;
    me.down = from;
    me.up = to;
    run_as_rank();
}

static inline void run_ranks(const scenario *of) {
    (void)signal(SIGPIPE, SIG_IGN); /* what is said to a rank that has died */
    int up[2], down[SHM_RING_MAX_RANKS][2], to[SHM_RING_MAX_RANKS];
    pid_t ranks[SHM_RING_MAX_RANKS];
    assert_int_equal(pipe(up), 0);
    for (int i = 0; i < of->world_size; i++) {
        assert_int_equal(pipe(down[i]), 0);
        ranks[i] = fork();
        assert_true(ranks[i] >= 0);
        if (ranks[i] == 0) {
            (void)close(up[0]);
            start_rank(of, i, down[i][0], up[1]);
        }
        (void)close(down[i][0]);
        to[i] = down[i][1];
    }
    (void)close(up[1]);
    distribute_handles(of->world_size, up[0], to);
    serve_barriers(of->world_size, up[0], to, ranks);
    for (int i = 0; i < of->world_size; i++) {
        int status = -1;
        assert_int_equal(waitpid(ranks[i], &status, 0), ranks[i]);
        if (i > 0 && of->dies == i) {
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        } else {
            assert_int_equal(status, 0);
        }
        (void)close(to[i]);
    }
    (void)close(up[0]);
}

/* ---- messages ---- */

static inline uint64_t key_of(int rank, uint32_t message) {
    return mix((uint64_t)rank << 32 | message);
}

static inline uint32_t kind_of(int rank, uint32_t message) {
    return (uint32_t)key_of(rank, message);
}

static inline size_t size_of(int rank, uint32_t message) {
    const uint64_t key = mix(key_of(rank, message));
    const size_t capacity = me.of->capacity, some = (size_t)(key >> 32);
    const size_t sizes[] = {
        0, 1, capacity, capacity / 2 + 1, capacity / 2, some % 65, some % capacity};
    const size_t of = (size_t)(key % 32);
    return of < sizeof sizes / sizeof sizes[0] ? sizes[of] : some % (capacity / 8);
}

/* Each byte depends on the message and on where it is in it. */
static inline void fill(char *at, size_t bytes, uint64_t key) {
    for (size_t i = 0; i < bytes; i += sizeof key) {
        key = mix(key);
        memcpy(at + i, &key, bytes - i < sizeof key ? bytes - i : sizeof key);
    }
}

static inline int holds(const char *at, size_t bytes, uint64_t key) {
    for (size_t i = 0; i < bytes; i += sizeof key) {
        key = mix(key);
        if (memcmp(at + i, &key, bytes - i < sizeof key ? bytes - i : sizeof key) != 0) {
            return 0;
        }
    }
    return 1;
}

static inline int commit(size_t bytes) {
    char *buffer = shm_ring_reserve(me.ring, bytes);
    if (buffer == NULL) {
        return 0;
    }
    require((size_t)(buffer - data_of(&me.ring->own)) <= me.of->capacity - bytes);
    fill(buffer, bytes, key_of(me.rank, me.written));
    shm_ring_commit(me.ring, kind_of(me.rank, me.written));
    me.written++;
    return 1;
}

/* Whether the next message of a rank is there; then it is the right one. */
static inline int check_next(int rank, size_t bytes) {
    shm_ring_message got;
    const shm_ring_peek_result state = shm_ring_peek(me.ring, rank, &got);
    if (state == SHM_RING_EMPTY) {
        return 0;
    }
    require(state == SHM_RING_READY);
    require(got.tag == kind_of(rank, me.read) && got.bytes == bytes);
    require(holds(got.data, got.bytes, key_of(rank, me.read)));
    return 1;
}

static inline int check_all_peers(void) {
    for (int other = 0; other < me.world_size; other++) {
        if (other != me.rank && !check_next(other, size_of(other, me.read))) {
            return 0;
        }
    }
    return 1;
}

static inline void release_one(void) {
    shm_ring_release(me.ring);
    me.read++;
}

static inline int try_read(void) {
    if (me.read == me.of->messages || !check_all_peers()) {
        return 0;
    }
    for (uint32_t i = random_below(4); i > 0; i--) {
        (void)sched_yield();
    }
    require(check_all_peers()); /* nobody has written there in the meantime */
    release_one();
    return 1;
}

static inline int try_commit(void) {
    return me.written < me.of->messages && commit(size_of(me.rank, me.written));
}

/* Without the looks before a sleep, or with them. No sleep ends by itself before the alarm. */
static inline void wait_without_timeout(uint32_t known) {
    if (random_below(8) == 0) {
        shm_ring_wait(me.ring, known, INT64_MAX);
    } else {
        wait_on_doorbell(me.ring, known, now_ns() + (int64_t)DAY_MS * 1000000);
    }
}

/* A message for which there will be capacity, though nothing is read. */
static inline void commit_blocking(size_t bytes) {
    for (;;) {
        const uint32_t known = shm_ring_seq(me.ring);
        if (commit(bytes)) {
            return;
        }
        wait_without_timeout(known);
    }
}

/* The next one of all others, of that many bytes, by a rank that sleeps until it is there. */
static inline void read_blocking(size_t bytes) {
    for (int other = 0; other < me.world_size; other++) {
        for (;;) {
            const uint32_t known = shm_ring_seq(me.ring);
            if (other == me.rank || check_next(other, bytes)) {
                break;
            }
            wait_without_timeout(known);
        }
    }
    release_one();
}

static inline void destroy_ring(void) {
    shm_ring_destroy(me.ring);
    me.ring = NULL;
}

/* ---- two ranks of one pid ---- */

/* Two rings of one pid, which shm_ring_connect refuses: of ranks 0 and 1. */
static shm_ring *rings[2];

static inline int create_two_rings(void **state) {
    (void)state;
    shm_ring_handle handles[2];
    for (int i = 0; i < 2; i++) {
        rings[i] = shm_ring_create(CAPACITY);
        assert_non_null(rings[i]);
        handles[i] = shm_ring_get_handle(rings[i]);
        rings[i]->pid = 0;
    }
    for (int i = 0; i < 2; i++) {
        assert_true(shm_ring_connect(rings[i], i, 2, handles));
        rings[i]->pid = (int64_t)getpid();
    }
    return 0;
}

static inline int destroy_two_rings(void **state) {
    (void)state;
    shm_ring_destroy(rings[0]);
    shm_ring_destroy(rings[1]);
    return 0;
}

static inline void peer_commits(void) {
    assert_non_null(shm_ring_reserve(rings[1], 1));
    shm_ring_commit(rings[1], 1);
}

#endif
