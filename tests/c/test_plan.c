/* Transfer plans: offsets of shards in a rank shard of the gather buffer, and of gradients in those
 * of the reduce buffer. */
#include "core/plan.h"

#include <string.h>

#include "sim.h"

static const fct_device CPU = {FCT_DEVICE_CPU, -1};
static const fct_device CUDA = {FCT_DEVICE_CUDA, 0};

/* Codes of torch::ScalarType without a FCK_ constant. */
enum { INT64 = 4, COMPLEX32 = 8, COMPLEX64 = 9, COMPLEX128 = 10, BITS1X8 = 18 };

/* Creates a parameter sharded on `dim` over two ranks, as on rank 1. */
static fc_param param_of(const char *name, int32_t ndim, const int64_t *sizes, int32_t dim,
                         fct_dtype dtype, fct_dtype compute) {
    fc_param p;
    fc_error err = {""};
    assert_int_equal(fc_param_init(&p, NULL, ndim, sizes, dim, 2, 1, &err), FC_OK);
    p.name = name;
    p.orig_dtype = dtype;
    p.param_dtype = compute;
    return p;
}

static fc_param vector(const char *name, int64_t size, fct_dtype dtype, fct_dtype compute) {
    return param_of(name, 1, &size, 0, dtype, compute);
}

static fc_gather_plan gather_plan_of(fc_param *const *params, size_t count) {
    fc_gather_plan plan = {.valid = false};
    fc_error err = {""};
    assert_int_equal(fc_gather_plan_build(&plan, params, count, 2, false, CPU, &err), FC_OK);
    assert_true(plan.valid);
    return plan;
}

/* ---- gather plans ---- */

static void gather_plan_places_shards_consecutively(void **state) {
    (void)state;
    const int64_t matrix[2] = {5, 3};
    fc_param a = param_of("a", 2, matrix, 0, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param b = vector("b", 3, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[2] = {&a, &b};
    fc_gather_plan plan = gather_plan_of(params, 2);
    assert_int_equal(plan.dtype, FCK_FLOAT32);
    assert_int_equal(plan.rank_numel, 9 + 2); /* padded: 3 of 6 rows, 2 of 4 elements */
    assert_int_equal(plan.rank_bytes, 44);
    assert_int_equal(plan.slots[0].offset, 0);
    assert_int_equal(plan.slots[1].offset, 36);
    assert_int_equal(plan.slots[0].numel, 9);
    assert_int_equal(plan.slots[1].numel, 2);
    assert_true(plan.native);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&b);
}

static void gather_plan_casts_to_compute_dtype(void **state) {
    (void)state;
    fc_param a = vector("a", 4, FCK_FLOAT32, FCK_BFLOAT16);
    fc_param *params[1] = {&a};
    fc_gather_plan plan = gather_plan_of(params, 1);
    assert_int_equal(plan.dtype, FCK_BFLOAT16);
    assert_int_equal(plan.rank_bytes, 4);
    assert_int_equal(plan.slots[0].source, FCK_FLOAT32);
    assert_int_equal(plan.slots[0].compute, FCK_BFLOAT16);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
}

static void gather_plan_of_several_compute_dtypes_uses_bytes(void **state) {
    (void)state;
    fc_param a = vector("a", 2, FCK_BFLOAT16, FCT_NO_DTYPE);
    fc_param b = vector("b", 2, FCK_FLOAT64, FCT_NO_DTYPE);
    fc_param *params[2] = {&a, &b};
    fc_gather_plan plan = gather_plan_of(params, 2);
    assert_int_equal(plan.dtype, FCK_UINT8);
    assert_int_equal(plan.rank_numel, 2 + 8);
    assert_int_equal(plan.rank_bytes, 2 + 8);
    assert_int_equal(plan.slots[1].offset, 2);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&b);
}

