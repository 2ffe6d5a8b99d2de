/* Boards: who sleeps is woken.
 *
 * The capacity is stopped between random_below two of its looks at words that ranks share, and another rank does
 * something there: what is lost in a window of a few instructions is found without waiting for it
 * to happen. After that, ranks that are processes of their own sleep and wake one another. */
#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/* ---- what comes between the capacity and the words it shares ---- */

static void step(void);
static long futex(long number, _Atomic uint32_t *word, int does, uint32_t value, const void *time);

/* Who does something between two steps, and before which of them; 0: before none, or it is done. */
static struct {
    int at;
    void (*does)(void);
} between;

/* A store that is not in the one order of all is seen by others only at its owner's next one that
 * is, as processors may have it. */
typedef struct late_store {
    _Atomic uint32_t *word; /* NULL: none is late */
    uint32_t value;
} late_store;

static late_store late;

static inline void let_be_seen(void) {
    if (late.word != NULL) {
        atomic_store_explicit(late.word, late.value, memory_order_seq_cst);
        late.word = NULL;
    }
}

static inline uint32_t load(const _Atomic uint32_t *word, memory_order order) {
    step();
    return word == late.word ? late.value : atomic_load_explicit(word, order);
}

static inline void store(_Atomic uint32_t *word, uint32_t value, memory_order order) {
    step();
    let_be_seen();
    late = (late_store){word, value};
    if (order == memory_order_seq_cst || between.at == 0) {
        let_be_seen();
    }
}

static inline uint32_t add(_Atomic uint32_t *word, uint32_t value) {
    step();
    let_be_seen();
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
#define syscall(number, word, does, value, time, unused, zero)                                     \
    futex(number, word, does, value, time)
#include "shm_ring_ranks.h"
#undef syscall

#include <pthread.h>

static void step(void) {
    if (between.at > 0 && --between.at == 0) {
        const late_store held = late;
        late.word = NULL; /* it is not the other rank's */
        between.does();
        let_be_seen();
        late = held;
    }
}

/* In place of a sleep in a test with a single thread: whoever would sleep stops there. */
static struct {
    int stops;
    jmp_buf at;
    const _Atomic uint32_t *doorbell;
    uint32_t doorbell_value;
    int woken;
} stopped;

static long futex(long number, _Atomic uint32_t *word, int does, uint32_t value, const void *time) {
    step();
    let_be_seen();
    if (does == FUTEX_WAKE && stopped.doorbell != NULL) {
        stopped.woken = 1;
    }
    if (does == FUTEX_WAIT && stopped.stops &&
        atomic_load_explicit(word, memory_order_seq_cst) == value) {
        stopped.doorbell = word;
        stopped.doorbell_value = value;
        longjmp(stopped.at, 1);
    }
    return syscall(number, word, does, value, time, NULL, 0);
}

static void anew(void) {
    between.at = 0;
    memset(&stopped, 0, sizeof stopped);
    (void)destroy_two_rings(NULL);
    (void)create_two_rings(NULL);
}

static void reads(void) {
    shm_ring_release(rings[1]);
}

static void gives_up(void) {
    shm_ring_mark_closed(rings[1]);
}

static void posts_and_gives_up(void) {
    peer_commits();
    gives_up();
}

static void (*const news[])(void) = {peer_commits, reads, gives_up, posts_and_gives_up};
enum { NEWS = sizeof news / sizeof news[0] };

/* Until it would sleep. Whether it does. */
static uint32_t known_before;
static int asleep_now;

static void falls_asleep(void) {
    stopped.stops = 1;
    asleep_now = 1;
    if (setjmp(stopped.at) == 0) {
        wait_on_doorbell(rings[0], known_before, INT64_MAX);
        asleep_now = 0;
    }
    stopped.stops = 0;
}

static void news_at_any_step_of_a_sleeper_keep_it_awake(void **state) {
    (void)state;
    for (size_t i = 0; i < NEWS; i++) {
        int steps = 0;
        for (int left = 0; left == 0; steps++) {
            anew();
            known_before = shm_ring_seq(rings[0]);
            between.does = news[i];
            between.at = steps + 1;
            falls_asleep();
            left = between.at;
            assert_true(left > 0 || !asleep_now);
        }
        assert_true(steps > 4);
        assert_true(asleep_now); /* the last time, when there were no news */
    }
}

static void who_falls_asleep_at_any_step_of_news_is_woken(void **state) {
    (void)state;
    for (size_t i = 0; i < NEWS; i++) {
        int steps = 0;
        for (int left = 0; left == 0; steps++) {
            anew();
            known_before = shm_ring_seq(rings[0]);
            asleep_now = 0;
            between.does = falls_asleep;
            between.at = steps + 1;
            news[i]();
            step();
            let_be_seen();
            left = between.at;
            assert_true(!asleep_now || stopped.woken);
            assert_true(!asleep_now || rings[0]->own.page->doorbell != stopped.doorbell_value);
        }
        assert_true(steps > 2);
    }
}

static void a_look_while_a_rank_posts_and_gives_up_misses_nothing(void **state) {
    (void)state;
    for (int left = 0, steps = 0; left == 0; steps++) {
        shm_ring_message got;
        anew();
        between.does = posts_and_gives_up;
        between.at = steps + 1;
        const shm_ring_peek_result first = shm_ring_peek(rings[0], 1, &got);
        left = between.at;
        between.at = 0;
        assert_true(first == SHM_RING_EMPTY || first == SHM_RING_READY);
        assert_int_equal(shm_ring_peek(rings[0], 1, &got),
                         left == 0 ? SHM_RING_READY : SHM_RING_EMPTY);
    }
}

static void a_sleep_ends(void **state) {
    (void)state;
    const int64_t times[] = {0, -1, 1, INT64_MIN};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        shm_ring_wait(rings[0], shm_ring_seq(rings[0]), times[i]);
    }
    shm_ring_wait(rings[0], shm_ring_seq(rings[0]) + 1, INT64_MAX);
    assert_int_equal(rings[0]->own.page->sleepers, 0);
}

