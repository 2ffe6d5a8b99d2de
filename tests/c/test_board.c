/* Boards: what ranks post is read by all others, whole and in order, and outlives them. */
#include "board_ranks.h"

/* ---- what is posted is read ---- */

/* Posts and reads at random, and sleeps only where neither can be done. */
static void post_and_read_at_random(void) {
    while (me.written < me.of->messages || me.read < me.of->messages) {
        const uint32_t known = fcb_news(me.board);
        const int reads = any(2) == 0;
        uint32_t done = 0;
        for (uint32_t most = 1 + any(90); done < most; done++) {
            if (!(reads ? read_one() : post_one())) {
                break;
            }
        }
        if (done == 0 && !(reads ? post_one() : read_one())) {
            sleep_long(known);
        }
    }
}

static void messages_arrive_whole_and_in_order(void **state) {
    (void)state;
    run_ranks(&(play){post_and_read_at_random, 2, ROOM, 0, 8000, 0});
    run_ranks(&(play){post_and_read_at_random, 3, ROOM, 7, 2000, 0});
    run_ranks(&(play){post_and_read_at_random, 5, 8 * ROOM, 0, 600, 0});
    run_ranks(&(play){post_and_read_at_random, 2, LINE, 0, 500, 0});
}

static void numbers_wrap(void **state) {
    (void)state;
    run_ranks(&(play){post_and_read_at_random, 2, ROOM, UINT32_MAX - 100, 300, 0});
    run_ranks(&(play){post_and_read_at_random, 3, ROOM, UINT32_MAX, 200, 0});
    run_ranks(&(play){post_and_read_at_random, 3, 64 * ROOM, (1u << 31) - 100, 200, 0});
}

/* Rank 2 is slower than rank 1; no other is in their way. */
static void post_to_two(void) {
    if (me.rank != 0) {
        must(post(0) && post(0) && post(0));
    } else {
        must(post(ROOM / 2) && post(ROOM / 2) && !post(0));
    }
    meet();
    for (int i = 0; me.rank == 1 && i < 2; i++) {
        must(look(0, ROOM / 2) && look(2, 0));
        mark_read();
    }
    meet();
    if (me.rank == 0) {
        must(!post(0) && fcb_slowest(me.board) == 2);
    }
    meet();
    if (me.rank == 2) {
        must(look(0, ROOM / 2) && look(1, 0));
        mark_read();
    }
    meet();
    if (me.rank == 0) {
        must(!post(ROOM / 2 + 1) && post(ROOM / 2) && !post(0));
        must(fcb_slowest(me.board) == 2);
    }
    meet();
    if (me.rank == 2) {
        must(look(0, ROOM / 2) && look(1, 0)); /* the second one, which was not written over */
        mark_read();
        must(look(0, ROOM / 2)); /* and the third, in the place of the first */
    }
}

static void the_slowest_decides_whether_there_is_room(void **state) {
    (void)state;
    run_ranks(&(play){post_to_two, 3, ROOM, 0, 0, 0});
}

static void post_many_empty_ones(void) {
    if (me.rank == 0) {
        must(fcb_slowest(me.board) == -1);
        for (int i = 0; i < LETTERS; i++) {
            must(post(0));
        }
        must(!post(0) && fcb_slowest(me.board) == 1);
    } else {
        must(post(0));
    }
    meet();
    if (me.rank == 1) {
        read_small(0);
    }
    meet();
    if (me.rank == 0) {
        must(post(1) && !post(0));
    }
    meet();
    for (int i = 1; me.rank == 1 && i < LETTERS; i++) {
        must(look(0, 0));
        mark_read();
    }
    meet();
    if (me.rank == 0) {
        must(post(ROOM) && !post(0)); /* letters are free, but memory is not */
    }
    must(me.rank == 0 || look(0, 1));
}

static void there_are_so_many_letters(void **state) {
    (void)state;
    run_ranks(&(play){post_many_empty_ones, 2, 2 * ROOM, 0, 0, 0});
}

