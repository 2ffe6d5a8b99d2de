/* Allocators of the buffers of collectives. allocator.cpp lists them. The memory that an allocator
 * returns has the stream semantics of torch's caching allocator. Split plans (core/plan.h) use no
 * allocator. */
#ifndef FSDP_C_BRIDGE_ALLOCATOR_H
#define FSDP_C_BRIDGE_ALLOCATOR_H

#include "group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_allocator fct_allocator; /* one owner; fct_py_allocator makes it */

void fct_allocator_free(fct_allocator *allocator); /* NULL is allowed */
/* Writes to *serves whether the allocator has memory for the device. If not, the caller uses
 * fct_tensor_empty. */
FCT_CHECK int fct_allocator_serves(fct_allocator *allocator, fct_device device, bool *serves);
/* A new 1-D tensor of `numel` uninitialized elements, on the device's current stream. Not an
 * inference tensor, even in inference mode. `pg` is the process group whose collective uses the
 * tensor; NULL: none. All ranks of `pg` make the same calls in the same order, because an allocator
 * may exchange addresses over `pg`. */
FCT_CHECK int fct_allocator_empty(fct_allocator *allocator, fct_pg *pg, int64_t numel,
                                  fct_dtype dtype, fct_device device, fct_tensor **out);

#ifdef __cplusplus
}
#endif

#endif
