/* Shard layout along one dim: torch.chunk's rule, padding to equal shards, and sizes that are
 * refused before they become offsets. */
#include "core/layout.h"

#include <string.h>

#include "sim.h"

static fc_layout make_layout(int32_t ndim, const int64_t *sizes, int32_t dim, int64_t world,
                             int64_t rank) {
    fc_layout layout;
    fc_error err = {""};
    if (fc_layout_init(&layout, ndim, sizes, dim, world, rank, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    return layout;
}

/* ---- dim 0 ---- */

static void layout_of_five_rows_over_four_ranks_matches_torch_chunk(void **state) {
    (void)state;
    const int64_t sizes[2] = {5, 3};
    const int64_t rows[4] = {2, 2, 1, 0};
    for (int64_t rank = 0; rank < 4; rank++) {
        fc_layout l = make_layout(2, sizes, 0, 4, rank);
        assert_int_equal(l.chunk_rows, 2);
        assert_int_equal(l.local_rows, rows[rank]);
        assert_int_equal(l.padded_numel, 6);
        assert_int_equal(l.numel, 15);
        assert_int_equal(l.outer, 1);
        assert_int_equal(l.row_numel, 3);
    }
}

static void layout_covers_all_rows_in_rank_order_with_short_last_ranks(void **state) {
    (void)state;
    for (int64_t world = 1; world <= 9; world++) {
        for (int64_t rows = 0; rows <= 30; rows++) {
            int64_t next = 0;
            for (int64_t rank = 0; rank < world; rank++) {
                fc_layout l = make_layout(1, &rows, 0, world, rank);
                assert_int_equal(l.chunk_rows, (rows + world - 1) / world);
                if (l.local_rows > 0) {
                    assert_int_equal(rank * l.chunk_rows, next);
                }
                assert_true(l.local_rows == l.chunk_rows || next + l.local_rows == rows);
                next += l.local_rows;
            }
            assert_int_equal(next, rows);
        }
    }
}

static void layout_of_empty_tensor_has_empty_shards(void **state) {
    (void)state;
    const int64_t no_rows[2] = {0, 7};
    const int64_t no_columns[2] = {7, 0};
    assert_int_equal(make_layout(2, no_rows, 0, 4, 1).padded_numel, 0);
    assert_int_equal(make_layout(2, no_columns, 0, 4, 1).padded_numel, 0);
    assert_int_equal(make_layout(2, no_columns, 0, 4, 1).local_rows, 2);
}

static void layout_of_one_rank_has_no_padding(void **state) {
    (void)state;
    const int64_t sizes[3] = {5, 2, 3};
    fc_layout l = make_layout(3, sizes, 0, 1, 0);
    assert_int_equal(l.padded_numel, 30);
}

/* ---- other dims ---- */

static void layout_of_nonzero_dim_splits_every_outer_block(void **state) {
    (void)state;
    const int64_t sizes[4] = {2, 3, 6, 5};
    fc_layout l = make_layout(4, sizes, 2, 3, 1);
    assert_int_equal(l.outer, 6);
    assert_int_equal(l.rows, 6);
    assert_int_equal(l.row_numel, 5);
    assert_int_equal(l.chunk_rows, 2);
    assert_int_equal(l.local_rows, 2);
    assert_int_equal(l.padded_numel, 60);
    assert_int_equal(l.numel, 180);
}

static void layout_of_last_dim_is_supported(void **state) {
    (void)state;
    const int64_t sizes[2] = {3, 4};
    fc_layout l = make_layout(2, sizes, 1, 2, 1);
    assert_int_equal(l.outer, 3);
    assert_int_equal(l.row_numel, 1);
}

/* ---- refused arguments ---- */

/* Expects FC_EASSERT with this text in its message, and an unchanged layout. */
static void expect_refused(int32_t ndim, const int64_t *sizes, int32_t dim, int64_t world,
                           int64_t rank, const char *message) {
    fc_layout layout;
    fc_layout before;
    fc_error err = {""};
    memset(&layout, 0x5a, sizeof layout);
    memcpy(&before, &layout, sizeof before);
    assert_int_equal(fc_layout_init(&layout, ndim, sizes, dim, world, rank, &err), FC_EASSERT);
    if (strstr(err.message, message) == NULL) {
        fail_msg("the message is '%s', not '...%s...'", err.message, message);
    }
    assert_memory_equal(&layout, &before, sizeof layout);
}

static void layout_of_uneven_nonzero_dim_is_refused(void **state) {
    (void)state;
    const int64_t sizes[2] = {4, 5};
    expect_refused(2, sizes, 1, 2, 0, "dim 1 of size 5 cannot be cut into 2 equal parts");
}

static void layout_without_valid_dim_is_refused(void **state) {
    (void)state;
    const int64_t sizes[2] = {4, 4};
    expect_refused(0, sizes, 0, 2, 0, "cannot shard dim 0 of a tensor of 0 dimensions");
    expect_refused(2, sizes, 2, 2, 0, "cannot shard dim 2");
    expect_refused(2, sizes, -1, 2, 0, "cannot shard dim -1");
}

static void layout_with_rank_outside_world_is_refused(void **state) {
    (void)state;
    const int64_t sizes[1] = {4};
    expect_refused(1, sizes, 0, 2, 2, "rank 2 is not in [0, 2)");
    expect_refused(1, sizes, 0, 2, -1, "rank -1");
    expect_refused(1, sizes, 0, 0, 0, "rank 0 is not in [0, 0)");
}

static void layout_with_negative_size_is_refused(void **state) {
    (void)state;
    const int64_t first[2] = {-1, 4};
    const int64_t last[2] = {4, -1};
    expect_refused(2, first, 0, 2, 0, "negative or overflow");
    expect_refused(2, last, 0, 2, 0, "negative or overflow");
}

static void layout_with_overflowing_product_is_refused(void **state) {
    (void)state;
    const int64_t rows[1] = {INT64_MAX};
    const int64_t product[2] = {INT64_C(1) << 32, INT64_C(1) << 32};
    const int64_t padded[2] = {3, INT64_MAX / 4 + 1}; /* overflows only with padding */
    expect_refused(1, rows, 0, 2, 0, "overflow");
    expect_refused(2, product, 0, 2, 0, "overflow");
    expect_refused(2, product, 1, 2, 0, "overflow");
    assert_int_equal(make_layout(2, padded, 0, 1, 0).rows, 3);
    expect_refused(2, padded, 0, 2, 0, "overflow");
}

static void size_add_and_mul_report_overflow(void **state) {
    (void)state;
    int64_t out = 42;
    assert_false(fc_size_mul(INT64_MAX / 2 + 1, 2, &out));
    assert_false(fc_size_add(INT64_MAX, 1, &out));
    assert_int_equal(out, 42);
    assert_true(fc_size_mul(INT64_MAX, 1, &out));
    assert_true(out == INT64_MAX);
    assert_true(fc_size_add(INT64_MAX - 1, 1, &out));
    assert_true(out == INT64_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_of_five_rows_over_four_ranks_matches_torch_chunk),
        cmocka_unit_test(layout_covers_all_rows_in_rank_order_with_short_last_ranks),
        cmocka_unit_test(layout_of_empty_tensor_has_empty_shards),
        cmocka_unit_test(layout_of_one_rank_has_no_padding),
        cmocka_unit_test(layout_of_nonzero_dim_splits_every_outer_block),
        cmocka_unit_test(layout_of_last_dim_is_supported),
        cmocka_unit_test(layout_of_uneven_nonzero_dim_is_refused),
        cmocka_unit_test(layout_without_valid_dim_is_refused),
        cmocka_unit_test(layout_with_rank_outside_world_is_refused),
        cmocka_unit_test(layout_with_negative_size_is_refused),
        cmocka_unit_test(layout_with_overflowing_product_is_refused),
        cmocka_unit_test(size_add_and_mul_report_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