/* The shards are 3 bfloat16, an empty shard, one float64 and 5 bytes. */
static void gather_plan_on_cuda_aligns_slots_and_rank_shards_to_16_bytes(void **state) {
    (void)state;
    fc_param a = vector("a", 6, FCK_BFLOAT16, FCT_NO_DTYPE);
    fc_param none = vector("none", 0, FCK_BFLOAT16, FCT_NO_DTYPE);
    fc_param b = vector("b", 2, FCK_FLOAT64, FCT_NO_DTYPE);
    fc_param c = vector("c", 10, FCK_UINT8, FCT_NO_DTYPE);
    fc_param *params[4] = {&a, &none, &b, &c};
    fc_gather_plan plan = {.valid = false};
    fc_error err = {""};
    assert_int_equal(fc_gather_plan_build(&plan, params, 4, 2, false, CUDA, &err), FC_OK);
    assert_int_equal(plan.slots[0].offset, 0);
    assert_int_equal(plan.slots[1].offset, 6);
    assert_int_equal(plan.slots[2].offset, 16);
    assert_int_equal(plan.slots[3].offset, 32);
    assert_int_equal(plan.rank_bytes, 48);
    assert_int_equal(plan.rank_numel, 48);
    assert_int_equal(fc_gather_plan_build(&plan, &params[0], 1, 2, false, CUDA, &err), FC_OK);
    assert_int_equal(plan.rank_numel, 8);
    assert_int_equal(fc_gather_plan_build(&plan, &params[1], 1, 2, false, CUDA, &err), FC_OK);
    assert_int_equal(plan.rank_numel, 0);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&none);
    fc_param_fini(&b);
    fc_param_fini(&c);
}

static void gather_plan_slot_of_nonzero_dim_has_several_blocks(void **state) {
    (void)state;
    const int64_t sizes[3] = {3, 4, 2};
    fc_param a = vector("a", 2, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param b = param_of("b", 3, sizes, 1, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[2] = {&a, &b};
    fc_gather_plan plan = gather_plan_of(params, 2);
    assert_int_equal(plan.slots[0].outer, 1);
    assert_int_equal(plan.slots[1].outer, 3);
    assert_int_equal(plan.slots[1].offset, 4);
    assert_int_equal(plan.slots[1].numel, 3 * 2 * 2); /* 2 of 4 rows of 2 floats each */
    assert_int_equal(plan.rank_bytes, 4 + 48);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&b);
}

static void gather_plan_build_uses_current_parameters(void **state) {
    (void)state;
    fc_param a = vector("a", 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param b = vector("b", 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[2] = {&a, &b};
    fc_error err = {""};
    fc_gather_plan plan = gather_plan_of(params, 2);
    a.param_dtype = FCK_BFLOAT16;
    b.param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_gather_plan_build(&plan, params, 2, 2, false, CPU, &err), FC_OK);
    assert_int_equal(plan.rank_bytes, 8);
    assert_int_equal(fc_gather_plan_build(&plan, params, 1, 2, false, CPU, &err), FC_OK);
    assert_int_equal(plan.rank_bytes, 4);
    assert_int_equal(fc_gather_plan_build(&plan, params, 0, 2, false, CPU, &err), FC_OK);
    assert_int_equal(plan.rank_bytes, 0);
    assert_int_equal(plan.count, 0);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&b);
}

static void post_forward_plan_gathers_compute_dtype_shards(void **state) {
    (void)state;
    const int64_t sizes[1] = {5};
    fc_param a;
    fc_error err = {""};
    fc_param *params[1] = {&a};
    fc_gather_plan plan = {.valid = false};
    assert_int_equal(fc_param_init(&a, NULL, 1, sizes, 0, 4, 3, &err), FC_OK);
    assert_int_equal(fc_param_init_post_forward(&a, sizes, 2, 1, &err), FC_OK);
    assert_int_equal(a.flat_numel, 8); /* space for both 4 * 2 and 2 * 3 elements */
    a.orig_dtype = FCK_FLOAT32;
    a.param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_gather_plan_build(&plan, params, 1, 2, true, CPU, &err), FC_OK);
    assert_int_equal(plan.rank_numel, 3);
    assert_int_equal(plan.slots[0].source, FCK_BFLOAT16);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
}

static void gather_plan_with_unsupported_cast_is_not_native(void **state) {
    (void)state;
    fc_param a = vector("a", 4, INT64, FCK_FLOAT32);
    fc_param *params[1] = {&a};
    fc_gather_plan plan = gather_plan_of(params, 1);
    assert_false(plan.native);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
}

