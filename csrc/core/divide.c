/* Divide rule; see divide.h. Owns nothing. */
#include "divide.h"

#include <math.h>

#include "../kernels/kernels.h"

/* Returns true if the sum must be divided before and after the collectives, so that it stays in the
 * range of the dtype. As in torch, all dtypes but float32 and bfloat16 need this. */
static bool needs_two_divisions(fct_dtype dtype) {
    return dtype != FCK_FLOAT32 && dtype != FCK_BFLOAT16;
}

/* Returns the divisor of the input, about the square root of `factor`. The division before the sum
 * and the division after the sum then neither overflow nor underflow. */
static double divisor_before(double factor) {
    double before = 1.0;
    while (fmod(factor, before) == 0.0 && factor / before > before) {
        before *= 2.0;
    }
    return before;
}

fc_divide fc_divide_split(const fc_divide_rule *rule) {
    int64_t ranks = rule->world * (rule->replicas > 0 ? rule->replicas : 1);
    const double total = rule->has_factor ? rule->factor : (double)ranks;
    fc_divide divide = {.before = 1.0,
                        .after = 1.0,
                        .op = FCT_SUM,
                        .premultiply = 1.0,
                        .all_reduce_op = FCT_SUM,
                        .total = total};
    if (ranks == 1) {
        divide.after = total;
        return divide;
    }
    if (!needs_two_divisions(rule->dtype) && !rule->force_sum) {
        if (!rule->has_factor) {
            divide.op = FCT_AVG;
            divide.all_reduce_op = FCT_AVG;
        } else if (rule->world > 1 && rule->factor == (double)rule->world) {
            divide.op = FCT_AVG;
        } else if (rule->world > 1 && rule->has_premul) {
            divide.op = FCT_PREMUL_SUM;
            divide.premultiply = 1.0 / rule->factor;
        } else {
            divide.before = rule->factor;
        }
        return divide;
    }
    if (needs_two_divisions(rule->dtype)) {
        divide.before = divisor_before(total);
    }
    divide.after = total / divide.before;
    return divide;
}
