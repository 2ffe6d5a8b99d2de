/* Minimal replacements of <stdint.h>, <stddef.h>, <string.h>, <cuda_fp16.h> and <cuda_bf16.h> for
 * NVRTC, which has no headers. This file declares what lines.cuh and its includes use. */
#ifndef FSDP_C_KERNELS_RTC_CUH
#define FSDP_C_KERNELS_RTC_CUH

typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

/* The bits of a float16 or of a bfloat16. */
struct fck_half {
    unsigned short bits;
};

__device__ inline fck_half __ushort_as_half(unsigned short bits) {
    return fck_half{bits};
}

__device__ inline unsigned short __half_as_ushort(fck_half value) {
    return value.bits;
}

__device__ inline float __half2float(fck_half value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

__device__ inline fck_half __float2half_rn(float value) {
    fck_half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

/* Before sm_80 no instruction converts one float32 to bfloat16. So this function uses the integer
 * arithmetic of cast.h on every architecture, except that it returns CUDA's NaN. */
__device__ inline fck_half __float2bfloat16_rn(float value) {
    const unsigned int bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned int rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return fck_half{static_cast<unsigned short>(is_nan ? 0x7fffu : rounded)};
}

__device__ inline unsigned short __bfloat16_as_ushort(fck_half value) {
    return value.bits;
}

#endif
