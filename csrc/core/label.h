/* Labels of the collectives of a parameter group; see transport/op_tag.h.
 *
 * Precondition: the label is that of the process group that issues the next collective. */
#ifndef FSDP_C_CORE_LABEL_H
#define FSDP_C_CORE_LABEL_H

#include "../transport/transport.h"
#include "comm_ctx.h"
#include "divide.h"
#include "param.h"

/* The parameters of a reduction, and those of its group. */
typedef struct fc_label_params {
    fc_param *const *group; /* [group_count] */
    size_t group_count;
    fc_param *const *reduced; /* [reduced_count] some of `group` */
    size_t reduced_count;
} fc_label_params;

/* Sets the label of an all-gather of `rank_bytes` bytes per rank. */
void fc_label_set_gather(fct_op_label *label, const fc_comm_ctx *comm, fct_op_pass pass,
                         int64_t rank_bytes);
/* Sets the label of a reduce-scatter or an all-reduce of `rank_numel` elements per rank. */
void fc_label_set_reduction(fct_op_label *label, const fc_comm_ctx *comm, fc_label_params params,
                            int64_t rank_numel, const fc_divide *divide);

#endif