/* ---- ends ---- */

/* Rank 0 says when it has seen that rank 2 lives. */
static void meet_without_rank_1(void) {
    fcb_message none;
    if (me.rank == 0) {
        must(me.world == 2 || !fcb_ended(me.board, 2));
        fcb_give_up(me.board);
    }
    while (me.rank == 2 && fcb_look(me.board, 0, &none) != FCB_GONE) {
        (void)sched_yield();
    }
}

static const size_t last[] = {0, 5, ROOM / 2};

static void outlive_rank_1(void) {
    fcb_message none;
    while (!fcb_ended(me.board, 1)) {
        (void)sched_yield();
    }
    for (size_t i = 0; i < 3; i++) {
        for (int other = 0; other < me.world; other++) {
            must(other == me.rank || look(other, last[i]));
        }
        mark_read();
    }
    const fcb_state state = fcb_look(me.board, 1, &none);
    must(state == FCB_GONE || state == FCB_YET); /* a rank that was killed did not say so */
    must(fcb_ended(me.board, 1));
    meet_without_rank_1();
}

/* Rank 1 ends somehow, after it has posted. */
static void end_after_posts(void (*ends)(void)) {
    must(post(last[0]) && post(last[1]) && post(last[2]));
    meet();
    for (int other = 0; me.rank == 0 && other < me.world; other++) {
        must(other == me.rank || !fcb_ended(me.board, other));
    }
    meet();
    if (me.rank == 1) {
        ends();
    }
    if (me.rank != 1) {
        outlive_rank_1();
    }
}

static void is_killed(void) {
    (void)raise(SIGKILL);
}

/* A worker of a data loader: it lives on, and has all that its parent has open. */
static void is_killed_and_leaves_a_child(void) {
    if (fork() == 0) {
        (void)alarm(ALARM);
        while (me.board->views[0].page->closed == 0) {
            (void)sched_yield();
        }
        _exit(0);
    }
    is_killed();
}

static void exits(void) {
    _exit(0);
}

static void end_by_kill(void) {
    end_after_posts(is_killed);
}

static void end_before_a_child(void) {
    end_after_posts(is_killed_and_leaves_a_child);
}

static void end_by_exit(void) {
    end_after_posts(exits);
}

static void end_by_close(void) {
    end_after_posts(close_board);
}

static void what_a_rank_had_posted_outlives_it(void **state) {
    (void)state;
    run_ranks(&(play){end_by_kill, 2, ROOM, 0, 0, 1});
    run_ranks(&(play){end_by_kill, 3, ROOM, 0, 0, 1});
    run_ranks(&(play){end_before_a_child, 2, ROOM, 0, 0, 1});
    run_ranks(&(play){end_by_exit, 2, ROOM, 0, 0, 0});
    run_ranks(&(play){end_by_close, 3, ROOM, 0, 0, 0});
}

static void fork_and_end(int closes) {
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
        if (closes) {
            fcb_give_up(me.board);
            fcb_close(me.board);
        }
        _exit(0);
    }
    must(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void fork_children(void) {
    for (int closes = 0; closes < 2; closes++) {
        if (me.rank == 0) {
            fork_and_end(closes);
        }
        meet();
        must(!fcb_ended(me.board, 1 - me.rank));
        must(atomic_load(&me.board->views[0].page->closed) == 0);
        meet();
    }
    must(post(70));
    read_small(70);
}

static void the_end_of_a_child_is_not_its_parents(void **state) {
    (void)state;
    run_ranks(&(play){fork_children, 2, ROOM, 0, 0, 0});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_arrive_whole_and_in_order),
        cmocka_unit_test(numbers_wrap),
        cmocka_unit_test(the_slowest_decides_whether_there_is_room),
        cmocka_unit_test(there_are_so_many_letters),
        cmocka_unit_test(what_a_rank_had_posted_outlives_it),
        cmocka_unit_test(the_end_of_a_child_is_not_its_parents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
