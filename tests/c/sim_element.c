/* Elements of simulated tensors: sizes, and conversion to and from double. */
#include "sim_internal.h"

#include <string.h>

#include "kernels/cast.h"

/* ScalarType numbers of torch without a name in kernels.h. */
enum { INT64 = 4, COMPLEX32 = 8, COMPLEX128 = 10 };

/* Returns the dtype of the two parts of a complex dtype; other dtypes unchanged. The simulation
 * computes with imaginary parts of zero. */
static fct_dtype part_of(fct_dtype dtype) {
    static const fct_dtype parts[] = {FCK_FLOAT16, FCK_FLOAT32, FCK_FLOAT64};
    return dtype >= COMPLEX32 && dtype <= COMPLEX128 ? parts[dtype - COMPLEX32] : dtype;
}

int64_t sim_itemsize(fct_dtype dtype) {
    if (part_of(dtype) != dtype) {
        return 2 * sim_itemsize(part_of(dtype));
    }
    switch (dtype) {
    case FCK_UINT8:
        return 1;
    case FCK_FLOAT16:
    case FCK_BFLOAT16:
        return 2;
    case FCK_FLOAT32:
        return 4;
    case FCK_FLOAT64:
    case INT64:
        return 8;
    default:
        fail_msg("the simulation does not support dtype %d", (int)dtype);
        return 0;
    }
}

double sim_get(fct_dtype dtype, const void *address) {
    uint16_t bits = 0;
    float single = 0;
    double value = 0;
    int64_t integer = 0;
    dtype = part_of(dtype);
    switch (dtype) {
    case FCK_UINT8:
        return *(const uint8_t *)address;
    case FCK_FLOAT16:
    case FCK_BFLOAT16:
        memcpy(&bits, address, sizeof bits);
        return (double)(dtype == FCK_FLOAT16 ? fck_float_of_half(bits)
                                             : fck_float_of_bfloat16(bits));
    case FCK_FLOAT32:
        memcpy(&single, address, sizeof single);
        return (double)single;
    case INT64:
        memcpy(&integer, address, sizeof integer);
        return (double)integer;
    default:
        memcpy(&value, address, sizeof value);
        return value;
    }
}

void sim_put(fct_dtype dtype, void *address, double value) {
    float single = (float)value;
    uint16_t bits = 0;
    int64_t integer = 0;
    if (part_of(dtype) != dtype) {
        sim_put(part_of(dtype), (char *)address + sim_itemsize(dtype) / 2, 0.0);
        dtype = part_of(dtype);
    }
    switch (dtype) {
    case FCK_UINT8:
        *(uint8_t *)address = (uint8_t)value;
        return;
    case FCK_FLOAT16:
    case FCK_BFLOAT16:
        bits = dtype == FCK_FLOAT16 ? fck_half_of_float(single) : fck_bfloat16_of_float(single);
        memcpy(address, &bits, sizeof bits);
        return;
    case FCK_FLOAT32:
        memcpy(address, &single, sizeof single);
        return;
    case INT64:
        integer = (int64_t)value;
        memcpy(address, &integer, sizeof integer);
        return;
    default:
        memcpy(address, &value, sizeof value);
        return;
    }
}

bool fct_dtype_is_floating(fct_dtype dtype) {
    return dtype != FCK_UINT8 && dtype != INT64;
}

double sim_round(fct_dtype dtype, double value) {
    char bytes[16];
    sim_put(dtype, bytes, value);
    return sim_get(dtype, bytes);
}
