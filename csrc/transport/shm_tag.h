/* Tags of messages. A tag identifies the collective of a message. */
#ifndef FSDP_C_TRANSPORT_SHM_TAG_H
#define FSDP_C_TRANSPORT_SHM_TAG_H

#include <stddef.h>
#include <stdint.h>

#include "op_tag.h"

/* Packs the operation, the dtype and the bytes of a rank shard in cache lines. The size is included
 * because collectives of different sizes may have messages of the same size. Requires dtype < 64.
 */
uint32_t shm_tag_make(fct_op_kind kind, int32_t dtype, size_t bytes);
/* Returns the operation of a tag. A tag of a peer may hold any number, which is clamped. */
fct_op_kind shm_tag_kind(uint32_t tag);
/* Writes a description of a tag to `text`. `dtype_name` accepts any number below 64. */
void shm_tag_describe(uint32_t tag, const char *(*dtype_name)(int32_t), char *text, size_t bytes);

#endif