static void gather_plan_of_unsupported_parameter_fails_with_name(void **state) {
    (void)state;
    fc_param a = vector("a", 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param b = vector("lm_head.weight", 4, BITS1X8, FCT_NO_DTYPE);
    fc_param huge = vector("embedding", INT64_MAX / 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[2] = {&a, &b};
    fc_gather_plan plan = {.valid = false};
    fc_error err = {""};
    assert_int_equal(fc_gather_plan_build(&plan, params, 2, 2, false, CPU, &err), FC_EVALUE);
    assert_string_equal(err.message,
                        "parameter 'lm_head.weight' has a dtype that cannot be gathered");
    assert_false(plan.valid);
    params[1] = &huge;
    assert_int_equal(fc_gather_plan_build(&plan, params, 2, 2, false, CPU, &err), FC_EASSERT);
    assert_string_equal(err.message, "the gather buffer's size overflows at parameter 'embedding'");
    assert_false(plan.valid);
    fc_gather_plan_fini(&plan);
    fc_param_fini(&a);
    fc_param_fini(&b);
    fc_param_fini(&huge);
}

static void expect_run(const fct_run *run, size_t chunk, int64_t offset, int64_t numel) {
    assert_int_equal(run->chunk, chunk);
    assert_int_equal(run->offset, offset);
    assert_int_equal(run->numel, numel);
}

static void expect_slot(const fc_slot *slot, size_t chunk, int64_t offset) {
    assert_int_equal(slot->chunk, chunk);
    assert_int_equal(slot->offset, offset);
}

/* Parameters of at least 40 bytes get their own chunk; the others share the last one, without
 * gaps. */
static void split_gather_plan_gives_large_parameters_own_chunks(void **state) {
    (void)state;
    fc_param a = vector("a", 3, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param b = vector("b", 10, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param c = vector("c", 5, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param d = vector("d", 64, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[4] = {&a, &b, &c, &d};
    fc_error err = {""};
    fc_gather_plan plan = {.valid = false};
    fc_set_min_owned_chunk_bytes(40);
    assert_int_equal(fc_gather_plan_build(&plan, params, 4, 2, false, CPU, &err), FC_OK);
    for (int round = 0; round < 2; round++) {
        fc_gather_plan_set_split(&plan, false);
        fct_chunk_layout layout = fc_chunk_list_layout(&plan.chunks);
        assert_int_equal(layout.count, 1);
        assert_int_equal(layout.rank_numel, 2 + 5 + 3 + 32);
        expect_run(&layout.runs[0], 0, 0, 2 + 5 + 3 + 32);
        expect_slot(&plan.slots[3], 0, (2 + 5 + 3) * 4);
        assert_true(fc_chunk_list_can_split(&plan.chunks));
        fc_gather_plan_set_split(&plan, true);
        layout = fc_chunk_list_layout(&plan.chunks);
        assert_int_equal(plan.chunks.count, 3);
        assert_int_equal(layout.count, 4);
        assert_int_equal(layout.rank_numel, 2 + 5 + 3 + 32);
        expect_run(&layout.runs[0], 2, 0, 2);
        expect_run(&layout.runs[1], 0, 0, 5);
        expect_run(&layout.runs[2], 2, 2, 3);
        expect_run(&layout.runs[3], 1, 0, 32);
        expect_slot(&plan.slots[0], 2, 0);
        expect_slot(&plan.slots[1], 0, 0);
        expect_slot(&plan.slots[2], 2, 2 * 4);
        expect_slot(&plan.slots[3], 1, 0);
        assert_true(plan.chunks.chunks[0].owned && plan.chunks.chunks[1].owned);
        assert_false(plan.chunks.chunks[2].owned);
        assert_int_equal(plan.chunks.chunks[2].numel, 2 + 3);
    }
    /* Plans of several dtypes, and plans on other devices than the CPU, cannot be split. */
    b.param_dtype = FCK_BFLOAT16;
    assert_int_equal(fc_gather_plan_build(&plan, params, 4, 2, false, CPU, &err), FC_OK);
    assert_false(fc_chunk_list_can_split(&plan.chunks));
    b.param_dtype = FCT_NO_DTYPE;
    assert_int_equal(fc_gather_plan_build(&plan, params, 4, 2, false, CUDA, &err), FC_OK);
    assert_false(fc_chunk_list_can_split(&plan.chunks));
    fc_set_min_owned_chunk_bytes(SIM_NEVER_SPLIT);
    fc_gather_plan_fini(&plan);
    for (size_t i = 0; i < 4; i++) {
        fc_param_fini(params[i]);
    }
}

static void gather_plan_build_without_memory_fails_without_leak(void **state) {
    (void)state;
    fc_param a = vector("a", 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param *params[1] = {&a};
    fc_error err = {""};
    sim_begin((sim_config){.seed = 1});
    for (int64_t n = 1; n <= 4; n++) {
        fc_gather_plan plan = {.valid = false};
        sim_fault_arm(n, SIM_ONCE);
        fc_status status = fc_gather_plan_build(&plan, params, 1, 2, false, CPU, &err);
        assert_int_equal(status, n <= 3 ? FC_ENOMEM : FC_OK);
        assert_int_equal(plan.valid, n > 3);
        fc_gather_plan_fini(&plan);
    }
    sim_end();
    fc_param_fini(&a);
}

/* ---- reduce plans ---- */

static fct_tensor *gradient_of(int32_t ndim, const int64_t *sizes, fct_dtype dtype) {
    double values[32] = {0};
    return sim_tensor_new(dtype, ndim, sizes, values);
}

/* Adds the gradient to the plan. Takes `grad`. */
static void collect(fc_reduce_plan *plan, fc_param *p, fct_tensor *grad) {
    assert_int_equal(fc_reduce_plan_reserve(plan, plan->count + 1), FC_OK);
    plan->params[plan->count] = p;
    plan->grads[plan->count++] = grad;
}

static const int64_t matrix_sizes[2] = {5, 3};
static const int64_t vector_sizes[1] = {3};

typedef struct reduction {
    fc_param matrix; /* 5 x 3, sharded on dim 0 */
    fc_param vector; /* 3 elements */
    fc_reduce_plan plan;
    bool needs_fallback; /* output of the latest fc_reduce_plan_lay_out */
    fc_error err;
} reduction;

static reduction begin(void) {
    reduction r = {.err = {""}};
    sim_begin((sim_config){.seed = 1});
    r.matrix = param_of("matrix", 2, matrix_sizes, 0, FCK_FLOAT32, FCT_NO_DTYPE);
    r.vector = vector("vector", 3, FCK_FLOAT32, FCT_NO_DTYPE);
    assert_int_equal(fc_reduce_plan_reserve(&r.plan, 2), FC_OK);
    return r;
}

static void end(reduction *r) {
    fc_reduce_plan_fini(&r->plan);
    fc_param_fini(&r->matrix);
    fc_param_fini(&r->vector);
    sim_end();
}

static void reduce_plan_distributes_gradients_to_rank_shards(void **state) {
    (void)state;
    reduction r = begin();
    collect(&r.plan, &r.matrix, gradient_of(2, matrix_sizes, FCK_FLOAT32));
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, FCK_FLOAT32));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_OK);
    assert_int_equal(r.plan.dtype, FCK_FLOAT32);
    assert_int_equal(r.plan.rank_numel, 9 + 2);
    assert_int_equal(r.plan.slots[0].offset, 0);
    assert_int_equal(r.plan.slots[1].offset, 9);
    assert_true(r.plan.native);
    end(&r);
}

/* A kernel of the device uses 16-byte accesses for every gradient, whatever precedes it. */
static void reduce_plan_on_cuda_starts_slots_and_rank_shards_at_16_bytes(void **state) {
    (void)state;
    const fct_dtype reduce_dtypes[2] = {FCK_FLOAT32, FCK_BFLOAT16};
    for (int i = 0; i < 2; i++) {
        reduction r = begin();
        collect(&r.plan, &r.matrix, gradient_of(2, matrix_sizes, FCK_FLOAT32));
        collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, FCK_FLOAT32));
        sim_tensor_relocate(r.plan.grads[0], CUDA);
        sim_tensor_relocate(r.plan.grads[1], CUDA);
        assert_int_equal(
            fc_reduce_plan_lay_out(&r.plan, reduce_dtypes[i], &r.needs_fallback, &r.err), FC_OK);
        assert_int_equal(r.plan.align, i == 0 ? 4 : 8);
        assert_int_equal(r.plan.slots[1].offset, i == 0 ? 12 : 16); /* after 9 elements */
        assert_int_equal(r.plan.rank_numel, i == 0 ? 16 : 24);
        assert_int_equal(fc_reduce_plan_gap(&r.plan, 0), i == 0 ? 3 : 7);
        assert_int_equal(fc_reduce_plan_gap(&r.plan, 1), i == 0 ? 2 : 6);
        end(&r);
    }
}

static void reduce_plan_skips_parameters_without_gradient(void **state) {
    (void)state;
    reduction r = begin();
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, FCK_FLOAT32));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_OK);
    assert_int_equal(r.plan.rank_numel, 2);
    assert_ptr_equal(r.plan.params[0], &r.vector);
    end(&r);
}