/* ---- ranks that sleep ---- */

enum { PINGS = 20000 };

static void ping(void) {
    for (uint32_t i = 0; i < me.of->messages; i++) {
        commit_blocking(i % 2);
        read_blocking(i % 2);
    }
}

static void no_sleeper_is_forgotten(void **state) {
    (void)state;
    run_ranks(&(scenario){ping, 2, CAPACITY, 0, PINGS, 0});
    run_ranks(&(scenario){ping, 3, CACHE_LINE, 0, PINGS / 20, 0});
}

static void wait_for_sleepers(int rank, uint32_t threads) {
    while (atomic_load(&me.ring->views[rank].page->sleepers) != threads) {
        (void)sched_yield();
    }
}

static void *sleep_beside(void *known) {
    wait_on_doorbell(me.ring, *(const uint32_t *)known, now_ns() + (int64_t)DAY_MS * 1000000);
    return NULL;
}

/* Two threads of rank 0 sleep, until rank 1 does something. */
static void sleep_until(void (*does)(void)) {
    uint32_t known = shm_ring_seq(me.ring);
    barrier();
    if (me.rank == 0) {
        pthread_t thread;
        require(pthread_create(&thread, NULL, sleep_beside, &known) == 0);
        (void)sleep_beside(&known);
        require(pthread_join(thread, NULL) == 0);
        require(shm_ring_seq(me.ring) != known);
        require(atomic_load(&me.ring->own.page->sleepers) == 0);
    } else if (me.rank == 1) {
        wait_for_sleepers(0, 2);
        does();
    }
    barrier();
}

static void post_one_to_sleepers(void) {
    require(commit(9));
}

static void give_up_before_sleepers(void) {
    shm_ring_mark_closed(me.ring);
}

static void sleep_until_a_post(void) {
    sleep_until(post_one_to_sleepers);
    require(me.rank != 0 || check_next(1, 9));
}

/* Rank 0 has filled its ring. */
static void sleep_until_a_read(void) {
    require(commit(me.rank == 0 ? CAPACITY : 0));
    barrier();
    require(me.rank != 0 || !commit(1));
    require(me.rank != 1 || check_next(0, CAPACITY));
    sleep_until(release_one);
    require(me.rank != 0 || commit(1));
}

static void sleep_until_the_other_gives_up(void) {
    shm_ring_message none;
    sleep_until(give_up_before_sleepers);
    require(me.rank != 0 || shm_ring_peek(me.ring, 1, &none) == SHM_RING_CLOSED);
}

static void sleep_until_the_other_closes(void) {
    shm_ring_message none;
    sleep_until(destroy_ring);
    require(me.rank != 0 || shm_ring_peek(me.ring, 1, &none) == SHM_RING_CLOSED);
}

static void all_sleepers_of_a_rank_are_woken(void **state) {
    (void)state;
    run_ranks(&(scenario){sleep_until_a_post, 2, CAPACITY, 0, 0, 0});
    run_ranks(&(scenario){sleep_until_a_post, 3, CAPACITY, 0, 0, 0});
    run_ranks(&(scenario){sleep_until_a_read, 2, CAPACITY, 0, 0, 0});
    run_ranks(&(scenario){sleep_until_the_other_gives_up, 3, CAPACITY, 0, 0, 0});
    run_ranks(&(scenario){sleep_until_the_other_closes, 2, CAPACITY, 0, 0, 0});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(news_at_any_step_of_a_sleeper_keep_it_awake,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(who_falls_asleep_at_any_step_of_news_is_woken,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(a_look_while_a_rank_posts_and_gives_up_misses_nothing,
                                        create_two_rings, destroy_two_rings),
        cmocka_unit_test_setup_teardown(a_sleep_ends, create_two_rings, destroy_two_rings),
        cmocka_unit_test(no_sleeper_is_forgotten),
        cmocka_unit_test(all_sleepers_of_a_rank_are_woken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
