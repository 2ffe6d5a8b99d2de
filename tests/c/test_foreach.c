/* Transfers without kernels: the number of torch's multi-tensor operations, and their results. */
#include "core/foreach.h"

#include <string.h>

#include "sim.h"

enum { PARAMS_MAX = 4, NUMEL_MAX = 64 };

/* Parameters of rank 1 of two. Values are numbered in parameter order. */
typedef struct fixture {
    fc_param params[PARAMS_MAX];
    fc_param *list[PARAMS_MAX];
    size_t count;
    fc_gather_plan plan;
    fc_reduce_plan reduce;
    fc_foreach foreach;
    bool aligned; /* gradients are on CUDA */
    fc_error err;
} fixture;

static void begin(fixture *f) {
    memset(f, 0, sizeof *f);
    sim_begin((sim_config){.seed = 5, .no_kernels = true});
}

/* Adds a parameter of `rows` x `columns`, sharded on `dim`; its shard is first, first + 1, ... */
static void add_param(fixture *f, int64_t rows, int64_t columns, int32_t dim, fct_dtype dtype,
                      fct_dtype compute, double first) {
    const int64_t sizes[2] = {rows, columns};
    double values[NUMEL_MAX];
    fc_param *p = &f->params[f->count];
    assert_int_equal(fc_param_init(p, NULL, 2, sizes, dim, 2, 1, &f->err), FC_OK);
    p->name = "weight";
    p->orig_dtype = dtype;
    p->param_dtype = compute;
    for (int64_t i = 0; i < p->layout.padded_numel; i++) {
        values[i] = first + (double)i;
    }
    fct_tensor *shard = sim_tensor_new(dtype, 1, &p->layout.padded_numel, values);
    fc_param_set_sharded_data(p, shard);
    fct_tensor_release(shard);
    f->list[f->count++] = p;
}

static void build_plan(fixture *f) {
    assert_int_equal(
        fc_gather_plan_build(&f->plan, f->list, f->count, 2, false, sim_device(), &f->err), FC_OK);
    sim_calls_clear();
}

static void end(fixture *f) {
    fc_gather_plan_fini(&f->plan);
    fc_reduce_plan_fini(&f->reduce);
    fc_foreach_fini(&f->foreach);
    for (size_t i = 0; i < f->count; i++) {
        fc_param_fini(&f->params[i]);
    }
    sim_end();
}

/* The value of elements that a transfer must not write. */
static const double UNWRITTEN = 77;

static fct_tensor *new_unwritten_tensor(fct_dtype dtype, int64_t numel) {
    double values[NUMEL_MAX];
    for (int i = 0; i < NUMEL_MAX; i++) {
        values[i] = UNWRITTEN;
    }
    return sim_tensor_new(dtype, 1, &numel, values);
}

static void expect_calls(const char *expected) {
    assert_string_equal(sim_calls_text(), expected);
    sim_calls_clear();
}

/* ---- pack ---- */

static void pack_of_one_dtype_is_one_operation(void **state) {
    (void)state;
    fixture f;
    const double shard[8] = {UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN, 1, 2, 10, 11};
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 1);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 10);
    build_plan(&f);
    fct_tensor *buffer = new_unwritten_tensor(FCK_FLOAT32, 8);
    assert_int_equal(fc_foreach_pack(&f.foreach, &f.plan, f.list, buffer, 16, &f.err), FC_OK);
    expect_calls("fct_foreach_copy");
    sim_tensor_expect(buffer, shard, "the gather buffer");
    fct_tensor_release(buffer);
    end(&f);
}

static void pack_with_casts_is_one_operation_per_dtype_pair(void **state) {
    (void)state;
    fixture f;
    const double shard[6] = {1, 2, 10, 11, 20, 21};
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCK_BFLOAT16, 1);
    add_param(&f, 2, 2, 0, FCK_BFLOAT16, FCT_NO_DTYPE, 10);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCK_BFLOAT16, 20);
    build_plan(&f);
    fct_tensor *buffer = new_unwritten_tensor(FCK_BFLOAT16, 6);
    assert_int_equal(fc_foreach_pack(&f.foreach, &f.plan, f.list, buffer, 0, &f.err), FC_OK);
    expect_calls("fct_foreach_copy fct_foreach_copy");
    sim_tensor_expect(buffer, shard, "the gather buffer");
    fct_tensor_release(buffer);
    end(&f);
}

/* In a buffer of bytes all copies without a cast are one operation. A float at an unaligned offset
 * (10 bytes) is first cast into a temporary tensor, which the same operation copies. */
