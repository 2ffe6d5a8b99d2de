/* Shared-memory ring: a change wakes every waiter.
 *
 * The first tests stop the ring before each of its accesses to shared words and run an action of
 * another rank there. These tests reach races of a few instructions deterministically. The later
 * tests use waiting processes. */
#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/* ---- instrumented accesses to shared words ---- */

static void step(void);
static long futex(long number, _Atomic uint32_t *word, int op, uint32_t value, const void *time);

/* An action to run before the at-th step from now. 0: none, or it has run. */
static struct {
    int at;
    void (*run)(void);
} injected;

/* Before the action has run, a store that is not seq_cst becomes visible to peers only at its
 * owner's next store, addition or futex call. Loads, also seq_cst ones, do not publish it, as the
 * memory model allows. */
typedef struct delayed_store {
    _Atomic uint32_t *word; /* NULL: none is delayed */
    uint32_t value;
} delayed_store;

static delayed_store delayed;

static inline void flush_store(void) {
    if (delayed.word != NULL) {
        atomic_store_explicit(delayed.word, delayed.value, memory_order_seq_cst);
        delayed.word = NULL;
    }
}

static inline uint32_t load(const _Atomic uint32_t *word, memory_order order) {
    step();
    return word == delayed.word ? delayed.value : atomic_load_explicit(word, order);
}

static inline void store(_Atomic uint32_t *word, uint32_t value, memory_order order) {
    step();
    flush_store();
    delayed = (delayed_store){word, value};
    if (order == memory_order_seq_cst || injected.at == 0) {
        flush_store();
    }
}

static inline uint32_t add(_Atomic uint32_t *word, uint32_t value) {
    step();
    flush_store();
    return atomic_fetch_add_explicit(word, value, memory_order_seq_cst);
}

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_fetch_add
#undef atomic_fetch_sub
#define atomic_load(word) load(word, memory_order_seq_cst)
#define atomic_load_explicit(word, order) load(word, order)
#define atomic_store(word, value) store(word, value, memory_order_seq_cst)
#define atomic_store_explicit(word, value, order) store(word, value, order)
#define atomic_fetch_add(word, value) add(word, value)
#define atomic_fetch_sub(word, value) add(word, 0u - (value))
#define syscall(number, word, op, value, time, unused, zero) futex(number, word, op, value, time)
#include "shm_ring_ranks.h"
#undef syscall

#include <pthread.h>

static void step(void) {
    if (injected.at > 0 && --injected.at == 0) {
        const delayed_store held = delayed;
        delayed.word = NULL; /* the action runs as another rank: it must not flush this store */
        injected.run();
        flush_store();
        delayed = held;
    }
}

/* Replaces the futex wait in single-threaded tests: a waiter jumps out instead of blocking. */
static struct {
    int stops;
    jmp_buf at;
    const _Atomic uint32_t *doorbell;
    uint32_t doorbell_value;
    int woken;
} stopped;

static long futex(long number, _Atomic uint32_t *word, int op, uint32_t value, const void *time) {
    step();
    flush_store();
    if (op == FUTEX_WAKE && stopped.doorbell != NULL) {
        stopped.woken = 1;
    }
    if (op == FUTEX_WAIT && stopped.stops &&
        atomic_load_explicit(word, memory_order_seq_cst) == value) {
        stopped.doorbell = word;
        stopped.doorbell_value = value;
        longjmp(stopped.at, 1);
    }
    return syscall(number, word, op, value, time, NULL, 0);
}

static void reset_rings(void) {
    injected.at = 0;
    memset(&stopped, 0, sizeof stopped);
    (void)destroy_two_rings(NULL);
    (void)create_two_rings(NULL);
}

static void peer_releases(void) {
    shm_ring_release(rings[1]);
}

static void peer_closes(void) {
    shm_ring_mark_closed(rings[1]);
}

static void peer_commits_and_closes(void) {
    peer_commits();
    peer_closes();
}

static void (*const changes[])(void) = {peer_commits, peer_releases, peer_closes,
                                        peer_commits_and_closes};
enum { CHANGES = sizeof changes / sizeof changes[0] };

/* Arguments and result of fall_asleep. */
static uint32_t initial_seq;
static int is_asleep;

static void fall_asleep(void) {
    stopped.stops = 1;
    is_asleep = 1;
    if (setjmp(stopped.at) == 0) {
        wait_on_doorbell(rings[0], initial_seq, INT64_MAX);
        is_asleep = 0;
    }
    stopped.stops = 0;
}

static void ring_change_at_any_step_of_a_waiter_prevents_its_sleep(void **state) {
    (void)state;
    for (size_t i = 0; i < CHANGES; i++) {
        int steps = 0;
        for (int left = 0; left == 0; steps++) {
            reset_rings();
            initial_seq = shm_ring_seq(rings[0]);
            injected.run = changes[i];
            injected.at = steps + 1;
            fall_asleep();
            left = injected.at;
            assert_true(left > 0 || !is_asleep);
        }
        assert_true(steps > 4);
        assert_true(is_asleep); /* in the last iteration, where the action did not run */
    }
}

