/* Helpers of the kernel tests: seeded random data, memory comparison, and reference conversions.
 * The references convert one element at a time, by a search for the nearest representable value.
 * They use none of the kernels' arithmetic. */
#ifndef FSDP_C_TESTS_KERNELS_REFERENCE_H
#define FSDP_C_TESTS_KERNELS_REFERENCE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/index.h"
#include "kernels/kernels.h"
#include "splitmix.h"

enum {
    ROUNDS = 60, /* random layouts per property and backend */
    GUARD = 64,  /* bytes around each destination that must stay unchanged */
    UNTOUCHED = 0xa5,
    FCK_BOOL = 11, /* dtypes of torch that are copied but never converted */
    FCK_COMPLEX128 = 10,
};

static const fck_dtype FLOATS[] = {FCK_FLOAT16, FCK_BFLOAT16, FCK_FLOAT32, FCK_FLOAT64};
enum { FLOAT_TYPES = 4 };

static inline const fck_backend *backend_at(size_t index) {
    return index == 0 ? fck_cpu() : fck_cuda();
}

static inline size_t backend_count(void) {
#ifdef FCK_TEST_CUDA_ON_HOST
    return 2;
#else
    return 1;
#endif
}

#define FOR_EACH_BACKEND(backend)                                                                  \
    for (size_t at_ = 0; at_ < backend_count(); at_++)                                             \
        for (const fck_backend *backend = backend_at(at_); backend; backend = NULL)

/* ---- random data ---- */

typedef struct random_state {
    uint64_t value;
} random_state;

static inline uint64_t draw(random_state *random) {
    return splitmix64(&random->value);
}

/* Uniform in [low, high]. */
static inline int64_t draw_between(random_state *random, int64_t low, int64_t high) {
    return low + (int64_t)(draw(random) % (uint64_t)(high - low + 1));
}

/* Mostly small, sometimes zero, sometimes several tiles. */
static inline int64_t draw_size(random_state *random) {
    switch (draw(random) % 8) {
    case 0:
        return 0;
    case 1:
        return draw_between(random, 1, 3 * FCK_TILE_BYTES);
    default:
        return draw_between(random, 1, 200);
    }
}

/* Number of blocks of a parameter: mostly one; small parameters sometimes have many. */
static inline int64_t draw_blocks(random_state *random, int64_t size) {
    if (draw(random) % 3 != 0) {
        return 1;
    }
    return draw_between(random, 0, size > 200 ? 3 : 40);
}

/* ---- reference conversions ---- */

static inline double value_of_small(uint16_t bits, int fraction_bits, int bias) {
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const int largest = 0x7fff >> fraction_bits;
    double magnitude;
    if (exponent == largest) {
        magnitude = fraction != 0 ? (double)NAN : (double)INFINITY;
    } else if (exponent == 0) {
        magnitude = ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        magnitude = ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    }
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

static inline double value_of_16_bits(uint16_t bits, fck_dtype dtype) {
    return dtype == FCK_FLOAT16 ? value_of_small(bits, 10, 15) : value_of_small(bits, 7, 127);
}

/* Returns the pattern nearest to `value`, the even one on a tie. Positive patterns are ordered like
 * their values, so bisect, then compare the two neighbors. A value at least half a step above the
 * largest finite one becomes infinity. */
static inline uint16_t nearest_16_bits(float value, fck_dtype dtype) {
    const uint16_t infinity = dtype == FCK_FLOAT16 ? 0x7c00 : 0x7f80;
    const double step_above = dtype == FCK_FLOAT16 ? ldexp(1, 16) : ldexp(1, 128);
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs((double)value);
    if (isinf(value)) {
        return sign | infinity;
    }
    uint16_t low = 0;
    uint16_t high = infinity;
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (value_of_16_bits(middle, dtype) <= magnitude) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const double below = magnitude - value_of_16_bits(low, dtype);
    const double above =
        (high == infinity ? step_above : value_of_16_bits(high, dtype)) - magnitude;
    const int up = above < below || (above == below && (low & 1) != 0);
    return sign | (up ? high : low);
}

static inline double load_value(const void *from, fck_dtype dtype) {
    uint16_t bits;
    float single;
    double value;
    switch (dtype) {
    case FCK_FLOAT32:
        memcpy(&single, from, sizeof single);
        return single;
    case FCK_FLOAT64:
        memcpy(&value, from, sizeof value);
        return value;
    default:
        memcpy(&bits, from, sizeof bits);
        return value_of_16_bits(bits, dtype);
    }
}

/* 16-bit dtypes are rounded through float32, as in torch. */
static inline void store_value(void *to, fck_dtype dtype, double value) {
    const float single = (float)value;
    uint16_t bits;
    switch (dtype) {
    case FCK_FLOAT32:
        memcpy(to, &single, sizeof single);
        return;
    case FCK_FLOAT64:
        memcpy(to, &value, sizeof value);
        return;
    default:
        bits = nearest_16_bits(single, dtype);
        memcpy(to, &bits, sizeof bits);
    }
}

static inline int is_float(fck_dtype dtype) {
    return dtype == FCK_FLOAT16 || dtype == FCK_BFLOAT16 || dtype == FCK_FLOAT32 ||
           dtype == FCK_FLOAT64;
}

static inline int64_t size_of(fck_dtype dtype) {
    switch (dtype) {
    case FCK_FLOAT64:
        return 8;
    case FCK_FLOAT32:
        return 4;
    case FCK_COMPLEX128:
        return 16;
    case FCK_BOOL:
    case FCK_UINT8:
        return 1;
    default:
        return 2;
    }
}

static inline void reference_copy(const unsigned char *src, fck_dtype src_dtype, unsigned char *dst,
                                  fck_dtype dst_dtype, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (src_dtype == dst_dtype) {
            memcpy(dst + i * size_of(dst_dtype), src + i * size_of(src_dtype),
                   (size_t)size_of(dst_dtype));
        } else {
            store_value(dst + i * size_of(dst_dtype), dst_dtype,
                        load_value(src + i * size_of(src_dtype), src_dtype));
        }
    }
}

