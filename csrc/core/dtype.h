/* Element types by torch's ScalarType numbers: size, name, promotion. Pure functions, no state. */
#ifndef FSDP_C_CORE_DTYPE_H
#define FSDP_C_CORE_DTYPE_H

#include "../bridge/types.h"

/* Returns the bytes per element of `dtype`, or 0 if the core does not support the dtype. */
int32_t fc_dtype_size(fct_dtype dtype);
/* Returns torch's name of the dtype, such as "torch.float32", or "an unknown dtype". The string is
 * static. */
const char *fc_dtype_name(fct_dtype dtype);
bool fc_dtype_is_complex(fct_dtype dtype);
/* Returns the complex dtype whose parts hold every value of float16, bfloat16, float32 or float64.
 * Other dtypes are returned unchanged. */
fct_dtype fc_dtype_complex(fct_dtype dtype);
/* Returns the narrowest floating or complex dtype that holds all values of both dtypes. Equal
 * dtypes are returned unchanged. Other pairs: FCT_NO_DTYPE unless both are float16, bfloat16,
 * float32, float64 or complex. */
fct_dtype fc_dtype_wider(fct_dtype a, fct_dtype b);

#endif
