/* Memory transfers of a plan: kernels and torch's copies write the same bytes, and a transfer that
 * exceeds its buffer is refused. */
#include "core/transfer.h"

#include <string.h>

#include "sim.h"

enum { INT64 = 4 /* c10::ScalarType::Long, which the kernels do not cast */ };

/* The value of elements that a transfer must not write. */
static const double UNWRITTEN = 77;

/* Rank 1 of two, with a matrix of 3 rows (one of this rank's is padding) and a vector. */
typedef struct fixture {
    fc_param matrix;
    fc_param vector;
    fc_param *params[2];
    fc_gather_plan plan;
    fc_transfer transfer;
    fc_error err;
} fixture;

static const double MATRIX[4] = {5, 6, 0, 0}; /* row 2 of [[1, 2], [3, 4], [5, 6]], and zeros */
static const double VECTOR[2] = {9, 10};      /* of [7, 8, 9, 10] */

static void param_init(fc_param *p, int32_t ndim, const int64_t *sizes, const double *shard,
                       fct_dtype compute) {
    fc_error err = {""};
    assert_int_equal(fc_param_init(p, NULL, ndim, sizes, 0, 2, 1, &err), FC_OK);
    p->name = "weight";
    p->orig_dtype = FCK_FLOAT32;
    p->param_dtype = compute;
    fct_tensor *data = sim_tensor_new(FCK_FLOAT32, 1, &p->layout.padded_numel, shard);
    fc_param_set_sharded_data(p, data);
    fct_tensor_release(data);
}

static void begin(fixture *f, bool no_kernels, fct_dtype compute) {
    const int64_t matrix[2] = {3, 2};
    const int64_t vector[1] = {4};
    memset(f, 0, sizeof *f);
    sim_begin((sim_config){.seed = 3, .no_kernels = no_kernels});
    param_init(&f->matrix, 2, matrix, MATRIX, compute);
    param_init(&f->vector, 1, vector, VECTOR, compute);
    f->params[0] = &f->matrix;
    f->params[1] = &f->vector;
    assert_int_equal(fc_gather_plan_build(&f->plan, f->params, 2, 2, false, sim_device(), &f->err),
                     FC_OK);
}

static void end(fixture *f) {
    fc_gather_plan_fini(&f->plan);
    fc_transfer_fini(&f->transfer);
    fc_param_fini(&f->matrix);
    fc_param_fini(&f->vector);
    sim_end();
}

static fct_tensor *buffer_of(fct_dtype dtype, int64_t numel) {
    double values[16];
    for (int i = 0; i < 16; i++) {
        values[i] = UNWRITTEN;
    }
    return sim_tensor_new(dtype, 1, &numel, values);
}

static void pack_writes_only_shard_of_rank(void **state) {
    (void)state;
    for (int no_kernels = 0; no_kernels < 2; no_kernels++) {
        fixture f;
        const double packed[12] = {UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN,
                                   5,         6,         0,         0,         9,         10};
        begin(&f, no_kernels != 0, FCT_NO_DTYPE);
        fct_tensor *buffer = buffer_of(FCK_FLOAT32, 12);
        assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &buffer, 1, NULL, &f.err),
                         FC_OK);
        sim_tensor_expect(buffer, packed, "the gather buffer");
        fct_tensor_release(buffer);
        end(&f);
    }
}

static void pack_casts_to_compute_dtype(void **state) {
    (void)state;
    fixture f;
    const double packed[12] = {5,         6,         0,         0,         9,         10,
                               UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN};
    begin(&f, false, FCK_BFLOAT16);
    fct_tensor *buffer = buffer_of(FCK_BFLOAT16, 12);
    assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &buffer, 0, NULL, &f.err),
                     FC_OK);
    sim_tensor_expect(buffer, packed, "the gather buffer");
    fct_tensor_release(buffer);
    end(&f);
}

static void unpack_restores_whole_tensors(void **state) {
    (void)state;
    for (int no_kernels = 0; no_kernels < 2; no_kernels++) {
        fixture f;
        const int64_t twelve[1] = {12};
        const double gathered[12] = {1, 2, 3, 4, 7, 8, 5, 6, 0, 0, 9, 10};
        begin(&f, no_kernels != 0, FCT_NO_DTYPE);
        fct_tensor *buffer = sim_tensor_new(FCK_FLOAT32, 1, twelve, gathered);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(fc_param_alloc_flat(f.params[i], sim_device(), &f.err), FC_OK);
        }
        assert_int_equal(
            fc_transfer_unpack(&f.transfer, &f.plan, f.params, 0, buffer, 0, NULL, &f.err), FC_OK);
        sim_tensor_expect(f.matrix.flat, (const double[8]){1, 2, 3, 4, 5, 6, 0, 0}, "the matrix");
        sim_tensor_expect(f.vector.flat, (const double[4]){7, 8, 9, 10}, "the vector");
        fct_tensor_release(buffer);
        end(&f);
    }
}

