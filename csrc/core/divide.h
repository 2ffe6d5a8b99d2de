/* The divide rule: how a mean over all ranks is split around the collectives that add up. Pure
 * arithmetic. */
#ifndef FSDP_C_CORE_DIVIDE_H
#define FSDP_C_CORE_DIVIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "../torch/torch_abi.h"

/* What the division depends on. */
typedef struct fc_divide_rule {
    int64_t world;    /* ranks of the reduce-scatter; 1: none */
    int64_t replicas; /* ranks of the all-reduce; 0: none */
    fct_dtype dtype;  /* that is reduced in */
    bool has_factor;  /* the user's divisor in place of the number of ranks */
    double factor;
    bool force_sum;
    /* The backend can scale inside the collective; else inputs are scaled before. */
    bool has_premul;
} fc_divide_rule;

/* A divisor of 1: none. */
typedef struct fc_divide {
    double before;
    double after;
    fct_reduce_op op;
    double premultiply; /* for FCT_PREMUL_SUM */
    fct_reduce_op all_reduce_op;
} fc_divide;

fc_divide fc_divide_split(const fc_divide_rule *rule);

#endif