/* ---- arenas: memory that is compared as a whole ---- */

static inline unsigned char *new_bytes(int64_t bytes, int fill) {
    unsigned char *memory = (unsigned char *)malloc(bytes > 0 ? (size_t)bytes : 1);
    assert_non_null(memory);
    memset(memory, fill, (size_t)bytes);
    return memory;
}

/* Creates `count` random elements of any bit pattern except NaN, whose bits are unspecified. The
 * caller frees them. */
static inline unsigned char *new_elements(random_state *random, fck_dtype dtype, int64_t count) {
    const int64_t size = size_of(dtype);
    unsigned char *memory = new_bytes(count * size, 0);
    for (int64_t i = 0; i < count; i++) {
        unsigned char *element = memory + i * size;
        do {
            for (int64_t k = 0; k < size; k++) {
                element[k] = (unsigned char)draw(random);
            }
        } while (is_float(dtype) && isnan(load_value(element, dtype)));
    }
    return memory;
}

static inline void assert_same_bytes(const unsigned char *actual, const unsigned char *expected,
                                     int64_t bytes, const fck_backend *backend, uint64_t seed) {
    for (int64_t i = 0; i < bytes; i++) {
        if (actual[i] != expected[i]) {
            fail_msg("%s, seed %llu: byte %lld of %lld is %02x and should be %02x", backend->name,
                     (unsigned long long)seed, (long long)i, (long long)bytes, actual[i],
                     expected[i]);
        }
    }
}

/* Packs `count` elements as one segment and returns the result, which the caller frees. */
static inline unsigned char *packed(const fck_backend *backend, const void *src,
                                    fck_dtype src_dtype, fck_dtype dst_dtype, int64_t count) {
    unsigned char *dst = new_bytes(count * size_of(dst_dtype), UNTOUCHED);
    const fck_segment segment = {src,       dst,      count, (int32_t)size_of(src_dtype),
                                 src_dtype, dst_dtype};
    assert_null(backend->pack(&segment, 1, NULL));
    return dst;
}

static inline void assert_converts_like_reference(const fck_backend *backend, const void *src,
                                                  fck_dtype src_dtype, fck_dtype dst_dtype,
                                                  int64_t count) {
    unsigned char *actual = packed(backend, src, src_dtype, dst_dtype, count);
    unsigned char *expected = new_bytes(count * size_of(dst_dtype), UNTOUCHED);
    reference_copy((const unsigned char *)src, src_dtype, expected, dst_dtype, count);
    assert_same_bytes(actual, expected, count * size_of(dst_dtype), backend, 0);
    free(actual);
    free(expected);
}

#endif
