/* Conversion loops of the CPU kernels: a portable set, an AVX2 + F16C set, and the selection
 * between them. kernels_cpu.c and ring_cpu.c include this file. So do the C tests, which compare
 * the two sets.
 *
 * Each set converts float16, float64 and bfloat16 to and from float32. The remaining pairs go
 * through float32 in blocks (kernels_cpu.c). The AVX2 loops are compiled for AVX2 and F16C,
 * independent of the build flags. Therefore only fck_loops_best() may return these loops, after a
 * check of the processor. Every loop accepts any address, because a storage offset need not be a
 * multiple of the element size. */
#ifndef FSDP_C_KERNELS_CAST_CPU_H
#define FSDP_C_KERNELS_CAST_CPU_H

#include <stdint.h>
#include <string.h>

#include "cast.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FCK_HAVE_AVX2_LOOPS 1
#include <immintrin.h>
#endif

typedef void (*fck_loop)(const void *src, void *dst, int64_t count);

/* Castable types other than float32, as indices of the loops that convert to and from float32. */
typedef enum fck_loop_type {
    FCK_LOOP_HALF,
    FCK_LOOP_DOUBLE,
    FCK_LOOP_BFLOAT16,
    FCK_LOOP_TYPES,
} fck_loop_type;

typedef struct fck_loops {
    fck_loop to_float[FCK_LOOP_TYPES];
    fck_loop from_float[FCK_LOOP_TYPES];
} fck_loops;

/* Defines `name`, which converts `count` elements one at a time with `convert`. */
#define FCK_SCALAR_LOOP(name, source_type, target_type, convert)                                   \
    static inline void name(const void *src, void *dst, int64_t count) {                           \
        const unsigned char *from = (const unsigned char *)src;                                    \
        unsigned char *to = (unsigned char *)dst;                                                  \
        for (int64_t i = 0; i < count; i++) {                                                      \
            source_type value;                                                                     \
            memcpy(&value, from + i * (int64_t)sizeof value, sizeof value);                        \
            const target_type result = convert(value);                                             \
            memcpy(to + i * (int64_t)sizeof result, &result, sizeof result);                       \
        }                                                                                          \
    }

FCK_SCALAR_LOOP(scalar_float_of_half, uint16_t, float, fck_float_of_half)
FCK_SCALAR_LOOP(scalar_float_of_double, double, float, (float))
FCK_SCALAR_LOOP(scalar_float_of_bfloat16, uint16_t, float, fck_float_of_bfloat16)
FCK_SCALAR_LOOP(scalar_half_of_float, float, uint16_t, fck_half_of_float)
FCK_SCALAR_LOOP(scalar_double_of_float, float, double, (double))
FCK_SCALAR_LOOP(scalar_bfloat16_of_float, float, uint16_t, fck_bfloat16_of_float)

static const fck_loops fck_loops_portable = {
    {scalar_float_of_half, scalar_float_of_double, scalar_float_of_bfloat16},
    {scalar_half_of_float, scalar_double_of_float, scalar_bfloat16_of_float},
};

#ifdef FCK_HAVE_AVX2_LOOPS

#define FCK_AVX2 __attribute__((target("avx2,f16c")))

/* Defines `name`, which converts `step` elements at a time with `convert(from, to)` and the
 * remaining elements with `tail`. */
#define FCK_AVX2_LOOP(name, source_size, target_size, step, convert, tail)                         \
    FCK_AVX2 static void name(const void *src, void *dst, int64_t count) {                         \
        const unsigned char *from = (const unsigned char *)src;                                    \
        unsigned char *to = (unsigned char *)dst;                                                  \
        int64_t i = 0;                                                                             \
        for (; i + (step) <= count; i += (step)) {                                                 \
            convert(from + i * (source_size), to + i * (target_size));                             \
        }                                                                                          \
        tail(from + i * (source_size), to + i * (target_size), count - i);                         \
    }

FCK_AVX2 static inline __m256i avx2_load(const void *from) {
    return _mm256_loadu_si256((const __m256i *)from);
}

FCK_AVX2 static inline __m128i avx2_load_half_width(const void *from) {
    return _mm_loadu_si128((const __m128i *)from);
}