static void pack_into_byte_buffer_copies_shards_without_cast_in_one_operation(void **state) {
    (void)state;
    fixture f;
    fct_tensor *floats = NULL;
    fct_tensor *bfloat16s = NULL;
    fct_tensor *bytes = NULL;
    const int64_t one[1] = {1};
    const int64_t two[1] = {2};
    const int64_t four[1] = {4};
    const double twenty[4] = {0, 0, 0xa0, 0x41}; /* 20.0f, little-endian */
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 1);
    add_param(&f, 2, 1, 0, FCK_BFLOAT16, FCT_NO_DTYPE, 10);
    add_param(&f, 2, 1, 0, FCK_FLOAT64, FCK_FLOAT32, 20);
    build_plan(&f);
    assert_int_equal(f.plan.dtype, FCK_UINT8);
    assert_int_equal(f.plan.slots[2].offset, 10);
    fct_tensor *buffer = new_unwritten_tensor(FCK_UINT8, 14);
    assert_int_equal(fc_foreach_pack(&f.foreach, &f.plan, f.list, buffer, 0, &f.err), FC_OK);
    expect_calls("fct_tensor_cast fct_foreach_copy");
    assert_int_equal(fct_tensor_alias_as(buffer, FCK_FLOAT32, 1, two, one, 0, &floats), 0);
    assert_int_equal(fct_tensor_alias_as(buffer, FCK_BFLOAT16, 1, one, one, 4, &bfloat16s), 0);
    assert_int_equal(fct_tensor_alias_as(buffer, FCK_UINT8, 1, four, one, 10, &bytes), 0);
    sim_tensor_expect(floats, (const double[2]){1, 2}, "the floats");
    sim_tensor_expect(bfloat16s, (const double[1]){10}, "the bfloat16");
    sim_tensor_expect(bytes, twenty, "the cast float");
    fct_tensor_release(floats);
    fct_tensor_release(bfloat16s);
    fct_tensor_release(bytes);
    fct_tensor_release(buffer);
    end(&f);
}

/* The caller passes no buffer for a group of one rank. */
static void pack_without_buffer_writes_flat_tensors_directly(void **state) {
    (void)state;
    fixture f;
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCK_BFLOAT16, 1);
    build_plan(&f);
    assert_int_equal(fc_param_alloc_flat(f.list[0], sim_device(), &f.err), FC_OK);
    assert_int_equal(fc_foreach_pack(&f.foreach, &f.plan, f.list, NULL, 0, &f.err), FC_OK);
    fct_tensor *shard = NULL;
    const int64_t two[1] = {2};
    const int64_t one[1] = {1};
    assert_int_equal(fct_tensor_alias(f.params[0].flat, 1, two, one, 0, &shard), 0);
    sim_tensor_expect(shard, (const double[2]){1, 2}, "the shard in its flat tensor");
    fct_tensor_release(shard);
    end(&f);
}

/* ---- unpack ---- */

static void unpack(fixture *f, const double *gathered, int64_t numel) {
    build_plan(f);
    fct_tensor *buffer = sim_tensor_new(f->plan.dtype, 1, &numel, gathered);
    for (size_t i = 0; i < f->count; i++) {
        assert_int_equal(fc_param_alloc_flat(f->list[i], sim_device(), &f->err), FC_OK);
    }
    sim_calls_clear();
    assert_int_equal(fc_foreach_unpack(&f->foreach, &f->plan, f->list, buffer, 0, sim_device()),
                     FC_OK);
    fct_tensor_release(buffer);
}

static void unpack_of_dim_0_shards_is_one_split(void **state) {
    (void)state;
    fixture f;
    const double gathered[8] = {1, 2, 10, 11, 3, 4, 12, 13};
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    unpack(&f, gathered, 8);
    expect_calls("fct_split_copy");
    sim_tensor_expect(f.params[0].flat, (const double[4]){1, 2, 3, 4}, "the matrix");
    sim_tensor_expect(f.params[1].flat, (const double[4]){10, 11, 12, 13}, "the vector");
    end(&f);
}

