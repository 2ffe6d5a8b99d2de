/* The tag of a collective, which identifies the operation that a rank issues. */
#ifndef FSDP_C_TRANSPORT_OP_TAG_H
#define FSDP_C_TRANSPORT_OP_TAG_H

#include <stddef.h>
#include <stdint.h>

#include "../bridge/collective.h"

typedef enum fct_op_pass { FCT_PASS_FORWARD = 0, FCT_PASS_BACKWARD, FCT_PASS_OTHER } fct_op_pass;

/* Returns the name of an fct_op_pass for messages. */
static inline const char *fct_pass_name(uint32_t pass) {
    static const char *const names[] = {"forward", "backward", "outside of a pass"};
    return names[pass <= FCT_PASS_OTHER ? pass : FCT_PASS_OTHER];
}

enum { FCT_LABEL_NAME_BYTES = 48 };

/* The value of `unit` in a label of a unit that is gathered before the first forward of its root.
 * It has no name yet. */
enum { FCT_LABEL_NO_ROOT = 1 };

/* The part of a tag that ranks compare: `unit`, `params` and `contents`. The other fields are for
 * messages. Step and pass may differ: a rank may call unshard() where another rank runs forward. */
typedef struct fct_op_label {
    uint64_t unit;      /* hash of plan, root number, unit's name; 0: unknown, no mismatch */
    uint64_t params;    /* bit i: the gradient of the unit's parameter i is included; 64 bits */
    uint64_t contents;  /* hash of sizes and, for reductions, of factors and of all parameters */
    uint64_t size;      /* of a rank: bytes of an all-gather, elements of a reduction */
    double divisor;     /* of the sum of gradients; 0: no reduction */
    uint32_t step;      /* iterations so far (fc_comm_ctx.step) */
    uint16_t pass;      /* fct_op_pass */
    uint16_t reduce_op; /* fct_reduce_op of a reduction */
    char name[FCT_LABEL_NAME_BYTES]; /* end of the unit's name; terminated */
} fct_op_label;

/* Identifies a collective of one process group. The same collective has the same tag on all
 * ranks. */
typedef struct fct_op_tag {
    fct_op_kind kind;
    const char *group; /* FQNs of the modules, "" for the root; valid during the call */
    fct_op_label label;
} fct_op_tag;

#endif
