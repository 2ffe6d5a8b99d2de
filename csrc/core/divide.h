/* Divide rule: splits the mean over all ranks into divisions before, inside and after the
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
    bool force_sum; /* only sums in collectives: set_force_sum_reduction_for_comms */
    /* The backend can scale inside the collective (PREMUL_SUM). Otherwise inputs are divided before
     * the collective. */
    bool has_premul;
} fc_divide_rule;

/* Divisors and operations of a reduction. A divisor of 1 needs no division. */
typedef struct fc_divide {
    double before;      /* divisor of the input */
    double after;       /* divisor of the result */
    fct_reduce_op op;   /* of the reduce-scatter */
    double premultiply; /* factor of FCT_PREMUL_SUM */
    fct_reduce_op all_reduce_op;
    double total; /* divisor of the sum over all ranks, for messages */
} fc_divide;

/* Applies the rule. Never fails. */
fc_divide fc_divide_split(const fc_divide_rule *rule);

#endif