/* [[1, 2, 3, 4], [5, 6, 7, 8]] sharded on dim 1, and a vector: each needs one copy. */
static void unpack_copies_dim_1_shards_directly_with_one_other_parameter(void **state) {
    (void)state;
    fixture f;
    const double gathered[12] = {1, 2, 5, 6, 10, 11, 3, 4, 7, 8, 12, 13};
    begin(&f);
    add_param(&f, 2, 4, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    unpack(&f, gathered, 12);
    expect_calls("fct_tensor_copy fct_tensor_copy");
    sim_tensor_expect(f.params[0].flat, (const double[8]){1, 2, 3, 4, 5, 6, 7, 8}, "the matrix");
    sim_tensor_expect(f.params[1].flat, (const double[4]){10, 11, 12, 13}, "the vector");
    end(&f);
}

static void unpack_uses_temporary_for_dim_1_shards_with_several_parameters(void **state) {
    (void)state;
    fixture f;
    const double gathered[16] = {20, 21, 1, 2, 5, 6, 10, 11, 22, 23, 3, 4, 7, 8, 12, 13};
    begin(&f);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 2, 4, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    unpack(&f, gathered, 16);
    expect_calls("fct_tensor_empty fct_split_copy fct_tensor_copy");
    sim_tensor_expect(f.params[0].flat, (const double[4]){20, 21, 22, 23}, "one vector");
    sim_tensor_expect(f.params[1].flat, (const double[8]){1, 2, 3, 4, 5, 6, 7, 8}, "the matrix");
    sim_tensor_expect(f.params[2].flat, (const double[4]){10, 11, 12, 13}, "another vector");
    end(&f);
}

/* A rank shard on CUDA has alignment gaps. In a build without CUDA kernels, one split operation
 * still copies all shards; its outputs for the gaps are temporary memory. */
static void unpack_splits_off_alignment_gaps(void **state) {
    (void)state;
    fixture f;
    const int64_t numel[1] = {16};
    const fct_device cuda = {FCT_DEVICE_CUDA, 0};
    const double gathered[16] = {1, 2, 77, 77, 10, 77, 77, 77, 3, 4, 77, 77, 11, 77, 77, 77};
    begin(&f);
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 2, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    assert_int_equal(fc_gather_plan_build(&f.plan, f.list, 2, 2, false, cuda, &f.err), FC_OK);
    assert_int_equal(f.plan.rank_numel, 8);
    fct_tensor *buffer = sim_tensor_new(FCK_FLOAT32, 1, numel, gathered);
    for (size_t i = 0; i < f.count; i++) {
        assert_int_equal(fc_param_alloc_flat(f.list[i], sim_device(), &f.err), FC_OK);
    }
    sim_calls_clear();
    assert_int_equal(fc_foreach_unpack(&f.foreach, &f.plan, f.list, buffer, 0, sim_device()),
                     FC_OK);
    expect_calls("fct_tensor_empty fct_split_copy");
    sim_tensor_expect(f.params[0].flat, (const double[4]){1, 2, 3, 4}, "the matrix");
    sim_tensor_expect(f.params[1].flat, (const double[2]){10, 11}, "the vector");
    fct_tensor_release(buffer);
    end(&f);
}

/* ---- gradients ---- */

/* Packs the gradients of all parameters, numbered from 1, for two ranks. */
static void pack_gradients(fixture *f, const fct_dtype *dtypes, fct_dtype reduce,
                           const double *packed, int64_t numel) {
    bool needs_fallback = true;
    double next = 1;
    assert_int_equal(fc_reduce_plan_reserve(&f->reduce, f->count), FC_OK);
    for (size_t i = 0; i < f->count; i++) {
        double values[NUMEL_MAX];
        int64_t count = f->params[i].layout.numel;
        for (int64_t k = 0; k < count; k++) {
            values[k] = next++;
        }
        f->reduce.params[i] = f->list[i];
        f->reduce.grads[i] = sim_tensor_new(dtypes[i], 1, &count, values);
        if (f->aligned) {
            sim_tensor_relocate(f->reduce.grads[i], (fct_device){FCT_DEVICE_CUDA, 0});
        }
        f->reduce.count++;
    }
    assert_int_equal(fc_reduce_plan_lay_out(&f->reduce, reduce, &needs_fallback, &f->err), FC_OK);
    assert_int_equal(f->reduce.rank_numel * 2, numel);
    fct_tensor *buffer = new_unwritten_tensor(f->reduce.dtype, numel);
    sim_calls_clear();
    assert_int_equal(fc_foreach_pack_gradients(&f->foreach, &f->reduce, 2, buffer, 0, sim_device()),
                     FC_OK);
    sim_tensor_expect(buffer, packed, "the reduce buffer");
    fct_tensor_release(buffer);
}

static const fct_dtype floats[PARAMS_MAX] = {FCK_FLOAT32, FCK_FLOAT32, FCK_FLOAT32, FCK_FLOAT32};

static void gradient_pack_of_one_dtype_is_one_operation_including_cast(void **state) {
    (void)state;
    fixture f;
    const double packed[12] = {1, 2, 3, 4, 7, 8, 5, 6, 0, 0, 9, 10};
    begin(&f);
    add_param(&f, 3, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    pack_gradients(&f, floats, FCK_BFLOAT16, packed, 12);
    expect_calls("fct_chunk_cat");
    end(&f);
}

static void gradient_pack_of_only_dim_1_copies_directly(void **state) {
    (void)state;
    fixture f;
    const double packed[16] = {1, 2, 5, 6, 9, 10, 13, 14, 3, 4, 7, 8, 11, 12, 15, 16};
    begin(&f);
    add_param(&f, 2, 4, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 2, 4, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    pack_gradients(&f, floats, FCT_NO_DTYPE, packed, 16);
    expect_calls("fct_tensor_copy fct_tensor_copy");
    end(&f);
}

static void gradient_pack_of_mixed_dims_transposes_dim_1_first(void **state) {
    (void)state;
    fixture f;
    const double packed[12] = {1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12};
    begin(&f);
    add_param(&f, 2, 4, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 4, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    pack_gradients(&f, floats, FCT_NO_DTYPE, packed, 12);
    expect_calls("fct_tensor_empty fct_tensor_copy fct_chunk_cat");
    end(&f);
}

static void gradient_pack_of_several_dtypes_casts_per_dtype(void **state) {
    (void)state;
    fixture f;
    const fct_dtype dtypes[PARAMS_MAX] = {FCK_BFLOAT16, FCK_FLOAT32, FCK_BFLOAT16, FCK_FLOAT64};
    const double packed[8] = {1, 3, 5, 7, 2, 4, 6, 8};
    begin(&f);
    for (int i = 0; i < 4; i++) {
        add_param(&f, 2, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    }
    pack_gradients(&f, dtypes, FCK_FLOAT32, packed, 8);
    expect_calls("fct_tensor_empty fct_foreach_copy fct_foreach_copy fct_chunk_cat");
    end(&f);
}

/* On CUDA, slots start at multiples of 16 bytes also without kernels; the gaps are zeros. */
static void gradient_pack_fills_gaps_with_zeros(void **state) {
    (void)state;
    fixture f;
    const double packed[16] = {1, 2, 0, 0, 5, 6, 0, 0, 3, 4, 0, 0, 7, 0, 0, 0};
    begin(&f);
    f.aligned = true;
    add_param(&f, 2, 2, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    add_param(&f, 3, 1, 0, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    pack_gradients(&f, floats, FCT_NO_DTYPE, packed, 16);
    expect_calls("fct_tensor_empty fct_tensor_zeros_like fct_chunk_cat");
    end(&f);
}

static void gradient_pack_of_only_dim_1_fills_gaps_with_zeros(void **state) {
    (void)state;
    fixture f;
    const double packed[8] = {1, 3, 0, 0, 2, 4, 0, 0};
    begin(&f);
    f.aligned = true;
    add_param(&f, 2, 2, 1, FCK_FLOAT32, FCT_NO_DTYPE, 0);
    pack_gradients(&f, floats, FCT_NO_DTYPE, packed, 8);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pack_of_one_dtype_is_one_operation),
        cmocka_unit_test(pack_with_casts_is_one_operation_per_dtype_pair),
        cmocka_unit_test(pack_into_byte_buffer_copies_shards_without_cast_in_one_operation),
        cmocka_unit_test(pack_without_buffer_writes_flat_tensors_directly),
        cmocka_unit_test(unpack_of_dim_0_shards_is_one_split),
        cmocka_unit_test(unpack_copies_dim_1_shards_directly_with_one_other_parameter),
        cmocka_unit_test(unpack_uses_temporary_for_dim_1_shards_with_several_parameters),
        cmocka_unit_test(unpack_splits_off_alignment_gaps),
        cmocka_unit_test(gradient_pack_of_one_dtype_is_one_operation_including_cast),
        cmocka_unit_test(gradient_pack_of_only_dim_1_copies_directly),
        cmocka_unit_test(gradient_pack_of_mixed_dims_transposes_dim_1_first),
        cmocka_unit_test(gradient_pack_fills_gaps_with_zeros),
        cmocka_unit_test(gradient_pack_of_only_dim_1_fills_gaps_with_zeros),
        cmocka_unit_test(gradient_pack_of_several_dtypes_casts_per_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