static void reduce_dtype_overrides_gradient_dtype(void **state) {
    (void)state;
    reduction r = begin();
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, FCK_BFLOAT16));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCK_FLOAT32, &r.needs_fallback, &r.err),
                     FC_OK);
    assert_int_equal(r.plan.dtype, FCK_FLOAT32);
    assert_true(r.plan.native);
    end(&r);
}

/* Returns the reduction dtype of gradients of two dtypes, without an explicit reduce dtype. */
static fct_dtype reduce_dtype_of(fct_dtype first, fct_dtype second) {
    reduction r = begin();
    bool floats = fck_can_cast(FCK_DEVICE_CPU, first, FCK_FLOAT32) != 0 &&
                  fck_can_cast(FCK_DEVICE_CPU, second, FCK_FLOAT32) != 0;
    collect(&r.plan, &r.matrix, gradient_of(2, matrix_sizes, first));
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, second));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_OK);
    fct_dtype dtype = r.plan.dtype;
    assert_int_equal(r.plan.native, floats);
    end(&r);
    return dtype;
}

static void mixed_gradients_are_reduced_in_widest_dtype(void **state) {
    (void)state;
    assert_int_equal(reduce_dtype_of(FCK_FLOAT32, FCK_BFLOAT16), FCK_FLOAT32);
    assert_int_equal(reduce_dtype_of(FCK_FLOAT16, FCK_FLOAT64), FCK_FLOAT64);
    assert_int_equal(reduce_dtype_of(FCK_FLOAT16, FCK_BFLOAT16), FCK_FLOAT32);
    assert_int_equal(reduce_dtype_of(FCK_BFLOAT16, FCK_BFLOAT16), FCK_BFLOAT16);
    assert_int_equal(reduce_dtype_of(COMPLEX64, FCK_FLOAT32), COMPLEX64);
    assert_int_equal(reduce_dtype_of(COMPLEX64, FCK_FLOAT64), COMPLEX128);
    assert_int_equal(reduce_dtype_of(FCK_BFLOAT16, COMPLEX32), COMPLEX64);
    assert_int_equal(reduce_dtype_of(COMPLEX32, COMPLEX128), COMPLEX128);
}

