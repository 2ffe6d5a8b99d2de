/* The tag of a collective, which identifies the operation that a rank issues. */
#ifndef FSDP_C_TRANSPORT_OP_TAG_H
#define FSDP_C_TRANSPORT_OP_TAG_H

#include <stdint.h>

#include "../bridge/collective.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Identifies a collective of one process group. The same collective has the same tag on all ranks.
 * Transports do not compare tags yet. */
typedef struct fct_op_tag {
    fct_op_kind kind;
    const char *group; /* FQNs of the modules, "" for the root; valid during the call */
    uint64_t sequence; /* number of the caller's earlier collectives over this process group */
} fct_op_tag;

#ifdef __cplusplus
}
#endif

#endif
