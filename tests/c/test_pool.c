/* Pool of CPU buffers: blocks that are reused, blocks that return to the system, and when. */
#include "kernels_reference.h"

#include "kernels/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KIB = 1 << 10, MIB = 1 << 20 };

/* Runs enough rounds to clear the peak use of the previous test. */
static int begin(void **state) {
    (void)state;
    fck_pool_set_caching(1);
    for (int i = 0; i < 8; i++) {
        fck_pool_begin_round();
    }
    fck_pool_trim();
    assert_int_equal(fck_pool_stats().used_bytes, 0);
    assert_int_equal(fck_pool_stats().cached_bytes, 0);
    assert_int_equal(fck_pool_stats().peak_bytes, 0);
    return 0;
}

static uint64_t mapped_blocks(void) {
    return fck_pool_stats().mapped;
}

static void freed_block_is_reused(void **state) {
    (void)state;
    fck_block *first = fck_pool_take(5 * MIB + 1);
    void *data = first->data;
    assert_int_equal((uintptr_t)data % (2 * MIB), 0);
    memset(data, 1, 5 * MIB + 1);
    fck_pool_give(first);
    const uint64_t before = mapped_blocks();
    fck_block *again = fck_pool_take(5 * MIB);
    assert_ptr_equal(again->data, data);
    assert_int_equal(mapped_blocks(), before);
    fck_pool_give(again);
}

static void block_is_reused_only_for_similar_size(void **state) {
    (void)state;
    fck_pool_give(fck_pool_take(8 * MIB));
    fck_block *half = fck_pool_take(4 * MIB);
    assert_int_equal(half->bytes, 4 * MIB);
    fck_pool_give(half);
}

/* The slack is an eighth of the peak use: 20 of 160 MiB. */
static void idle_memory_is_limited_to_slack_above_peak_use(void **state) {
    (void)state;
    fck_block *a = fck_pool_take(40 * MIB);
    fck_block *b = fck_pool_take(120 * MIB);
    fck_pool_give(a);
    fck_pool_give(b);
    assert_int_equal(fck_pool_stats().peak_bytes, 160 * MIB);
    assert_int_equal(fck_pool_stats().cached_bytes, 160 * MIB);
    /* Neither idle block fits these requests. Above 180 MiB in all, the older one is freed. */
    fck_block *e = fck_pool_take(20 * MIB);
    assert_int_equal(fck_pool_stats().cached_bytes, 160 * MIB);
    fck_block *c = fck_pool_take(20 * MIB);
    assert_int_equal(fck_pool_stats().cached_bytes, 120 * MIB);
    fck_block *d = fck_pool_take(28 * MIB);
    assert_int_equal(fck_pool_stats().cached_bytes, 0);
    fck_pool_give(c);
    fck_pool_give(d);
    fck_pool_give(e);
}

/* A small model gathers one size in forward and allocates gradients of another size in backward. */
static void alternating_small_sizes_are_all_kept(void **state) {
    (void)state;
    fck_pool_give(fck_pool_take(8 * MIB));
    const uint64_t before = mapped_blocks();
    for (int i = 0; i < 20; i++) {
        fck_pool_begin_round();
        for (int size = 1; size <= 4; size++) {
            fck_pool_give(fck_pool_take((size_t)size * 2 * MIB));
        }
    }
    assert_int_equal(mapped_blocks(), before + 3);
    assert_int_equal(fck_pool_stats().cached_bytes, 20 * MIB);
}

static void pool_limit_ignores_peak_use_of_old_rounds(void **state) {
    (void)state;
    fck_pool_give(fck_pool_take(160 * MIB));
    for (int i = 0; i < 7; i++) {
        fck_pool_begin_round();
        fck_pool_give(fck_pool_take(1 * MIB));
        assert_int_equal(fck_pool_stats().peak_bytes, 160 * MIB);
    }
    fck_pool_begin_round();
    assert_int_equal(fck_pool_stats().peak_bytes, 1 * MIB);
    assert_int_equal(fck_pool_stats().cached_bytes, 1 * MIB);
    fck_pool_trim();
    assert_int_equal(fck_pool_stats().cached_bytes, 0);
}

static void pool_with_keep_disabled_frees_at_once(void **state) {
    (void)state;
    fck_block *a = fck_pool_take(1 * MIB);
    fck_pool_set_caching(0);
    fck_pool_give(a);
    assert_int_equal(fck_pool_stats().cached_bytes, 0);
    fck_pool_set_caching(1);
}

static void failed_allocation_is_not_counted(void **state) {
    (void)state;
    const uint64_t before = mapped_blocks();
    assert_null(fck_pool_take((size_t)1 << 60));
    assert_int_equal(fck_pool_stats().used_bytes, 0);
    assert_int_equal(fck_pool_stats().peak_bytes, 0);
    assert_int_equal(mapped_blocks(), before);
    fck_pool_give(NULL);
}

/* A thread writes its own number into its block and must read it back. */
static void *take_and_give(void *argument) {
    const int mine = *(const int *)argument;
    for (int i = 0; i < 2000; i++) {
        const size_t bytes = (size_t)(64 + (i * 7 + mine) % 5 * 64) * KIB;
        fck_block *block = fck_pool_take(bytes);
        int *data = (int *)block->data;
        data[0] = data[bytes / sizeof *data - 1] = mine;
        if (i % 50 == 0) {
            fck_pool_begin_round();
        }
        if (data[0] != mine || data[bytes / sizeof *data - 1] != mine) {
            return argument;
        }
        fck_pool_give(block);
    }
    return NULL;
}

static void concurrent_threads_get_distinct_blocks(void **state) {
    (void)state;
    pthread_t threads[4];
    int numbers[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, &numbers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        void *wrong = NULL;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
    assert_int_equal(fck_pool_stats().used_bytes, 0);
    const fck_pool_facts facts = fck_pool_stats();
    assert_true(facts.cached_bytes <= facts.peak_bytes + 16 * MIB);
}

static void *take_and_give_until(void *argument) {
    const atomic_int *over = (const atomic_int *)argument;
    while (atomic_load(over) == 0) {
        fck_pool_give(fck_pool_take(128 * KIB));
    }
    return NULL;
}

/* A worker of a data loader is such a child: other threads may hold the pool's lock at the fork. */
static void forked_child_can_use_pool(void **state) {
    (void)state;
    atomic_int over = 0;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, take_and_give_until, &over), 0);
    for (int i = 0; i < 200; i++) {
        const pid_t child = fork();
        if (child == 0) {
            (void)alarm(20); /* a deadlock is the failure to detect */
            fck_pool_give(fck_pool_take(128 * KIB));
            _exit(0);
        }
        assert_true(child > 0);
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
    over = 1;
    assert_int_equal(pthread_join(thread, NULL), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(freed_block_is_reused, begin),
        cmocka_unit_test_setup(block_is_reused_only_for_similar_size, begin),
        cmocka_unit_test_setup(idle_memory_is_limited_to_slack_above_peak_use, begin),
        cmocka_unit_test_setup(alternating_small_sizes_are_all_kept, begin),
        cmocka_unit_test_setup(pool_limit_ignores_peak_use_of_old_rounds, begin),
        cmocka_unit_test_setup(pool_with_keep_disabled_frees_at_once, begin),
        cmocka_unit_test_setup(failed_allocation_is_not_counted, begin),
        cmocka_unit_test_setup(concurrent_threads_get_distinct_blocks, begin),
        cmocka_unit_test_setup(forked_child_can_use_pool, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
