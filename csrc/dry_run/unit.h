/* A unit of a dry run and its parameters: the structs of the core, and the tensors that csrc/python
 * would keep for them. */
#ifndef FSDP_C_DRY_RUN_UNIT_H
#define FSDP_C_DRY_RUN_UNIT_H

#include "../core/group.h"
#include "description.h"

/* A parameter. core.owner points to this struct. */
typedef struct fcd_param {
    fc_param core;
    const fcd_param_description *description;
    fct_tensor *unsharded; /* counted references, or NULL */
    fct_tensor *post_forward;
    fct_tensor *grad; /* .grad of the sharded parameter */
    bool requires_grad;
} fcd_param;

enum { FCD_NAME_MAX = 40 };

typedef struct fcd_unit {
    fc_group core;
    char name[FCD_NAME_MAX];       /* "#N", which fcd_enter_range() reads */
    char shard_name[FCD_NAME_MAX]; /* names of the unit's process groups, for fct_pg_resolve() */
    char replicate_name[FCD_NAME_MAX];
    char post_forward_name[FCD_NAME_MAX];
    fcd_param *params; /* [count] owned */
    size_t count;      /* number of initialized parameters */
} fcd_unit;

#endif