static void pack_gradients_distributes_to_ranks_and_pads_with_zeros(void **state) {
    (void)state;
    for (int no_kernels = 0; no_kernels < 2; no_kernels++) {
        fixture f;
        fc_reduce_plan plan = {.count = 0};
        bool needs_fallback = true;
        const int64_t three_by_two[2] = {3, 2};
        const double packed[8] = {1, 2, 3, 4, 5, 6, 0, 0};
        begin(&f, no_kernels != 0, FCT_NO_DTYPE);
        assert_int_equal(fc_reduce_plan_reserve(&plan, 1), FC_OK);
        plan.params[0] = &f.matrix;
        plan.grads[0] = sim_tensor_new(FCK_FLOAT32, 2, three_by_two, packed);
        plan.count = 1;
        assert_int_equal(fc_reduce_plan_lay_out(&plan, FCT_NO_DTYPE, &needs_fallback, &f.err),
                         FC_OK);
        assert_false(needs_fallback);
        fct_tensor *buffer = buffer_of(FCK_FLOAT32, 8);
        assert_int_equal(fc_transfer_pack_gradients(&f.transfer, &plan, 0, 2, buffer, &f.err),
                         FC_OK);
        sim_tensor_expect(buffer, packed, "the reduce buffer");
        fct_tensor_release(buffer);
        fc_reduce_plan_fini(&plan);
        end(&f);
    }
}

/* On CUDA the slot of a parameter starts at a multiple of 16 bytes. In each rank shard the
 * kernel fills the gap between `odd` and `even`. */
static void pack_gradients_fills_gaps_with_zeros(void **state) {
    (void)state;
    fixture f;
    fc_param odd;
    fc_reduce_plan plan = {.count = 0};
    bool needs_fallback = true;
    const int64_t three[1] = {3};
    const int64_t eight[1] = {8};
    const double values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const double packed[16] = {1, 2, 0, 0, 1, 2, 3, 4, 3, 0, 0, 0, 5, 6, 7, 8};
    fc_param even;
    memset(&f, 0, sizeof f);
    sim_begin((sim_config){.seed = 3, .streams = true});
    assert_int_equal(sim_device().type, FCT_DEVICE_CUDA);
    assert_int_equal(fc_param_init(&odd, NULL, 1, three, 0, 2, 1, &f.err), FC_OK);
    assert_int_equal(fc_param_init(&even, NULL, 1, eight, 0, 2, 1, &f.err), FC_OK);
    assert_int_equal(fc_reduce_plan_reserve(&plan, 2), FC_OK);
    plan.params[0] = &odd;
    plan.params[1] = &even;
    plan.grads[0] = sim_tensor_new(FCK_FLOAT32, 1, three, values);
    plan.grads[1] = sim_tensor_new(FCK_FLOAT32, 1, eight, values);
    plan.count = 2;
    assert_int_equal(fc_reduce_plan_lay_out(&plan, FCT_NO_DTYPE, &needs_fallback, &f.err), FC_OK);
    fct_tensor *buffer = buffer_of(FCK_FLOAT32, 16);
    assert_int_equal(fc_transfer_pack_gradients(&f.transfer, &plan, 0, 2, buffer, &f.err), FC_OK);
    sim_tensor_expect(buffer, packed, "the reduce buffer");
    fct_tensor_release(buffer);
    fc_reduce_plan_fini(&plan);
    fc_param_fini(&odd);
    fc_param_fini(&even);
    end(&f);
}

/* The matrix is sharded on dim 1. */
static void pack_gradients_of_dim_1_shards_sends_each_rank_its_columns(void **state) {
    (void)state;
    for (int no_kernels = 0; no_kernels < 2; no_kernels++) {
        fixture f;
        fc_param columns;
        fc_reduce_plan plan = {.count = 0};
        bool needs_fallback = true;
        const int64_t two_by_four[2] = {2, 4};
        const double values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        const double packed[8] = {1, 2, 5, 6, 3, 4, 7, 8};
        begin(&f, no_kernels != 0, FCT_NO_DTYPE);
        assert_int_equal(fc_param_init(&columns, NULL, 2, two_by_four, 1, 2, 1, &f.err), FC_OK);
        assert_int_equal(fc_reduce_plan_reserve(&plan, 1), FC_OK);
        plan.params[0] = &columns;
        plan.grads[0] = sim_tensor_new(FCK_FLOAT32, 2, two_by_four, values);
        plan.count = 1;
        assert_int_equal(fc_reduce_plan_lay_out(&plan, FCT_NO_DTYPE, &needs_fallback, &f.err),
                         FC_OK);
        fct_tensor *buffer = buffer_of(FCK_FLOAT32, 8);
        assert_int_equal(fc_transfer_pack_gradients(&f.transfer, &plan, 0, 2, buffer, &f.err),
                         FC_OK);
        sim_tensor_expect(buffer, packed, "the reduce buffer");
        fct_tensor_release(buffer);
        fc_reduce_plan_fini(&plan);
        fc_param_fini(&columns);
        end(&f);
    }
}

