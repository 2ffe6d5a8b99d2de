/* Hashes of blocks of labels. */
#define _GNU_SOURCE 1
#include <pthread.h>
#include <stdbool.h>

#include "transport_ranks.h"

#include "transport/label_blocks.h"

static uint64_t label_of(uint64_t number) {
    return number % 7 + 1;
}

/* Adds collectives until there are `count`. */
static void add_until(op_label_blocks *b, uint64_t count) {
    while (b->count < count) {
        op_label_blocks_add(b, label_of(b->count));
    }
}

/* Returns the hash of a block; 0: unknown, or not kept. */
static uint64_t find(const op_label_blocks *b, uint64_t first, uint64_t size) {
    op_label_block list[OP_LABEL_BLOCKS_KEPT];
    const size_t count = op_label_blocks_copy(b, list);
    for (size_t i = 0; i < count; i++) {
        if (list[i].first == first && list[i].count == size) {
            assert_true(list[i].hash != 0);
            return list[i].hash;
        }
    }
    return 0;
}

static void block_is_kept_until_15_times_its_size_of_further_collectives(void **state) {
    (void)state;
    op_label_blocks b = {0};
    assert_int_equal(find(&b, 0, 1), 0);
    for (uint64_t count = 1; count < 1500; count++) {
        add_until(&b, count);
        for (uint64_t size = 1; size <= 128; size *= 2) {
            const uint64_t last = count / size * size; /* end of the latest complete block */
            if (last > 0) {
                assert_true(find(&b, last - size, size) != 0);
            }
            if (last >= 16 * size) {
                assert_true(find(&b, last - 16 * size, size) != 0);
            }
            if (last >= 17 * size) {
                assert_int_equal(find(&b, last - 17 * size, size), 0);
            }
        }
    }
    op_label_blocks_fini(&b);
}

/* Adds 64 collectives. The label of collective 37 is `other`. */
static op_label_blocks make(uint64_t other) {
    op_label_blocks b = {0};
    add_until(&b, 37);
    op_label_blocks_add(&b, other);
    add_until(&b, 64);
    return b;
}

static void only_blocks_with_another_label_have_another_hash(void **state) {
    (void)state;
    op_label_blocks b = make(100), equal = make(100), other = make(101), unknown = make(0);
    for (uint64_t size = 8; size <= 64; size *= 2) {
        for (uint64_t first = 0; first < 64; first += size) {
            const bool contains = first <= 37 && 37 < first + size;
            assert_int_equal(find(&b, first, size), find(&equal, first, size));
            assert_int_equal(find(&b, first, size) == find(&other, first, size), !contains);
            assert_int_equal(find(&unknown, first, size) == 0, contains);
        }
    }
    op_label_blocks_fini(&b);
    op_label_blocks_fini(&equal);
    op_label_blocks_fini(&other);
    op_label_blocks_fini(&unknown);
}

static void block_with_the_same_labels_in_another_order_has_another_hash(void **state) {
    (void)state;
    op_label_blocks a = {0}, b = {0};
    const uint64_t labels[] = {3, 5, 5, 3};
    for (int i = 0; i < 4; i++) {
        op_label_blocks_add(&a, labels[i]);
        op_label_blocks_add(&b, labels[i ^ 1]);
    }
    assert_true(find(&a, 0, 4) != find(&b, 0, 4));
    op_label_blocks_fini(&a);
    op_label_blocks_fini(&b);
}

enum { CONCURRENT = 1 << 18 };

static void *add_concurrently(void *b) {
    add_until((op_label_blocks *)b, CONCURRENT);
    return NULL;
}

/* The hashes of the blocks of level 3 begin anew after 7 blocks, because the labels do. */
static void reader_beside_a_writing_thread_gets_whole_blocks(void **state) {
    (void)state;
    static op_label_block list[OP_LABEL_BLOCKS_KEPT];
    enum { SIZE = 8, PERIOD = 7 };
    uint64_t hashes[PERIOD], newest = 0;
    op_label_blocks expected = {0}, b = {0};
    pthread_t writer;
    add_until(&expected, SIZE * PERIOD);
    for (uint64_t i = 0; i < PERIOD; i++) {
        hashes[i] = find(&expected, i * SIZE, SIZE);
    }
    assert_int_equal(pthread_create(&writer, NULL, add_concurrently, &b), 0);
    while (newest < CONCURRENT) {
        const size_t count = op_label_blocks_copy(&b, list);
        for (size_t i = 0; i < count; i++) {
            const uint64_t end = list[i].first + list[i].count;
            if (list[i].count == SIZE) {
                assert_int_equal(list[i].hash, hashes[list[i].first / SIZE % PERIOD]);
            }
            newest = end > newest ? end : newest;
        }
    }
    assert_int_equal(pthread_join(writer, NULL), 0);
    op_label_blocks_fini(&b);
    op_label_blocks_fini(&expected);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(block_is_kept_until_15_times_its_size_of_further_collectives),
        cmocka_unit_test(only_blocks_with_another_label_have_another_hash),
        cmocka_unit_test(block_with_the_same_labels_in_another_order_has_another_hash),
        cmocka_unit_test(reader_beside_a_writing_thread_gets_whole_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