/* Asserts that a parameter of 4 floats on two ranks refuses the shard with `message`. Takes
 * `shard`. */
static void expect_invalid_shard(fct_tensor *shard, const char *message) {
    fc_error err = {""};
    fct_facts facts;
    fc_param p = vector("lm_head.weight", 4, FCK_FLOAT32, FCT_NO_DTYPE);
    fc_param_set_sharded_data(&p, shard);
    fct_tensor_release(shard);
    assert_int_equal(fc_param_shard_facts(&p, false, &facts, &err), FC_EASSERT);
    assert_string_equal(err.message, message);
    fc_param_fini(&p);
}

static void invalid_shard_is_refused_with_name_and_reason(void **state) {
    (void)state;
    const int64_t two[1] = {2};
    const int64_t three[1] = {3};
    const int64_t stride[1] = {2};
    fct_tensor *strided = NULL;
    fct_tensor *freed = NULL;
    sim_begin((sim_config){.seed = 1});
    expect_invalid_shard(
        gradient_of(1, three, FCK_FLOAT32),
        "the shard of parameter 'lm_head.weight' changed its number of elements since it was "
        "initialized: 3 elements of torch.float32 in a storage of 12 bytes; "
        "expected 2 of torch.float32");
    expect_invalid_shard(
        gradient_of(1, two, FCK_BFLOAT16),
        "the shard of parameter 'lm_head.weight' changed its dtype since it was "
        "initialized: 2 elements of torch.bfloat16 in a storage of 4 bytes; expected 2 of "
        "torch.float32");
    fct_tensor *storage = gradient_of(1, three, FCK_FLOAT32);
    assert_int_equal(fct_tensor_alias(storage, 1, two, stride, 0, &strided), 0);
    fct_tensor_release(storage);
    expect_invalid_shard(strided,
                         "the shard of parameter 'lm_head.weight' is not contiguous: 2 elements of "
                         "torch.float32 in a storage of 12 bytes; expected 2 of torch.float32");
    freed = gradient_of(1, two, FCK_FLOAT32);
    fct_storage_free(freed);
    expect_invalid_shard(freed,
                         "the shard of parameter 'lm_head.weight' lies outside its storage: 2 "
                         "elements of torch.float32 in a storage of 0 bytes; expected 2 of "
                         "torch.float32");
    sim_end();
}

