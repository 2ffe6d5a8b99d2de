/* Norms and scaling for gradient clipping. torch's own operators cost a microsecond each for
 * dispatch, which for small gradients is most of the clipping.
 *
 * The order of each sum is that of torch's x86 builds (2.13): eight partial sums, element i into
 * sum i % 8; then the eight in turn; then the elements left over, of which up to three at the end
 * are added without rounding the square. So a norm is torch's bit for bit there, and as good as
 * torch's elsewhere. tests/unit/test_clip.py compares.
 *
 * One such sum waits for each of its additions to finish. Two arrays are therefore summed side by
 * side; when one ends, the next takes its place. */
#include "norm.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { LANES = 8, HALF = 4 };

/* The compiler splits the vector where the machine's are shorter; the arithmetic is the same. */
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

/* An array that is being summed: `blocks` blocks of LANES elements from `at` on are left. */
typedef struct lane_sums {
    const fck_floats *array;
    float *norm;
    const float *at;
    int64_t blocks;
    lanes sums;
} lane_sums;

/* By address: a vector as argument or result would depend on the instruction set. */
static inline void add_squares(lanes *sums, const float *values) {
    lanes v;
    memcpy(&v, values, sizeof v);
    *sums += v * v;
}

static void begin(lane_sums *s, const fck_floats *array, float *norm) {
    const lanes zeros = {0};
    s->array = array;
    s->norm = norm;
    s->at = array->values;
    s->blocks = array->count / LANES;
    s->sums = zeros;
}

static void finish(const lane_sums *s) {
    float sum = s->sums[0];
    for (int lane = 1; lane < LANES; lane++) {
        sum += s->sums[lane];
    }
    const float *rest = s->array->values + s->array->count - s->array->count % LANES;
    const int64_t left = s->array->count % LANES;
    for (int64_t i = 0; i < left; i++) {
        const float square = rest[i] * rest[i];
        sum = i < left - left % HALF ? sum + square : fmaf(rest[i], rest[i], sum);
    }
    *s->norm = sqrtf(sum);
}

static void sum_two(lane_sums *a, lane_sums *b) {
    const int64_t blocks = a->blocks < b->blocks ? a->blocks : b->blocks;
    const float *p = a->at, *q = b->at;
    lanes p_sums = a->sums, q_sums = b->sums;
    for (int64_t i = 0; i < blocks; i++, p += LANES, q += LANES) {
        add_squares(&p_sums, p);
        add_squares(&q_sums, q);
    }
    a->sums = p_sums;
    b->sums = q_sums;
    a->at = p;
    b->at = q;
    a->blocks -= blocks;
    b->blocks -= blocks;
}

void fck_norms(const fck_floats *arrays, size_t count, float *norms) {
    lane_sums pair[2];
    bool active[2] = {false, false};
    size_t next = 0;
    for (;;) {
        for (int i = 0; i < 2; i++) {
            while (!active[i] && next < count) {
                begin(&pair[i], &arrays[next], &norms[next]);
                next++;
                active[i] = pair[i].blocks > 0;
                if (!active[i]) {
                    finish(&pair[i]);
                }
            }
        }
        if (!active[0] || !active[1]) {
            break;
        }
        sum_two(&pair[0], &pair[1]);
        for (int i = 0; i < 2; i++) {
            if (pair[i].blocks == 0) {
                finish(&pair[i]);
                active[i] = false;
            }
        }
    }
    lane_sums *last = active[0] ? &pair[0] : active[1] ? &pair[1] : NULL;
    if (last != NULL) {
        for (; last->blocks > 0; last->blocks--, last->at += LANES) {
            add_squares(&last->sums, last->at);
        }
        finish(last);
    }
}

void fck_scale(const fck_floats *array, float factor) {
    float *values = array->values;
    const int64_t whole = array->count - array->count % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes v;
        memcpy(&v, values + i, sizeof v);
        v *= factor;
        memcpy(values + i, &v, sizeof v);
    }
    for (int64_t i = whole; i < array->count; i++) {
        values[i] *= factor;
    }
}
