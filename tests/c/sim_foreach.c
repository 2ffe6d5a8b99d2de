/* torch's multi-tensor operations, executed part by part, with checks of their arguments. */
#include "sim_internal.h"

typedef struct shape {
    int64_t rows;
    int64_t columns;
    fct_dtype dtype;
} shape;

/* Returns the shape of a tensor. Records a failure if it is not 2-D with consecutive rows. */
static shape shape_of(const fct_tensor *t, const char *what) {
    const sim_view view = sim_view_of(t, what);
    if (view.ndim != 2 || (view.sizes[0] > 1 && view.strides[0] != view.sizes[1]) ||
        view.strides[1] != 1) {
        sim_fail("%s of a tensor that is not 2-D with consecutive rows", what);
    }
    return (shape){view.sizes[0], view.sizes[1], view.dtype};
}

/* Queues a copy of `rows` rows of `columns` elements from `from` to `to`. `from` NULL: writes
 * zeros. */
static void queue_assign(fct_tensor *to, int64_t to_offset, int64_t to_pitch,
                         const fct_tensor *from, int64_t from_offset, int64_t from_pitch,
                         int64_t rows, int64_t columns, const char *what) {
    const int64_t sizes[2] = {rows, columns};
    const int64_t to_strides[2] = {to_pitch, 1};
    const int64_t from_strides[2] = {from_pitch, 1};
    if (rows * columns == 0) {
        return;
    }
    fct_tensor *target = sim_tensor_slice(to, 2, sizes, to_strides, to_offset);
    fct_tensor *source =
        from != NULL ? sim_tensor_slice(from, 2, sizes, from_strides, from_offset) : NULL;
    sim_queue_elementwise(target, source, 0.0, what);
    fct_tensor_release(target);
    fct_tensor_release(source);
}

/* Queues dst[i] = factor * dst[i] + src[i] for all i. */
static void queue_list(fct_tensor *const *dst, fct_tensor *const *src, size_t count, double factor,
                       const char *what) {
    for (size_t i = 0; i < count; i++) {
        if (sim_view_of(dst[i], what).dtype != sim_view_of(dst[0], what).dtype ||
            sim_view_of(src[i], what).dtype != sim_view_of(src[0], what).dtype) {
            sim_fail("%s of several dtypes is not one launch", what);
        }
        sim_queue_elementwise(dst[i], src[i], factor, what);
    }
}

int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_foreach_copy")) {
        return -1;
    }
    queue_list(dst, src, count, 0.0, "_foreach_copy_");
    return 0;
}

int fct_foreach_add(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_foreach_add")) {
        return -1;
    }
    queue_list(dst, src, count, 1.0, "_foreach_add_");
    return 0;
}

int fct_split_copy(const fct_tensor *src, const int64_t *sizes, fct_tensor *const *out,
                   size_t count) {
    static const char what[] = "split_with_sizes_copy";
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_split_copy")) {
        return -1;
    }
    const shape input = shape_of(src, what);
    int64_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const shape part = shape_of(out[i], what);
        if (part.rows != input.rows || part.columns != sizes[i] || part.dtype != input.dtype) {
            sim_fail("%s into another shape or dtype", what);
            return 0;
        }
        queue_assign(out[i], 0, part.columns, src, offset, input.columns, input.rows, part.columns,
                     what);
        offset += sizes[i];
    }
    if (offset != input.columns) {
        sim_fail("%s of %lld of %lld columns", what, (long long)offset, (long long)input.columns);
    }
    return 0;
}

int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks, fct_tensor *out) {
    static const char what[] = "_chunk_cat";
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_chunk_cat")) {
        return -1;
    }
    const shape output = shape_of(out, what);
    int64_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const shape t = shape_of(tensors[i], what);
        if (t.rows * t.columns == 0 || t.dtype != shape_of(tensors[0], what).dtype) {
            sim_fail("%s of an empty tensor, or of several dtypes", what);
            return 0;
        }
        int64_t chunk_rows = (t.rows + chunks - 1) / chunks;
        for (int64_t c = 0; c < chunks; c++) {
            int64_t rows_left = t.rows - c * chunk_rows;
            int64_t rows = rows_left < 0 ? 0 : rows_left < chunk_rows ? rows_left : chunk_rows;
            int64_t at = c * output.columns + offset;
            queue_assign(out, at, t.columns, tensors[i], c * chunk_rows * t.columns, t.columns,
                         rows, t.columns, what);
            queue_assign(out, at + rows * t.columns, t.columns, NULL, 0, 0, chunk_rows - rows,
                         t.columns, what);
        }
        offset += chunk_rows * t.columns;
    }
    if (offset != output.columns || chunks != output.rows) {
        sim_fail("%s into %lld x %lld of %lld x %lld elements", what, (long long)chunks,
                 (long long)offset, (long long)output.rows, (long long)output.columns);
    }
    return 0;
}