/* The casts are temporary: the plan and its gradient stay unchanged. */
static void cast_without_kernel_uses_torch(void **state) {
    (void)state;
    fixture f;
    fc_reduce_plan plan = {.count = 0};
    bool needs_fallback = true;
    const int64_t three_by_two[2] = {3, 2};
    const double packed[8] = {1, 2, 3, 4, 5, 6, 0, 0};
    const double expected[12] = {5,         6,         0,         0,         9,         10,
                                 UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN};
    begin(&f, false, INT64);
    assert_false(f.plan.native);
    fct_tensor *gathered = buffer_of(INT64, 12);
    assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &gathered, 0, NULL, &f.err),
                     FC_OK);
    sim_tensor_expect(gathered, expected, "the gather buffer");
    assert_true(f.plan.valid);
    assert_int_equal(f.plan.slots[0].source, FCK_FLOAT32);
    assert_int_equal(fc_reduce_plan_reserve(&plan, 1), FC_OK);
    plan.params[0] = &f.matrix;
    plan.grads[0] = sim_tensor_new(INT64, 2, three_by_two, packed);
    plan.count = 1;
    assert_int_equal(fc_reduce_plan_lay_out(&plan, FCK_FLOAT32, &needs_fallback, &f.err), FC_OK);
    assert_false(plan.native);
    fct_tensor *grad = plan.grads[0];
    fct_tensor *buffer = buffer_of(FCK_FLOAT32, 8);
    assert_int_equal(fc_transfer_pack_gradients(&f.transfer, &plan, 0, 2, buffer, &f.err), FC_OK);
    sim_tensor_expect(buffer, packed, "the reduce buffer");
    assert_ptr_equal(plan.grads[0], grad);
    fct_tensor_release(buffer);
    fct_tensor_release(gathered);
    fc_reduce_plan_fini(&plan);
    end(&f);
}

static void transfer_to_small_buffer_is_refused(void **state) {
    (void)state;
    fixture f;
    begin(&f, false, FCT_NO_DTYPE);
    fct_tensor *storage = buffer_of(FCK_FLOAT32, 12);
    const int64_t eleven[1] = {11};
    const int64_t stride[1] = {1};
    fct_tensor *part = sim_tensor_view(storage, 1, eleven, stride); /* the storage is larger */
    assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &part, 1, NULL, &f.err),
                     FC_EASSERT);
    assert_non_null(strstr(f.err.message, "does not fit its buffer"));
    assert_int_equal(fc_transfer_unpack(&f.transfer, &f.plan, f.params, 0, part, 0, NULL, &f.err),
                     FC_EASSERT);
    assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &part, 0, NULL, &f.err),
                     FC_OK);
    fct_tensor_release(part);
    fct_tensor_release(storage);
    end(&f);
}

static void pack_into_freed_storage_is_refused(void **state) {
    (void)state;
    fixture f;
    begin(&f, false, FCT_NO_DTYPE);
    fct_tensor *buffer = buffer_of(FCK_FLOAT32, 12);
    fct_storage_free(buffer);
    assert_int_equal(fc_transfer_pack(&f.transfer, &f.plan, f.params, &buffer, 0, NULL, &f.err),
                     FC_EASSERT);
    assert_non_null(strstr(f.err.message, "does not fit its buffer"));
    fct_tensor_release(buffer);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pack_writes_only_shard_of_rank),
        cmocka_unit_test(pack_casts_to_compute_dtype),
        cmocka_unit_test(unpack_restores_whole_tensors),
        cmocka_unit_test(pack_gradients_distributes_to_ranks_and_pads_with_zeros),
        cmocka_unit_test(pack_gradients_fills_gaps_with_zeros),
        cmocka_unit_test(pack_gradients_of_dim_1_shards_sends_each_rank_its_columns),
        cmocka_unit_test(cast_without_kernel_uses_torch),
        cmocka_unit_test(transfer_to_small_buffer_is_refused),
        cmocka_unit_test(pack_into_freed_storage_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
