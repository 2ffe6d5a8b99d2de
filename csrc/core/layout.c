/* Shard layout along one dim; see layout.h. Owns nothing. Every product is checked for overflow,
 * because the results become offsets of raw pointers. */
#include "layout.h"

#include <assert.h>

bool fc_size_mul(int64_t a, int64_t b, int64_t *out) {
    assert(a >= 0 && b >= 0);
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

bool fc_size_add(int64_t a, int64_t b, int64_t *out) {
    assert(a >= 0 && b >= 0);
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : (value > high ? high : value);
}

/* Computes the product of sizes[from .. to). Returns false on overflow or a negative size. */
static bool product(const int64_t *sizes, int32_t from, int32_t to, int64_t *out) {
    int64_t total = 1;
    for (int32_t d = from; d < to; d++) {
        if (sizes[d] < 0 || !fc_size_mul(total, sizes[d], &total)) {
            return false;
        }
    }
    *out = total;
    return true;
}

fc_status fc_layout_init(fc_layout *layout, int32_t ndim, const int64_t *sizes, int32_t dim,
                         int64_t world, int64_t rank, fc_error *err) {
    assert(ndim < 1 || sizes != NULL);
    fc_layout result = {.world = world, .rank = rank};
    if (ndim < 1 || dim < 0 || dim >= ndim) {
        return fc_error_set(err, FC_EASSERT, "cannot shard dim %d of a tensor of %d dimensions",
                            (int)dim, (int)ndim);
    }
    if (world < 1 || rank < 0 || rank >= world) {
        return fc_error_set(err, FC_EASSERT, "rank %lld is not in [0, %lld)", (long long)rank,
                            (long long)world);
    }
    result.rows = sizes[dim];
    /* (rows + world - 1) / world is rows / world, rounded up. The padded total,
     * outer * chunk_rows * world * row_numel, bounds every later offset. */
    int64_t rounded = 0;
    bool fits = result.rows >= 0 && product(sizes, 0, dim, &result.outer) &&
                product(sizes, dim + 1, ndim, &result.row_numel) &&
                fc_size_add(result.rows, world - 1, &rounded);
    result.chunk_rows = rounded / world;
    int64_t padded_total = 0;
    fits = fits && fc_size_mul(result.chunk_rows, result.row_numel, &result.padded_numel) &&
           fc_size_mul(result.padded_numel, result.outer, &result.padded_numel) &&
           fc_size_mul(result.padded_numel, world, &padded_total);
    if (!fits) {
        return fc_error_set(err, FC_EASSERT,
                            "sizes of a tensor with %d dimensions are negative or overflow",
                            (int)ndim);
    }
    if (dim != 0 && result.rows % world != 0) {
        return fc_error_set(err, FC_EASSERT,
                            "dim %d of size %lld cannot be cut into %lld equal parts", (int)dim,
                            (long long)result.rows, (long long)world);
    }
    result.numel = result.outer * result.rows * result.row_numel;
    result.local_rows = clamp(result.rows - rank * result.chunk_rows, 0, result.chunk_rows);
    *layout = result;
    return FC_OK;
}