FCK_AVX2 static inline void avx2_store(void *to, __m256i value) {
    _mm256_storeu_si256((__m256i *)to, value);
}

FCK_AVX2 static inline void avx2_store_half_width(void *to, __m128i value) {
    _mm_storeu_si128((__m128i *)to, value);
}

/* Rounds eight floats to bfloat16. Each result is in the low half of its 32-bit element; the upper
 * half is zero. A NaN rounds to an arbitrary value, which the mask overwrites with 0xffff. */
FCK_AVX2 static inline __m256i avx2_round_bfloat16(const unsigned char *from) {
    const __m256i bits = avx2_load(from);
    const __m256 value = _mm256_castsi256_ps(bits);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_or_si256(rounded, _mm256_srli_epi32(is_nan, 16));
}

FCK_AVX2 static inline void avx2_bfloat16_of_float_16(const unsigned char *from,
                                                      unsigned char *to) {
    /* The pack instruction works within 128-bit halves. The permutation restores the order. */
    const __m256i packed =
        _mm256_packus_epi32(avx2_round_bfloat16(from), avx2_round_bfloat16(from + 32));
    avx2_store(to, _mm256_permute4x64_epi64(packed, 0xd8));
}

FCK_AVX2 static inline void avx2_float_of_bfloat16_8(const unsigned char *from, unsigned char *to) {
    avx2_store(to, _mm256_slli_epi32(_mm256_cvtepu16_epi32(avx2_load_half_width(from)), 16));
}

FCK_AVX2 static inline void avx2_half_of_float_8(const unsigned char *from, unsigned char *to) {
    const __m256 value = _mm256_castsi256_ps(avx2_load(from));
    avx2_store_half_width(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

FCK_AVX2 static inline void avx2_float_of_half_8(const unsigned char *from, unsigned char *to) {
    avx2_store(to, _mm256_castps_si256(_mm256_cvtph_ps(avx2_load_half_width(from))));
}

FCK_AVX2 static inline void avx2_float_of_double_4(const unsigned char *from, unsigned char *to) {
    const __m256d value = _mm256_castsi256_pd(avx2_load(from));
    avx2_store_half_width(to, _mm_castps_si128(_mm256_cvtpd_ps(value)));
}

FCK_AVX2 static inline void avx2_double_of_float_4(const unsigned char *from, unsigned char *to) {
    const __m128 value = _mm_castsi128_ps(avx2_load_half_width(from));
    avx2_store(to, _mm256_castpd_si256(_mm256_cvtps_pd(value)));
}

FCK_AVX2_LOOP(avx2_float_of_half, 2, 4, 8, avx2_float_of_half_8, scalar_float_of_half)
FCK_AVX2_LOOP(avx2_float_of_double, 8, 4, 4, avx2_float_of_double_4, scalar_float_of_double)
FCK_AVX2_LOOP(avx2_float_of_bfloat16, 2, 4, 8, avx2_float_of_bfloat16_8, scalar_float_of_bfloat16)
FCK_AVX2_LOOP(avx2_half_of_float, 4, 2, 8, avx2_half_of_float_8, scalar_half_of_float)
FCK_AVX2_LOOP(avx2_double_of_float, 4, 8, 4, avx2_double_of_float_4, scalar_double_of_float)
FCK_AVX2_LOOP(avx2_bfloat16_of_float, 4, 2, 16, avx2_bfloat16_of_float_16, scalar_bfloat16_of_float)

static const fck_loops fck_loops_avx2 = {
    {avx2_float_of_half, avx2_float_of_double, avx2_float_of_bfloat16},
    {avx2_half_of_float, avx2_double_of_float, avx2_bfloat16_of_float},
};

#endif /* FCK_HAVE_AVX2_LOOPS */

/* Returns the fastest loops that this processor supports. The check takes a few loads, so callers
 * repeat it and cache nothing. */
static inline const fck_loops *fck_loops_best(void) {
#ifdef FCK_HAVE_AVX2_LOOPS
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        return &fck_loops_avx2;
    }
#endif
    return &fck_loops_portable;
}

#endif
