/* Shared by the tests of the shared-memory ring: ranks as processes, and messages whose bytes
 * follow from their rank and number. Includes shm_ring.c, so that tests can read and corrupt its
 * state.
 *
 * No test measures time. SIGALRM kills a process that waits forever. */
#ifndef FSDP_C_TESTS_SHM_RING_RANKS_H
#define FSDP_C_TESTS_SHM_RING_RANKS_H

#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "splitmix.h"
#include "transport/shm_ring.c"

#include <signal.h>
#include <sys/wait.h>

/* ---- ranks ---- */

enum { CAPACITY = 4096, ALARM = 100 /* seconds */, FAILED = 'f', HERE = 'h' };

/* The ranks of a test and the function that each of them runs. */
typedef struct scenario {
    void (*run)(void);
    int world_size;
    size_t capacity;
    uint32_t first_counter; /* initial value of the message counters */
    uint32_t messages;      /* of each rank */
    int killed_rank;        /* 0: none, because rank 0 checks the others */
} scenario;

/* The rank that this process runs. */
static struct {
    const scenario *test;
    shm_ring *ring;
    int rank, world_size;
    int up, down; /* pipes to and from the test's process */
    uint32_t written, read;
    uint64_t random;
} me;

#define require(condition) ((condition) ? (void)0 : fail_requirement(#condition, __LINE__))

static inline void fail_requirement(const char *condition, int line) {
    const char failed = FAILED;
    (void)fprintf(stderr, "shm_ring:%d: rank %d: failed: %s\n", line, me.rank, condition);
    (void)!write(me.up, &failed, 1);
    _exit(1);
}

static inline uint64_t mix(uint64_t x) {
    return splitmix64(&x);
}

static inline uint32_t random_below(uint32_t below) {
    me.random = mix(me.random);
    return (uint32_t)(me.random >> 32) % below;
}

/* Blocks until all ranks have called it. */
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
    me.ring = shm_ring_create(me.test->capacity);
    require(me.ring != NULL);
    me.ring->own.page->committed = me.ring->own.page->released = me.ring->read_seq =
        me.test->first_counter;
    memset(&mine, 0, sizeof mine);
    mine.rank = me.rank;
    mine.handle = shm_ring_get_handle(me.ring);
    require(write(me.up, &mine, sizeof mine) == (ssize_t)sizeof mine);
    require(read(me.down, handles, bytes) == (ssize_t)bytes);
    require(shm_ring_connect(me.ring, me.rank, me.world_size, handles));
    barrier(); /* a rank that ends before its peers have mapped it would fail their connect */
    me.test->run();
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

/* Serves barrier() until all ranks have ended. Kills all ranks after a failure. */
static inline void serve_barriers(int world_size, int from, const int *to, const pid_t *ranks) {
    char byte = 0;
    for (int arrived = 0; read(from, &byte, 1) == 1;
         arrived = arrived == world_size ? 0 : arrived) {
        for (int i = 0; byte == FAILED && i < world_size; i++) {
            (void)kill(ranks[i], SIGKILL);
        }
        arrived++;
        for (int i = 0; byte == HERE && arrived == world_size && i < world_size; i++) {
            assert_int_equal(write(to[i], &byte, 1), 1);
        }
    }
}

static inline void start_rank(const scenario *test, int rank, int from, int to) {
    me.test = test;
    me.rank = rank;
    me.world_size = test->world_size;
    me.down = from;
    me.up = to;
    run_as_rank();
}

