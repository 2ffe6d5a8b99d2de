/* What the tests of boards share: ranks that are processes of their own, and messages of which each
 * byte is known. The source of the room is included: tests look at what is behind its functions.
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

#include "board/board.c"

#include <signal.h>
#include <sys/wait.h>

/* ---- ranks ---- */

enum { ROOM = 4096, ALARM = 100 /* seconds */, FAILED = 'f', HERE = 'h' };

/* What a test wants to know of the ranks that it starts. */
typedef struct play {
    void (*does)(void);
    int world;
    size_t room;
    uint32_t first;    /* the number of the first message */
    uint32_t messages; /* of each rank */
    int dies;          /* the rank that is killed; 0: none, for rank 0 looks on */
} play;

/* A rank: the process that this is. */
static struct {
    const play *of;
    fcb_board *board;
    int rank, world;
    int up, down; /* pipes to and from the process of the test */
    uint32_t written, read;
    uint64_t random;
} me;

#define must(what) ((what) ? (void)0 : not_so(#what, __LINE__))

static inline void not_so(const char *what, int line) {
    const char failed = FAILED;
    (void)fprintf(stderr, "test_board.c:%d: rank %d: not so: %s\n", line, me.rank, what);
    (void)!write(me.up, &failed, 1);
    _exit(1);
}

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint32_t any(uint32_t below) {
    me.random = mix(me.random);
    return (uint32_t)(me.random >> 32) % below;
}

/* All ranks have come as far. */
static inline void meet(void) {
    char answer = HERE;
    must(write(me.up, &answer, 1) == 1);
    must(read(me.down, &answer, 1) == 1);
}

static inline void be_rank(void) {
    struct {
        int rank;
        fcb_offer offer;
    } mine;
    fcb_offer offers[FCB_RANKS];
    const size_t bytes = sizeof offers[0] * (size_t)me.world;
    (void)alarm(ALARM);
    me.random = (uint64_t)me.rank;
    me.board = fcb_open(me.of->room);
    must(me.board != NULL);
    me.board->own.page->posted = me.board->own.page->read = me.board->number = me.of->first;
    memset(&mine, 0, sizeof mine);
    mine.rank = me.rank;
    mine.offer = fcb_offer_of(me.board);
    must(write(me.up, &mine, sizeof mine) == (ssize_t)sizeof mine);
    must(read(me.down, offers, bytes) == (ssize_t)bytes);
    must(fcb_join(me.board, me.rank, me.world, offers));
    meet(); /* who ends before others have found it was never there */
    me.of->does();
    fcb_close(me.board);
    _exit(0);
}

static inline void exchange_offers(int world, int from, const int *to) {
    struct {
        int rank;
        fcb_offer offer;
    } one;
    fcb_offer offers[FCB_RANKS];
    for (int i = 0; i < world; i++) {
        assert_int_equal(read(from, &one, sizeof one), sizeof one);
        offers[one.rank] = one.offer;
    }
    for (int i = 0; i < world; i++) {
        const size_t bytes = sizeof offers[0] * (size_t)world;
        assert_int_equal(write(to[i], offers, bytes), bytes);
    }
}

/* Answers each meeting, until no rank is left. */
static inline void let_them_meet(int world, int from, const int *to, const pid_t *ranks) {
    char said = 0;
    for (int here = 0; read(from, &said, 1) == 1; here = here == world ? 0 : here) {
        for (int i = 0; said == FAILED && i < world; i++) {
            (void)kill(ranks[i], SIGKILL);
        }
        here++;
        for (int i = 0; said == HERE && here == world && i < world; i++) {
            assert_int_equal(write(to[i], &said, 1), 1);
        }
    }
}

static inline void start_rank(const play *of, int rank, int from, int to) {
    me.of = of;
    me.rank = rank;
    me.world = of->world;
    me.down = from;
    me.up = to;
    be_rank();
}