static fct_dtype complex_reduce_dtype_of(fct_dtype reduce_dtype) {
    reduction r = begin();
    collect(&r.plan, &r.matrix, gradient_of(2, matrix_sizes, FCK_FLOAT32));
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, COMPLEX64));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, reduce_dtype, &r.needs_fallback, &r.err),
                     FC_OK);
    fct_dtype dtype = r.plan.dtype;
    end(&r);
    return dtype;
}

static void real_reduce_dtype_applies_to_parts_of_complex_gradients(void **state) {
    (void)state;
    assert_int_equal(complex_reduce_dtype_of(FCK_FLOAT32), COMPLEX64);
    assert_int_equal(complex_reduce_dtype_of(FCK_FLOAT64), COMPLEX128);
    assert_int_equal(complex_reduce_dtype_of(FCK_FLOAT16), COMPLEX32);
    assert_int_equal(complex_reduce_dtype_of(FCK_BFLOAT16), COMPLEX64);
    assert_int_equal(complex_reduce_dtype_of(COMPLEX128), COMPLEX128);
}

static void gradients_without_common_dtype_require_reduce_dtype(void **state) {
    (void)state;
    reduction r = begin();
    collect(&r.plan, &r.matrix, gradient_of(2, matrix_sizes, FCK_FLOAT32));
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, INT64));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_EASSERT);
    assert_string_equal(r.err.message, "FSDP reduce-scatter expects uniform gradient dtype but got "
                                       "{torch.float32, torch.int64}");
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCK_FLOAT32, &r.needs_fallback, &r.err),
                     FC_OK);
    end(&r);
}

static void reduce_plan_row_has_space_for_shard_of_nonzero_dim(void **state) {
    (void)state;
    reduction r = begin();
    const int64_t sizes[2] = {3, 4};
    fc_param p = param_of("p", 2, sizes, 1, FCK_FLOAT32, FCT_NO_DTYPE);
    collect(&r.plan, &r.vector, gradient_of(1, vector_sizes, FCK_FLOAT32));
    collect(&r.plan, &p, gradient_of(2, sizes, FCK_FLOAT32));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_OK);
    assert_int_equal(r.plan.slots[1].offset, 2);
    assert_int_equal(r.plan.rank_numel, 2 + 6);
    fc_param_fini(&p);
    end(&r);
}

