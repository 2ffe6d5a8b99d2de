/* Boards: who sleeps is woken.
 *
 * The room is stopped between any two of its looks at words that ranks share, and another rank does
 * something there: what is lost in a window of a few instructions is found without waiting for it
 * to happen. After that, ranks that are processes of their own sleep and wake one another. */
#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/* ---- what comes between the room and the words it shares ---- */

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
#include "board_ranks.h"
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
    const _Atomic uint32_t *bell;
    uint32_t rung;
    int woken;
} stopped;

static long futex(long number, _Atomic uint32_t *word, int does, uint32_t value, const void *time) {
    step();
    let_be_seen();
    if (does == FUTEX_WAKE && stopped.bell != NULL) {
        stopped.woken = 1;
    }
    if (does == FUTEX_WAIT && stopped.stops &&
        atomic_load_explicit(word, memory_order_seq_cst) == value) {
        stopped.bell = word;
        stopped.rung = value;
        longjmp(stopped.at, 1);
    }
    return syscall(number, word, does, value, time, NULL, 0);
}

static void anew(void) {
    between.at = 0;
    memset(&stopped, 0, sizeof stopped);
    (void)close_two(NULL);
    (void)open_two(NULL);
}

static void reads(void) {
    fcb_read(boards[1]);
}

static void gives_up(void) {
    fcb_give_up(boards[1]);
}

static void posts_and_gives_up(void) {
    posts();
    gives_up();
}

static void (*const news[])(void) = {posts, reads, gives_up, posts_and_gives_up};
enum { NEWS = sizeof news / sizeof news[0] };

/* Until it would sleep. Whether it does. */
static uint32_t known_before;
static int asleep_now;

static void falls_asleep(void) {
    stopped.stops = 1;
    asleep_now = 1;
    if (setjmp(stopped.at) == 0) {
        sleep_on_bell(boards[0], known_before, INT64_MAX);
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
            known_before = fcb_news(boards[0]);
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
            known_before = fcb_news(boards[0]);
            asleep_now = 0;
            between.does = falls_asleep;
            between.at = steps + 1;
            news[i]();
            step();
            let_be_seen();
            left = between.at;
            assert_true(!asleep_now || stopped.woken);
            assert_true(!asleep_now || boards[0]->own.page->bell != stopped.rung);
        }
        assert_true(steps > 2);
    }
}

static void a_look_while_a_rank_posts_and_gives_up_misses_nothing(void **state) {
    (void)state;
    for (int left = 0, steps = 0; left == 0; steps++) {
        fcb_message got;
        anew();
        between.does = posts_and_gives_up;
        between.at = steps + 1;
        const fcb_state first = fcb_look(boards[0], 1, &got);
        left = between.at;
        between.at = 0;
        assert_true(first == FCB_YET || first == FCB_HERE);
        assert_int_equal(fcb_look(boards[0], 1, &got), left == 0 ? FCB_HERE : FCB_YET);
    }
}

static void a_sleep_ends(void **state) {
    (void)state;
    const int64_t times[] = {0, -1, 1, INT64_MIN};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        fcb_sleep(boards[0], fcb_news(boards[0]), times[i]);
    }
    fcb_sleep(boards[0], fcb_news(boards[0]) + 1, INT64_MAX);
    assert_int_equal(boards[0]->own.page->asleep, 0);
}

/* ---- ranks that sleep ---- */

enum { PINGS = 20000 };

static void ping(void) {
    for (uint32_t i = 0; i < me.of->messages; i++) {
        post_small(i % 2);
        read_small(i % 2);
    }
}

static void no_sleeper_is_forgotten(void **state) {
    (void)state;
    run_ranks(&(play){ping, 2, ROOM, 0, PINGS, 0});
    run_ranks(&(play){ping, 3, LINE, 0, PINGS / 20, 0});
}

static void wait_for_sleepers(int rank, uint32_t threads) {
    while (atomic_load(&me.board->views[rank].page->asleep) != threads) {
        (void)sched_yield();
    }
}

static void *sleep_beside(void *known) {
    sleep_on_bell(me.board, *(const uint32_t *)known, now_ns() + (int64_t)DAY * 1000000);
    return NULL;
}

/* Two threads of rank 0 sleep, until rank 1 does something. */
static void sleep_until(void (*does)(void)) {
    uint32_t known = fcb_news(me.board);
    meet();
    if (me.rank == 0) {
        pthread_t thread;
        must(pthread_create(&thread, NULL, sleep_beside, &known) == 0);
        (void)sleep_beside(&known);
        must(pthread_join(thread, NULL) == 0);
        must(fcb_news(me.board) != known);
        must(atomic_load(&me.board->own.page->asleep) == 0);
    } else if (me.rank == 1) {
        wait_for_sleepers(0, 2);
        does();
    }
    meet();
}

static void post_one_to_sleepers(void) {
    must(post(9));
}

static void give_up_before_sleepers(void) {
    fcb_give_up(me.board);
}

static void sleep_until_a_post(void) {
    sleep_until(post_one_to_sleepers);
    must(me.rank != 0 || look(1, 9));
}

/* Rank 0 has filled its board. */
static void sleep_until_a_read(void) {
    must(post(me.rank == 0 ? ROOM : 0));
    meet();
    must(me.rank != 0 || !post(1));
    must(me.rank != 1 || look(0, ROOM));
    sleep_until(mark_read);
    must(me.rank != 0 || post(1));
}

static void sleep_until_the_other_gives_up(void) {
    fcb_message none;
    sleep_until(give_up_before_sleepers);
    must(me.rank != 0 || fcb_look(me.board, 1, &none) == FCB_GONE);
}

static void sleep_until_the_other_closes(void) {
    fcb_message none;
    sleep_until(close_board);
    must(me.rank != 0 || fcb_look(me.board, 1, &none) == FCB_GONE);
}

static void all_sleepers_of_a_rank_are_woken(void **state) {
    (void)state;
    run_ranks(&(play){sleep_until_a_post, 2, ROOM, 0, 0, 0});
    run_ranks(&(play){sleep_until_a_post, 3, ROOM, 0, 0, 0});
    run_ranks(&(play){sleep_until_a_read, 2, ROOM, 0, 0, 0});
    run_ranks(&(play){sleep_until_the_other_gives_up, 3, ROOM, 0, 0, 0});
    run_ranks(&(play){sleep_until_the_other_closes, 2, ROOM, 0, 0, 0});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(news_at_any_step_of_a_sleeper_keep_it_awake, open_two,
                                        close_two),
        cmocka_unit_test_setup_teardown(who_falls_asleep_at_any_step_of_news_is_woken, open_two,
                                        close_two),
        cmocka_unit_test_setup_teardown(a_look_while_a_rank_posts_and_gives_up_misses_nothing,
                                        open_two, close_two),
        cmocka_unit_test_setup_teardown(a_sleep_ends, open_two, close_two),
        cmocka_unit_test(no_sleeper_is_forgotten),
        cmocka_unit_test(all_sleepers_of_a_rank_are_woken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
