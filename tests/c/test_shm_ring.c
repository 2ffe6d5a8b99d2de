/* Shared-memory ring: messages arrive intact and in order, and survive the end of their sender. */
#include "shm_ring_ranks.h"

/* ---- transfer ---- */

/* Commits and reads in random order, and waits if neither is possible. */
static void commit_and_read_at_random(void) {
    while (me.written < me.test->messages || me.read < me.test->messages) {
        const uint32_t seen_seq = shm_ring_seq(me.ring);
        const int reads_first = random_below(2) == 0;
        uint32_t done = 0;
        for (uint32_t most = 1 + random_below(90); done < most; done++) {
            if (!(reads_first ? try_read() : try_commit())) {
                break;
            }
        }
        if (done == 0 && !(reads_first ? try_commit() : try_read())) {
            wait_without_timeout(seen_seq);
        }
    }
}

static void messages_of_all_sizes_arrive_intact_and_in_order(void **state) {
    (void)state;
    run_ranks(&(scenario){
        .run = commit_and_read_at_random, .world_size = 2, .capacity = CAPACITY, .messages = 8000});
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 3,
                          .capacity = CAPACITY,
                          .first_counter = 7,
                          .messages = 2000});
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 5,
                          .capacity = 8 * CAPACITY,
                          .messages = 600});
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 2,
                          .capacity = CACHE_LINE,
                          .messages = 500});
}

static void message_counters_wrap_without_loss(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 2,
                          .capacity = CAPACITY,
                          .first_counter = UINT32_MAX - 100,
                          .messages = 300});
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 3,
                          .capacity = CAPACITY,
                          .first_counter = UINT32_MAX,
                          .messages = 200});
    run_ranks(&(scenario){.run = commit_and_read_at_random,
                          .world_size = 3,
                          .capacity = 64 * CAPACITY,
                          .first_counter = (1u << 31) - 100,
                          .messages = 200});
}

/* Rank 2 releases messages later than rank 1. */
static void commit_to_two_readers(void) {
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
                check_next(1, 0)); /* the second message was not overwritten */
        release_one();
        require(check_next(0, CAPACITY / 2)); /* the third message reuses the memory of the first */
    }
}

static void reserve_fails_until_the_slowest_peer_has_released(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = commit_to_two_readers, .world_size = 3, .capacity = CAPACITY});
}

static void use_all_header_slots(void) {
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

static void reserve_fails_when_all_header_slots_are_used(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = use_all_header_slots, .world_size = 2, .capacity = 2 * CAPACITY});
}

/* ---- ends of ranks ---- */

/* Rank 0 marks its ring closed after it has checked that rank 2 lives. Rank 1 has ended before. */
static void end_without_rank_1(void) {
    shm_ring_message none;
    if (me.rank == 0) {
        require(me.world_size == 2 || !shm_ring_peer_has_ended(me.ring, 2));
        shm_ring_mark_closed(me.ring);
    }
    while (me.rank == 2 && shm_ring_peek(me.ring, 0, &none) != SHM_RING_CLOSED) {
        (void)sched_yield();
    }
}

static const size_t last_sizes[] = {0, 5, CAPACITY / 2};

static void check_messages_of_ended_rank_1(void) {
    shm_ring_message none;
    while (!shm_ring_peer_has_ended(me.ring, 1)) {
        (void)sched_yield();
    }
    for (size_t i = 0; i < 3; i++) {
        for (int other = 0; other < me.world_size; other++) {
            require(other == me.rank || check_next(other, last_sizes[i]));
        }
        release_one();
    }
    const shm_ring_peek_result state = shm_ring_peek(me.ring, 1, &none);
    require(state == SHM_RING_CLOSED ||
            state == SHM_RING_EMPTY); /* a killed rank does not mark its ring closed */
    require(shm_ring_peer_has_ended(me.ring, 1));
    end_without_rank_1();
}

/* Each rank commits three messages. Rank 1 then calls `ends`. */
static void end_after_commits(void (*ends)(void)) {
    require(commit(last_sizes[0]) && commit(last_sizes[1]) && commit(last_sizes[2]));
    barrier();
    for (int other = 0; me.rank == 0 && other < me.world_size; other++) {
        require(other == me.rank || !shm_ring_peer_has_ended(me.ring, other));
    }
    barrier();
    if (me.rank == 1) {
        ends();
    }
    if (me.rank != 1) {
        check_messages_of_ended_rank_1();
    }
}

static void kill_self(void) {
    (void)raise(SIGKILL);
}

/* The child inherits all descriptors and outlives its parent, as a worker of a DataLoader. */
static void kill_self_with_live_child(void) {
    if (fork() == 0) {
        (void)alarm(ALARM);
        while (me.ring->views[0].page->closed == 0) {
            (void)sched_yield();
        }
        _exit(0);
    }
    kill_self();
}

static void exit_now(void) {
    _exit(0);
}

static void end_by_signal(void) {
    end_after_commits(kill_self);
}

static void end_with_live_child(void) {
    end_after_commits(kill_self_with_live_child);
}

static void end_by_exit(void) {
    end_after_commits(exit_now);
}

static void end_by_close(void) {
    end_after_commits(destroy_ring);
}

static void committed_messages_survive_the_end_of_their_rank(void **state) {
    (void)state;
    run_ranks(
        &(scenario){.run = end_by_signal, .world_size = 2, .capacity = CAPACITY, .killed_rank = 1});
    run_ranks(
        &(scenario){.run = end_by_signal, .world_size = 3, .capacity = CAPACITY, .killed_rank = 1});
    run_ranks(&(scenario){
        .run = end_with_live_child, .world_size = 2, .capacity = CAPACITY, .killed_rank = 1});
    run_ranks(&(scenario){.run = end_by_exit, .world_size = 2, .capacity = CAPACITY});
    run_ranks(&(scenario){.run = end_by_close, .world_size = 3, .capacity = CAPACITY});
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

static void end_of_forked_child_does_not_close_the_ring(void **state) {
    (void)state;
    run_ranks(&(scenario){.run = fork_children, .world_size = 2, .capacity = CAPACITY});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_of_all_sizes_arrive_intact_and_in_order),
        cmocka_unit_test(message_counters_wrap_without_loss),
        cmocka_unit_test(reserve_fails_until_the_slowest_peer_has_released),
        cmocka_unit_test(reserve_fails_when_all_header_slots_are_used),
        cmocka_unit_test(committed_messages_survive_the_end_of_their_rank),
        cmocka_unit_test(end_of_forked_child_does_not_close_the_ring),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
