/* Scalar conversions between float and the two 16-bit types, on bit patterns. The vector loops
 * (cast_cpu.h) must give the same results bit for bit. These functions also convert the elements
 * that remain after a vector loop, and all elements on processors without AVX2 and F16C. On a GPU
 * these functions call CUDA's conversion functions, with NVRTC those of rtc.cuh.
 *
 * Rounding is to nearest even. Subnormal values are rounded with integer arithmetic, so the result
 * does not depend on the thread's flush-to-zero setting. Conversions between 16-bit types and
 * float64 go through float, as in torch: float64 -> bfloat16 therefore rounds twice, exactly like
 * torch.
 *
 * NaN stays NaN, with an unspecified payload: torch's own payload depends on vector width and
 * position. On the CPU float16 keeps sign and upper payload, as F16C does, and bfloat16 becomes
 * 0xffff, as in torch's vectorized float32 -> bfloat16 copy. On a GPU a NaN is the one that CUDA's
 * functions return. */
#ifndef FSDP_C_KERNELS_CAST_H
#define FSDP_C_KERNELS_CAST_H

#include <stdint.h>
#include <string.h>

#include "index.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

FCK_FN uint32_t fck_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FCK_FN float fck_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

FCK_FN float fck_float_of_bfloat16(uint16_t bits) {
    return fck_float_of_bits((uint32_t)bits << 16);
}

FCK_FN uint16_t fck_bfloat16_of_float(float value) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t bits = fck_bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0xffffu;
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

FCK_FN float fck_float_of_half(uint16_t bits) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(bits));
#else
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0x1fu) {
        const uint32_t quiet = fraction != 0 ? 0x400000u : 0u;
        return fck_float_of_bits(sign | 0x7f800000u | quiet | fraction << 13);
    }
    if (exponent == 0) {
        /* Zero or subnormal: fraction * 2^-24, exact and normal in float. */
        const float magnitude = (float)fraction * (1.0f / 16777216.0f);
        return fck_float_of_bits(sign | fck_bits_of_float(magnitude));
    }
    return fck_float_of_bits(sign | (exponent + 112u) << 23 | fraction << 13);
#endif
}

FCK_FN uint16_t fck_half_of_float(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    const uint32_t bits = fck_bits_of_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u; /* 65520 and above round to infinity */
    } else if (magnitude >= 0x38800000u) {
        /* Normal: rebias the exponent (127 - 15), round away the 13 low bits to nearest even. */
        const uint32_t rebiased = magnitude - 0x38000000u;
        half = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
    } else if (magnitude <= 0x33000000u) {
        half = 0; /* up to half of the smallest subnormal; the tie goes to even, which is zero */
    } else {
        /* Subnormal: the significand in units of 2^-24, rounded to nearest even. The exponent
         * field is 102..112 here, so the shift is 14..24. */
        const uint32_t shift = 126u - (magnitude >> 23);
        const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t quotient = significand >> shift;
        const uint32_t remainder = significand & ((1u << shift) - 1u);
        const uint32_t half_unit = 1u << (shift - 1u);
        half =
            quotient + (remainder > half_unit || (remainder == half_unit && (quotient & 1u) != 0));
    }
    return (uint16_t)(sign | half);
#endif
}

#endif