static void non_contiguous_gradient_is_copied(void **state) {
    (void)state;
    reduction r = begin();
    const int64_t transposed_sizes[2] = {3, 5};
    const int64_t strides[2] = {1, 5};
    fct_facts facts;
    fct_facts copied;
    fct_tensor *transposed = gradient_of(2, transposed_sizes, FCK_FLOAT32);
    collect(&r.plan, &r.matrix, sim_tensor_view(transposed, 2, matrix_sizes, strides));
    fct_tensor_facts(transposed, &facts);
    fct_tensor_release(transposed);
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_OK);
    fct_tensor_facts(r.plan.grads[0], &copied);
    assert_true(copied.contiguous);
    assert_ptr_not_equal(copied.data, facts.data);
    end(&r);
}

static void gradient_of_wrong_size_is_refused_with_name(void **state) {
    (void)state;
    reduction r = begin();
    collect(&r.plan, &r.matrix, gradient_of(1, vector_sizes, FCK_FLOAT32));
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_EASSERT);
    assert_string_equal(r.err.message,
                        "the gradient of parameter 'matrix' has 3 elements; expected 15");
    end(&r);
}

static void gradient_with_freed_memory_is_refused(void **state) {
    (void)state;
    reduction r = begin();
    fct_tensor *grad = gradient_of(1, vector_sizes, FCK_FLOAT32);
    fct_storage_free(grad);
    collect(&r.plan, &r.vector, grad);
    assert_int_equal(fc_reduce_plan_lay_out(&r.plan, FCT_NO_DTYPE, &r.needs_fallback, &r.err),
                     FC_EASSERT);
    assert_string_equal(r.err.message,
                        "the gradient of parameter 'vector' lies outside its storage");
    end(&r);
}

static void drop_grads_releases_gradients(void **state) {
    (void)state;
    reduction r = begin();
    fct_tensor *grad = gradient_of(1, vector_sizes, FCK_FLOAT32);
    fct_tensor_retain(grad);
    collect(&r.plan, &r.vector, grad);
    assert_int_equal(sim_tensor_refs(grad), 2);
    fc_reduce_plan_drop_grads(&r.plan);
    assert_int_equal(sim_tensor_refs(grad), 1);
    assert_int_equal(r.plan.count, 0);
    fct_tensor_release(grad);
    end(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_plan_places_shards_consecutively),
        cmocka_unit_test(gather_plan_casts_to_compute_dtype),
        cmocka_unit_test(gather_plan_of_several_compute_dtypes_uses_bytes),
        cmocka_unit_test(gather_plan_on_cuda_aligns_slots_and_rank_shards_to_16_bytes),
        cmocka_unit_test(gather_plan_slot_of_nonzero_dim_has_several_blocks),
        cmocka_unit_test(gather_plan_build_uses_current_parameters),
        cmocka_unit_test(post_forward_plan_gathers_compute_dtype_shards),
        cmocka_unit_test(gather_plan_with_unsupported_cast_is_not_native),
        cmocka_unit_test(gather_plan_of_unsupported_parameter_fails_with_name),
        cmocka_unit_test(split_gather_plan_gives_large_parameters_own_chunks),
        cmocka_unit_test(gather_plan_build_without_memory_fails_without_leak),
        cmocka_unit_test(reduce_plan_distributes_gradients_to_rank_shards),
        cmocka_unit_test(reduce_plan_on_cuda_starts_slots_and_rank_shards_at_16_bytes),
        cmocka_unit_test(reduce_plan_skips_parameters_without_gradient),
        cmocka_unit_test(reduce_dtype_overrides_gradient_dtype),
        cmocka_unit_test(mixed_gradients_are_reduced_in_widest_dtype),
        cmocka_unit_test(invalid_shard_is_refused_with_name_and_reason),
        cmocka_unit_test(real_reduce_dtype_applies_to_parts_of_complex_gradients),
        cmocka_unit_test(gradients_without_common_dtype_require_reduce_dtype),
        cmocka_unit_test(reduce_plan_row_has_space_for_shard_of_nonzero_dim),
        cmocka_unit_test(non_contiguous_gradient_is_copied),
        cmocka_unit_test(gradient_of_wrong_size_is_refused_with_name),
        cmocka_unit_test(gradient_with_freed_memory_is_refused),
        cmocka_unit_test(drop_grads_releases_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
