/* Boards: what ranks commit is read by all others, whole and in order, and outlives them. */
#include "shm_ring_ranks.h"

/* ---- what is committed is read ---- */

/* Posts and reads at random, and sleeps only where neither can be done. */
static void post_and_read_at_random(void) {
    while (me.written < me.of->messages || me.read < me.of->messages) {
        const uint32_t known = shm_ring_seq(me.ring);
        const int reads = random_below(2) == 0;
        uint32_t done = 0;
        for (uint32_t most = 1 + random_below(90); done < most; done++) {
            if (!(reads ? try_read() : try_commit())) {
                break;
            }
        }
        if (done == 0 && !(reads ? try_commit() : try_read())) {
            wait_without_timeout(known);
        }
    }
}

static void messages_arrive_whole_and_in_order(void **state) {
    (void)state;
    run_ranks(&(scenario){post_and_read_at_random, 2, CAPACITY, 0, 8000, 0});
    run_ranks(&(scenario){post_and_read_at_random, 3, CAPACITY, 7, 2000, 0});
    run_ranks(&(scenario){post_and_read_at_random, 5, 8 * CAPACITY, 0, 600, 0});
    run_ranks(&(scenario){post_and_read_at_random, 2, CACHE_LINE, 0, 500, 0});
}

static void numbers_wrap(void **state) {
    (void)state;
    run_ranks(&(scenario){post_and_read_at_random, 2, CAPACITY, UINT32_MAX - 100, 300, 0});
    run_ranks(&(scenario){post_and_read_at_random, 3, CAPACITY, UINT32_MAX, 200, 0});
    run_ranks(&(scenario){post_and_read_at_random, 3, 64 * CAPACITY, (1u << 31) - 100, 200, 0});
}

/* Rank 2 is slower than rank 1; no other is in their way. */
static void post_to_two(void) {
    if (me.rank != 0) {
        require(commit(0) && commit(0) && commit(0));
    } else {
        require(commit(CAPACITY / 2) && commit(CAPACITY / 2) && !commit(0));
    }
    barrier();
    for (int i = 0; me.rank == 1 && i < 2; i++) {
        require(check_next(0, CAPACITY / 2) && check_next(2, 0));
        release_one();
    }
    barrier();
    if (me.rank == 0) {
        require(!commit(0) && shm_ring_slowest_reader(me.ring) == 2);
    }
    barrier();
    if (me.rank == 2) {
        require(check_next(0, CAPACITY / 2) && check_next(1, 0));
        release_one();
    }
    barrier();
    if (me.rank == 0) {
        require(!commit(CAPACITY / 2 + 1) && commit(CAPACITY / 2) && !commit(0));
        require(shm_ring_slowest_reader(me.ring) == 2);
    }
    barrier();
    if (me.rank == 2) {
        require(check_next(0, CAPACITY / 2) &&
                check_next(1, 0)); /* the second one, which was not written over */
        release_one();
        require(check_next(0, CAPACITY / 2)); /* and the third, in the place of the first */
    }
}

static void the_slowest_decides_whether_there_is_room(void **state) {
    (void)state;
    run_ranks(&(scenario){post_to_two, 3, CAPACITY, 0, 0, 0});
}

static void post_many_empty_ones(void) {
    if (me.rank == 0) {
        require(shm_ring_slowest_reader(me.ring) == -1);
        for (int i = 0; i < HEADER_SLOTS; i++) {
            require(commit(0));
        }
        require(!commit(0) && shm_ring_slowest_reader(me.ring) == 1);
    } else {
        require(commit(0));
    }
    barrier();
    if (me.rank == 1) {
        read_blocking(0);
    }
    barrier();
    if (me.rank == 0) {
        require(commit(1) && !commit(0));
    }
    barrier();
    for (int i = 1; me.rank == 1 && i < HEADER_SLOTS; i++) {
        require(check_next(0, 0));
        release_one();
    }
    barrier();
    if (me.rank == 0) {
        require(commit(CAPACITY) && !commit(0)); /* headers are free, but memory is not */
    }
    require(me.rank == 0 || check_next(0, 1));
}

static void there_are_so_many_letters(void **state) {
    (void)state;
    run_ranks(&(scenario){post_many_empty_ones, 2, 2 * CAPACITY, 0, 0, 0});
}

/* ---- ends ---- */

/* Rank 0 says when it has seen that rank 2 lives. */
static void meet_without_rank_1(void) {
    shm_ring_message none;
    if (me.rank == 0) {
        require(me.world_size == 2 || !shm_ring_peer_has_ended(me.ring, 2));
        shm_ring_mark_closed(me.ring);
    }
    while (me.rank == 2 && shm_ring_peek(me.ring, 0, &none) != SHM_RING_CLOSED) {
        (void)sched_yield();
    }
}

static const size_t last[] = {0, 5, CAPACITY / 2};

static void outlive_rank_1(void) {
    shm_ring_message none;
    while (!shm_ring_peer_has_ended(me.ring, 1)) {
        (void)sched_yield();
    }
    for (size_t i = 0; i < 3; i++) {
        for (int other = 0; other < me.world_size; other++) {
            require(other == me.rank || check_next(other, last[i]));
        }
        release_one();
    }
    const shm_ring_peek_result state = shm_ring_peek(me.ring, 1, &none);
    require(state == SHM_RING_CLOSED ||
            state == SHM_RING_EMPTY); /* a rank that was killed did not say so */
    require(shm_ring_peer_has_ended(me.ring, 1));
    meet_without_rank_1();
}

/* Rank 1 ends somehow, after it has committed. */
static void end_after_posts(void (*ends)(void)) {
    require(commit(last[0]) && commit(last[1]) && commit(last[2]));
    barrier();
    for (int other = 0; me.rank == 0 && other < me.world_size; other++) {
        require(other == me.rank || !shm_ring_peer_has_ended(me.ring, other));
    }
    barrier();
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
        while (me.ring->views[0].page->closed == 0) {
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
    end_after_posts(destroy_ring);
}

static void what_a_rank_had_posted_outlives_it(void **state) {
    (void)state;
    run_ranks(&(scenario){end_by_kill, 2, CAPACITY, 0, 0, 1});
    run_ranks(&(scenario){end_by_kill, 3, CAPACITY, 0, 0, 1});
    run_ranks(&(scenario){end_before_a_child, 2, CAPACITY, 0, 0, 1});
    run_ranks(&(scenario){end_by_exit, 2, CAPACITY, 0, 0, 0});
    run_ranks(&(scenario){end_by_close, 3, CAPACITY, 0, 0, 0});
}

static void fork_and_end(int closes) {
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
        if (closes) {
            shm_ring_mark_closed(me.ring);
            shm_ring_destroy(me.ring);
        }
        _exit(0);
    }
    require(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void fork_children(void) {
    for (int closes = 0; closes < 2; closes++) {
        if (me.rank == 0) {
            fork_and_end(closes);
        }
        barrier();
        require(!shm_ring_peer_has_ended(me.ring, 1 - me.rank));
        require(atomic_load(&me.ring->views[0].page->closed) == 0);
        barrier();
    }
    require(commit(70));
    read_blocking(70);
}

static void the_end_of_a_child_is_not_its_parents(void **state) {
    (void)state;
    run_ranks(&(scenario){fork_children, 2, CAPACITY, 0, 0, 0});
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