static inline void run_ranks(const scenario *test) {
    (void)signal(SIGPIPE, SIG_IGN); /* raised by writes to a rank that has ended */
    int up[2], down[SHM_RING_MAX_RANKS][2], to[SHM_RING_MAX_RANKS];
    pid_t ranks[SHM_RING_MAX_RANKS];
    assert_int_equal(pipe(up), 0);
    for (int i = 0; i < test->world_size; i++) {
        assert_int_equal(pipe(down[i]), 0);
        ranks[i] = fork();
        assert_true(ranks[i] >= 0);
        if (ranks[i] == 0) {
            (void)close(up[0]);
            start_rank(test, i, down[i][0], up[1]);
        }
        (void)close(down[i][0]);
        to[i] = down[i][1];
    }
    (void)close(up[1]);
    distribute_handles(test->world_size, up[0], to);
    serve_barriers(test->world_size, up[0], to, ranks);
    for (int i = 0; i < test->world_size; i++) {
        int status = -1;
        assert_int_equal(waitpid(ranks[i], &status, 0), ranks[i]);
        if (i > 0 && test->killed_rank == i) {
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

static inline uint32_t tag_of(int rank, uint32_t message) {
    return (uint32_t)key_of(rank, message);
}

static inline size_t size_of(int rank, uint32_t message) {
    const uint64_t key = mix(key_of(rank, message));
    const size_t capacity = me.test->capacity, some = (size_t)(key >> 32);
    const size_t sizes[] = {
        0, 1, capacity, capacity / 2 + 1, capacity / 2, some % 65, some % capacity};
    const size_t choice = (size_t)(key % 32);
    return choice < sizeof sizes / sizeof sizes[0] ? sizes[choice] : some % (capacity / 8);
}

/* Each byte depends on the message and on its position. */
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
    require((size_t)(buffer - data_of(&me.ring->own)) <= me.test->capacity - bytes);
    fill(buffer, bytes, key_of(me.rank, me.written));
    shm_ring_commit(me.ring, tag_of(me.rank, me.written), NULL);
    me.written++;
    return 1;
}

/* Returns whether the next message of a rank is committed, and requires its tag, size and bytes. */
static inline int check_next(int rank, size_t bytes) {
    shm_ring_message got;
    const shm_ring_peek_result state = shm_ring_peek(me.ring, rank, &got);
    if (state == SHM_RING_EMPTY) {
        return 0;
    }
    require(state == SHM_RING_READY);
    require(got.tag == tag_of(rank, me.read) && got.bytes == bytes);
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
    if (me.read == me.test->messages || !check_all_peers()) {
        return 0;
    }
    for (uint32_t i = random_below(4); i > 0; i--) {
        (void)sched_yield();
    }
    require(check_all_peers()); /* not overwritten before the release */
    release_one();
    return 1;
}

static inline int try_commit(void) {
    return me.written < me.test->messages && commit(size_of(me.rank, me.written));
}

/* Waits with or without the spins before the futex wait. The timeout is longer than ALARM. */
static inline void wait_without_timeout(uint32_t seen_seq) {
    if (random_below(8) == 0) {
        shm_ring_wait(me.ring, seen_seq, INT64_MAX);
    } else {
        wait_on_doorbell(me.ring, seen_seq, now_ns() + (int64_t)DAY_MS * 1000000);
    }
}

/* Waits for free memory, then commits a message. Precondition: the peers release memory without
 * another message of this rank. */
static inline void commit_blocking(size_t bytes) {
    for (;;) {
        const uint32_t seen_seq = shm_ring_seq(me.ring);
        if (commit(bytes)) {
            return;
        }
        wait_without_timeout(seen_seq);
    }
}

/* Waits for the next message of all peers, of `bytes` bytes, and releases it. */
static inline void read_blocking(size_t bytes) {
    for (int other = 0; other < me.world_size; other++) {
        for (;;) {
            const uint32_t seen_seq = shm_ring_seq(me.ring);
            if (other == me.rank || check_next(other, bytes)) {
                break;
            }
            wait_without_timeout(seen_seq);
        }
    }
    release_one();
}

static inline void destroy_ring(void) {
    shm_ring_destroy(me.ring);
    me.ring = NULL;
}

/* ---- two ranks of one process ---- */

/* The rings of ranks 0 and 1. shm_ring_connect refuses rings of its own process, so
 * create_two_rings sets their pid to 0 meanwhile. */
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
    shm_ring_commit(rings[1], 1, NULL);
}

#endif