static inline void run_ranks(const play *of) {
    (void)signal(SIGPIPE, SIG_IGN); /* what is said to a rank that has died */
    int up[2], down[FCB_RANKS][2], to[FCB_RANKS];
    pid_t ranks[FCB_RANKS];
    assert_int_equal(pipe(up), 0);
    for (int i = 0; i < of->world; i++) {
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
    exchange_offers(of->world, up[0], to);
    let_them_meet(of->world, up[0], to, ranks);
    for (int i = 0; i < of->world; i++) {
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
    const size_t room = me.of->room, some = (size_t)(key >> 32);
    const size_t sizes[] = {0, 1, room, room / 2 + 1, room / 2, some % 65, some % room};
    const size_t of = (size_t)(key % 32);
    return of < sizeof sizes / sizeof sizes[0] ? sizes[of] : some % (room / 8);
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

static inline int post(size_t bytes) {
    char *room = fcb_room(me.board, bytes);
    if (room == NULL) {
        return 0;
    }
    must((size_t)(room - room_of(&me.board->own)) <= me.of->room - bytes);
    fill(room, bytes, key_of(me.rank, me.written));
    fcb_post(me.board, kind_of(me.rank, me.written));
    me.written++;
    return 1;
}

/* Whether the next message of a rank is there; then it is the right one. */
static inline int look(int rank, size_t bytes) {
    fcb_message got;
    const fcb_state state = fcb_look(me.board, rank, &got);
    if (state == FCB_YET) {
        return 0;
    }
    must(state == FCB_HERE);
    must(got.kind == kind_of(rank, me.read) && got.bytes == bytes);
    must(holds(got.data, got.bytes, key_of(rank, me.read)));
    return 1;
}

static inline int look_at_all(void) {
    for (int other = 0; other < me.world; other++) {
        if (other != me.rank && !look(other, size_of(other, me.read))) {
            return 0;
        }
    }
    return 1;
}

static inline void mark_read(void) {
    fcb_read(me.board);
    me.read++;
}

static inline int read_one(void) {
    if (me.read == me.of->messages || !look_at_all()) {
        return 0;
    }
    for (uint32_t i = any(4); i > 0; i--) {
        (void)sched_yield();
    }
    must(look_at_all()); /* nobody has written there in the meantime */
    mark_read();
    return 1;
}

static inline int post_one(void) {
    return me.written < me.of->messages && post(size_of(me.rank, me.written));
}

/* Without the looks before a sleep, or with them. No sleep ends by itself before the alarm. */
static inline void sleep_long(uint32_t known) {
    if (any(8) == 0) {
        fcb_sleep(me.board, known, INT64_MAX);
    } else {
        sleep_on_bell(me.board, known, now_ns() + (int64_t)DAY * 1000000);
    }
}

/* A message for which there will be room, though nothing is read. */
static inline void post_small(size_t bytes) {
    for (;;) {
        const uint32_t known = fcb_news(me.board);
        if (post(bytes)) {
            return;
        }
        sleep_long(known);
    }
}

/* The next one of all others, of that many bytes, by a rank that sleeps until it is there. */
static inline void read_small(size_t bytes) {
    for (int other = 0; other < me.world; other++) {
        for (;;) {
            const uint32_t known = fcb_news(me.board);
            if (other == me.rank || look(other, bytes)) {
                break;
            }
            sleep_long(known);
        }
    }
    mark_read();
}

static inline void close_board(void) {
    fcb_close(me.board);
    me.board = NULL;
}

/* ---- two ranks of one process ---- */

/* Two boards of one process, which fcb_join refuses: of ranks 0 and 1. */
static fcb_board *boards[2];

static inline int open_two(void **state) {
    (void)state;
    fcb_offer offers[2];
    for (int i = 0; i < 2; i++) {
        boards[i] = fcb_open(ROOM);
        assert_non_null(boards[i]);
        offers[i] = fcb_offer_of(boards[i]);
        boards[i]->process = 0;
    }
    for (int i = 0; i < 2; i++) {
        assert_true(fcb_join(boards[i], i, 2, offers));
        boards[i]->process = (int64_t)getpid();
    }
    return 0;
}

static inline int close_two(void **state) {
    (void)state;
    fcb_close(boards[0]);
    fcb_close(boards[1]);
    return 0;
}

static inline void posts(void) {
    assert_non_null(fcb_room(boards[1], 1));
    fcb_post(boards[1], 1);
}

#endif
