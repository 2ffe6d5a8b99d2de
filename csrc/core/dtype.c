/* Element types by torch's ScalarType numbers; see dtype.h. Owns constant tables only. */
#include "dtype.h"

#include "../kernels/kernels.h"

static const struct {
    fct_dtype dtype;
    int32_t size;
    const char *name;
} dtypes[] = {
    {0, 1, "torch.uint8"},
    {1, 1, "torch.int8"},
    {2, 2, "torch.int16"},
    {3, 4, "torch.int32"},
    {4, 8, "torch.int64"},
    {5, 2, "torch.float16"},
    {6, 4, "torch.float32"},
    {7, 8, "torch.float64"},
    {8, 4, "torch.complex32"},
    {9, 8, "torch.complex64"},
    {10, 16, "torch.complex128"},
    {11, 1, "torch.bool"},
    {15, 2, "torch.bfloat16"},
    {23, 1, "torch.float8_e5m2"},
    {24, 1, "torch.float8_e4m3fn"},
    {25, 1, "torch.float8_e5m2fnuz"},
    {26, 1, "torch.float8_e4m3fnuz"},
    {27, 2, "torch.uint16"},
    {28, 4, "torch.uint32"},
    {29, 8, "torch.uint64"},
    {44, 1, "torch.float8_e8m0fnu"},
    {45, 1, "torch.float4_e2m1fn_x2"},
};

int32_t fc_dtype_size(fct_dtype dtype) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (dtypes[i].dtype == dtype) {
            return dtypes[i].size;
        }
    }
    return 0;
}

const char *fc_dtype_name(fct_dtype dtype) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (dtypes[i].dtype == dtype) {
            return dtypes[i].name;
        }
    }
    return "an unknown dtype";
}

static bool is_float(fct_dtype dtype) {
    return dtype == FCK_FLOAT16 || dtype == FCK_BFLOAT16 || dtype == FCK_FLOAT32 ||
           dtype == FCK_FLOAT64;
}

/* Complex dtypes and the dtypes of their parts. bfloat16 has no complex dtype of its own, so
 * complex64 is used. */
enum { COMPLEX32 = 8, COMPLEX64 = 9, COMPLEX128 = 10 };
static const struct {
    fct_dtype real;
    fct_dtype complex;
} complexes[] = {{FCK_FLOAT32, COMPLEX64},
                 {FCK_FLOAT64, COMPLEX128},
                 {FCK_FLOAT16, COMPLEX32},
                 {FCK_BFLOAT16, COMPLEX64}};

bool fc_dtype_is_complex(fct_dtype dtype) {
    return dtype == COMPLEX32 || dtype == COMPLEX64 || dtype == COMPLEX128;
}

static fct_dtype part_dtype(fct_dtype dtype) {
    for (size_t i = 0; i < sizeof complexes / sizeof complexes[0]; i++) {
        if (complexes[i].complex == dtype) {
            return complexes[i].real;
        }
    }
    return dtype;
}

fct_dtype fc_dtype_complex(fct_dtype dtype) {
    for (size_t i = 0; i < sizeof complexes / sizeof complexes[0]; i++) {
        if (complexes[i].real == dtype) {
            return complexes[i].complex;
        }
    }
    return dtype;
}

fct_dtype fc_dtype_wider(fct_dtype a, fct_dtype b) {
    if (a == b) {
        return a;
    }
    if (fc_dtype_is_complex(a) || fc_dtype_is_complex(b)) {
        fct_dtype parts = fc_dtype_wider(part_dtype(a), part_dtype(b));
        return parts == FCT_NO_DTYPE ? FCT_NO_DTYPE : fc_dtype_complex(parts);
    }
    if (!is_float(a) || !is_float(b)) {
        return FCT_NO_DTYPE;
    }
    if (fc_dtype_size(a) == fc_dtype_size(b)) {
        return FCK_FLOAT32; /* float16 and bfloat16: neither holds the other's values */
    }
    return fc_dtype_size(a) > fc_dtype_size(b) ? a : b;
}
