/* What the core knows of torch's element types. */
#ifndef FSDP_C_CORE_DTYPE_H
#define FSDP_C_CORE_DTYPE_H

#include "../torch/torch_abi.h"

/* Bytes per element of torch's dtype `dtype`; 0 for one that is not known here. */
int32_t fc_dtype_size(fct_dtype dtype);
/* torch's name of a dtype, "torch.float32". */
const char *fc_dtype_name(fct_dtype dtype);
bool fc_dtype_is_complex(fct_dtype dtype);
/* The complex type with parts of a floating type, or wider ones where there is none; other types
 * themselves. */
fct_dtype fc_dtype_complex(fct_dtype dtype);
/* The type that holds the values of both; FCT_NO_DTYPE where there is none. */
fct_dtype fc_dtype_wider(fct_dtype a, fct_dtype b);

#endif