static void waiter_that_sleeps_at_any_step_of_a_ring_change_is_woken(void **state) {
    (void)state;
    for (size_t i = 0; i < CHANGES; i++) {
        int steps = 0, sleeps = 0;
        for (int left = 0; left == 0; steps++) {
            reset_rings();
            initial_seq = shm_ring_seq(rings[0]);
            is_asleep = 0;
            injected.run = fall_asleep;
            injected.at = steps + 1;
            changes[i]();
            step();
            flush_store();
            left = injected.at;
            assert_true(!is_asleep || stopped.woken);
            assert_true(!is_asleep || rings[0]->own.page->doorbell != stopped.doorbell_value);
            sleeps += is_asleep;
        }
        assert_true(steps > 2 && sleeps > 0);
    }
}

static void peek_during_commit_and_close_returns_the_message(void **state) {
    (void)state;
    int steps = 0;
    for (int left = 0; left == 0; steps++) {
        shm_ring_message got;
        reset_rings();
        injected.run = peer_commits_and_closes;
        injected.at = steps + 1;
        const shm_ring_peek_result first = shm_ring_peek(rings[0], 1, &got);
        left = injected.at;
        injected.at = 0;
        assert_true(first == SHM_RING_EMPTY || first == SHM_RING_READY);
        assert_int_equal(shm_ring_peek(rings[0], 1, &got),
                         left == 0 ? SHM_RING_READY : SHM_RING_EMPTY);
    }
    assert_true(steps > 2);
}

static void wait_returns_after_its_timeout(void **state) {
    (void)state;
    const int64_t times[] = {0, -1, 1, INT64_MIN};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        shm_ring_wait(rings[0], shm_ring_seq(rings[0]), times[i]);
    }
    shm_ring_wait(rings[0], shm_ring_seq(rings[0]) + 1, INT64_MAX);
    assert_int_equal(rings[0]->own.page->sleepers, 0);
}

/* ---- waiting processes ---- */

enum { PINGS = 20000 };

static void ping(void) {
    for (uint32_t i = 0; i < me.test->messages; i++) {
        commit_blocking(i % 2);
        read_blocking(i % 2);
    }
}

static void ping_pong_between_waiting_ranks_completes(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = ping, .world_size = 2, .capacity = CAPACITY, .messages = PINGS});
    run_ranks(
        &(scenario){.run = ping, .world_size = 3, .capacity = CACHE_LINE, .messages = PINGS / 20});
}

static void wait_for_sleepers(int rank, uint32_t threads) {
    while (atomic_load(&me.ring->views[rank].page->sleepers) != threads) {
        (void)sched_yield();
    }
}

static void *wait_in_thread(void *seen_seq) {
    wait_on_doorbell(me.ring, *(const uint32_t *)seen_seq, now_ns() + (int64_t)DAY_MS * 1000000);
    return NULL;
}

/* Two threads of rank 0 wait until rank 1 has run the action. */
static void wait_for_action(void (*run)(void)) {
    uint32_t seen_seq = shm_ring_seq(me.ring);
    barrier();
    if (me.rank == 0) {
        pthread_t thread;
        require(pthread_create(&thread, NULL, wait_in_thread, &seen_seq) == 0);
        (void)wait_in_thread(&seen_seq);
        require(pthread_join(thread, NULL) == 0);
        require(shm_ring_seq(me.ring) != seen_seq);
        require(atomic_load(&me.ring->own.page->sleepers) == 0);
    } else if (me.rank == 1) {
        wait_for_sleepers(0, 2);
        run();
    }
    barrier();
}

static void commit_one(void) {
    require(commit(9));
}

static void mark_closed(void) {
    shm_ring_mark_closed(me.ring);
}

static void wait_for_commit(void) {
    wait_for_action(commit_one);
    require(me.rank != 0 || check_next(1, 9));
}

/* Rank 0 fills its ring, so it can commit only after rank 1 has released a message. */
static void wait_for_release(void) {
    require(commit(me.rank == 0 ? CAPACITY : 0));
    barrier();
    require(me.rank != 0 || !commit(1));
    require(me.rank != 1 || check_next(0, CAPACITY));
    wait_for_action(release_one);
    require(me.rank != 0 || commit(1));
}

static void wait_for_mark_closed(void) {
    shm_ring_message none;
    wait_for_action(mark_closed);
    require(me.rank != 0 || shm_ring_peek(me.ring, 1, &none) == SHM_RING_CLOSED);
}

static void wait_for_destroy(void) {
    shm_ring_message none;
    wait_for_action(destroy_ring);
    require(me.rank != 0 || shm_ring_peek(me.ring, 1, &none) == SHM_RING_CLOSED);
}

static void ring_change_wakes_all_waiting_threads_of_a_rank(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = wait_for_commit, .world_size = 2, .capacity = CAPACITY});
    run_ranks(&(scenario){.run = wait_for_commit, .world_size = 3, .capacity = CAPACITY});
    run_ranks(&(scenario){.run = wait_for_release, .world_size = 2, .capacity = CAPACITY});
    run_ranks(&(scenario){.run = wait_for_mark_closed, .world_size = 3, .capacity = CAPACITY});
    run_ranks(&(scenario){.run = wait_for_destroy, .world_size = 2, .capacity = CAPACITY});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ring_change_at_any_step_of_a_waiter_prevents_its_sleep,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(waiter_that_sleeps_at_any_step_of_a_ring_change_is_woken,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(peek_during_commit_and_close_returns_the_message,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(wait_returns_after_its_timeout, create_two_rings,
                                        destroy_two_rings),
        cmocka_unit_test(ping_pong_between_waiting_ranks_completes),
        cmocka_unit_test(ring_change_wakes_all_waiting_threads_of_a_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
