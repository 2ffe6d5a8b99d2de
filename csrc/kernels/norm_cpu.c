/* Norms and scaling for gradient clipping. Dispatching an operator of torch takes about a
 * microsecond. For small gradients that is most of the time of clipping.
 *
 * The order of each sum is that of torch's x86 builds (2.13). There are eight partial sums; element
 * i is added to sum i % 8. The eight sums are then added in order, and after them the remaining
 * elements, the last `count % 4` of them with fused multiply-add. On x86 a norm therefore equals
 * torch's bit for bit. On other processors a norm is as accurate as torch's.
 * tests/unit/test_clip.py compares the norms with torch's.
 *
 * Each addition of a sum depends on the previous addition. Therefore four arrays are summed at a
 * time. When the sum of an array ends, the next array takes its place. */
#include "norm.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { LANES = 8, HALF = 4, CONCURRENT_ARRAYS = 4 };

/* Half of the eight partial sums. A vector of this size fits in one register of every supported
 * processor. A wider vector would go through memory, which triples the time of a sum. */
typedef float float4 __attribute__((vector_size(HALF * sizeof(float))));

typedef struct lanes {
    float4 low, high;
} lanes;

/* State of the sum of one array. `blocks` blocks of LANES elements, beginning at `at`, are not
 * summed yet. */
typedef struct lane_sums {
    const fck_floats *array;
    float *norm;
    const float *at;
    int64_t blocks;
    lanes sums;
} lane_sums;

/* The arguments are pointers, because the calling convention for vectors depends on the instruction
 * set. */
static inline void add_squares(lanes *sums, const float *values) {
    float4 low, high;
    memcpy(&low, values, sizeof low);
    memcpy(&high, values + HALF, sizeof high);
    sums->low += low * low;
    sums->high += high * high;
}

static void begin(lane_sums *s, const fck_floats *array, float *norm) {
    const lanes zeros = {{0}, {0}};
    s->array = array;
    s->norm = norm;
    s->at = array->values;
    s->blocks = array->count / LANES;
    s->sums = zeros;
}

static void finish(const lane_sums *s) {
    float sum = s->sums.low[0];
    for (int lane = 1; lane < HALF; lane++) {
        sum += s->sums.low[lane];
    }
    for (int lane = 0; lane < HALF; lane++) {
        sum += s->sums.high[lane];
    }
    const float *tail = s->array->values + s->array->count - s->array->count % LANES;
    const int64_t remaining = s->array->count % LANES;
    for (int64_t i = 0; i < remaining; i++) {
        const float square = tail[i] * tail[i];
        sum = i < remaining - remaining % HALF ? sum + square : fmaf(tail[i], tail[i], sum);
    }
    /* torch returns the absolute value of one element, whose square may overflow or underflow. */
    *s->norm = s->array->count == 1 ? fabsf(s->array->values[0]) : sqrtf(sum);
}

static void advance(lane_sums *s, int64_t blocks, const lanes *sums) {
    s->at += blocks * LANES;
    s->blocks -= blocks;
    s->sums = *sums;
}

/* Sums until the shortest of the four arrays ends. */
static void sum_four(lane_sums *four) {
    int64_t blocks = four[0].blocks;
    for (int i = 1; i < CONCURRENT_ARRAYS; i++) {
        blocks = four[i].blocks < blocks ? four[i].blocks : blocks;
    }
    lanes a = four[0].sums, b = four[1].sums, c = four[2].sums, d = four[3].sums;
    for (int64_t i = 0; i < blocks * LANES; i += LANES) {
        add_squares(&a, four[0].at + i);
        add_squares(&b, four[1].at + i);
        add_squares(&c, four[2].at + i);
        add_squares(&d, four[3].at + i);
    }
    advance(&four[0], blocks, &a);
    advance(&four[1], blocks, &b);
    advance(&four[2], blocks, &c);
    advance(&four[3], blocks, &d);
}

static void sum_one(lane_sums *s) {
    lanes sums = s->sums;
    for (int64_t i = 0; i < s->blocks * LANES; i += LANES) {
        add_squares(&sums, s->at + i);
    }
    advance(s, s->blocks, &sums);
    finish(s);
}

void fck_norms(const fck_floats *arrays, size_t count, float *norms) {
    assert(count == 0 || (arrays != NULL && norms != NULL));
    lane_sums active[CONCURRENT_ARRAYS];
    int n = 0;
    for (size_t next = 0; next < count; next++) {
        begin(&active[n], &arrays[next], &norms[next]);
        if (++n < CONCURRENT_ARRAYS) {
            continue;
        }
        sum_four(active);
        n = 0;
        for (int i = 0; i < CONCURRENT_ARRAYS; i++) {
            if (active[i].blocks > 0) {
                active[n++] = active[i];
            } else {
                finish(&active[i]);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        sum_one(&active[i]);
    }
}

void fck_scale(const fck_floats *array, float factor) {
    assert(array->count == 0 || array->values != NULL);
    float *values = array->values;
    const int64_t whole = array->count - array->count % HALF;
    for (int64_t i = 0; i < whole; i += HALF) {
        float4 v;
        memcpy(&v, values + i, sizeof v);
        v *= factor;
        memcpy(values + i, &v, sizeof v);
    }
    for (int64_t i = whole; i < array->count; i++) {
        values[i] *= factor;
    }
}
