/* Description of the model of a dry run. A unit is a parameter group of the core (fc_group). A
 * state is one fully_shard call (fc_state) and has any number of units. A root is a state whose
 * forward is outermost. */
#ifndef FSDP_C_DRY_RUN_DESCRIPTION_H
#define FSDP_C_DRY_RUN_DESCRIPTION_H

#include "../bridge/types.h"
#include "../core/status.h"

enum { FCD_DIMS_MAX = 64 }; /* largest number of dims of a parameter */

typedef struct fcd_param_description {
    const char *name; /* borrowed */
    int32_t ndim;
    const int64_t *sizes; /* [ndim] of the unsharded parameter; borrowed */
    int32_t dim;          /* the dim that is sharded */
    fct_dtype dtype;      /* dtype of the shard */
    fct_dtype compute;
    fct_dtype reduce; /* dtype of reductions and of accumulated gradients */
    bool requires_grad;
} fcd_param_description;

typedef struct fcd_unit_description {
    int32_t state;
    int64_t world;              /* ranks that the unit is sharded over */
    int64_t replicas;           /* ranks of the all-reduce (HSDP); 1: none */
    int64_t post_forward_world; /* ranks of the smaller group of reshard_after_forward=n; 0: none */
    /* dtype of the unit's reductions; FCT_NO_DTYPE: that of the gradients */
    fct_dtype reduce;
    int64_t bucket_bytes;      /* fc_buckets.limit; 0: one bucket */
    int64_t max_input_buffers; /* the root's comm context takes the largest value of its units */
    bool reshard_after_forward;
    bool reshard_after_backward;
    bool unshard_in_backward;
    bool reduce_grads;
    bool all_reduce_grads;
    bool overlap; /* reductions overlap with backward, except CPU-bound reductions */
    bool offload; /* shards and gradients are in host memory */
    bool pinned;
    const fcd_param_description *params; /* [count] borrowed */
    size_t count;
} fcd_unit_description;

typedef struct fcd_state_description {
    int32_t root;                    /* index of the root state; a root has its own index */
    int32_t modules;                 /* number of modules of the fully_shard call */
    const int32_t *forward_prefetch; /* [forward_count] indices of states; borrowed */
    size_t forward_count;
    const int32_t *backward_prefetch;
    size_t backward_count;
} fcd_state_description;

typedef struct fcd_description {
    bool streams;                        /* false: the CPU, which has no streams */
    const fcd_state_description *states; /* in named_modules() pre-order; borrowed */
    size_t state_count;
    const fcd_unit_description *units; /* borrowed */
    size_t unit_count;
} fcd_description;

/* Returns FC_EVALUE with a message that names the item if an index, a size or a number of ranks is
 * out of range. */
FC_CHECK fc_status fcd_description_check(const fcd_description *description, fc_error *error);

#endif
