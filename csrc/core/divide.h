/* Divide rule: how the mean over all ranks is split between scaling before, inside and after the
 * collectives. Pure arithmetic; the results equal those of torch's FSDP2. */
#ifndef FSDP_C_CORE_DIVIDE_H
#define FSDP_C_CORE_DIVIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "../bridge/collective.h"

/* Inputs of the rule. */
typedef struct fc_divide_rule {
    int64_t world;    /* ranks of the reduce-scatter; 1: no reduce-scatter */
    int64_t replicas; /* ranks of the all-reduce; 0: no all-reduce */
    fct_dtype dtype;  /* dtype of the reduction */
    bool has_factor;  /* `factor` replaces the number of ranks as the divisor */
    double factor;
    bool force_sum;
    /* The backend can scale inside the collective (PREMUL_SUM). Otherwise inputs are scaled
     * first. */
    bool has_premul;
} fc_divide_rule;

/* Result. A divisor of 1 means that no division is needed. */
typedef struct fc_divide {
    double before;
    double after;
    fct_reduce_op op;
    double premultiply; /* for FCT_PREMUL_SUM */
    fct_reduce_op all_reduce_op;
} fc_divide;

fc_divide fc_divide_split(const fc_divide_rule *rule);

#endif
