/* One reduction in flight, from its collectives to the sharded gradients. The comm context holds
 * the list, oldest first. Each reduction owns its buffers and its work until it is recycled or
 * abandoned.
 *
 * Preconditions: the group of the reduction has a comm context. A reduction that is passed to
 * append or abandon is in no list. finish runs once per reduction. */
#ifndef FSDP_C_CORE_REDUCTION_H
#define FSDP_C_CORE_REDUCTION_H

#include "group_base.h"
#include "label.h"

/* Created on the heap for each reduction. The output has one part per parameter, in the order of
 * `params`. */
typedef struct fc_reduction {
    /* borrowed; its owner calls fc_reduction_discard before it frees the group */
    fc_group_base *base;
    fc_param **params;       /* [total] in the order of the output; allocated behind the struct */
    fct_tensor **sums;       /* [total] views that fc_reduction_merge_partials adds to */
    fct_tensor **addends;    /* [total] views that it adds; both are empty outside of it */
    size_t count;            /* parameters with a gradient */
    int64_t align;           /* alignment of the output's parts, in elements; see fc_reduce_plan */
    size_t total;            /* count, plus the parameters that only have a partial output */
    fct_tensor *input;       /* packed gradients of all ranks; NULL: no packed chunk */
    fct_stream input_stream; /* allocates and packs `input`; set on devices with streams */
    fct_tensor *output;      /* this rank's shard of the reduced gradients */
    fct_work *work;          /* collective in flight; NULL: none */
    bool all_reducing;       /* `work` is the all-reduce */
    /* End of the input's last use, on the reduce stream; on the all-reduce stream if the input of
     * one rank is the output. */
    fct_event *input_done;
    double divide_after;
    bool has_hook; /* callbacks->reduce_hook must be called */
    /* all_reduce_stream runs the work after the reduce-scatter and the merge of partial outputs */
    bool on_other_stream;
    /* no all-reduce in this backward: parameters keep their parts in fc_param.partial */
    bool keep_partial;
    bool copies_to_host; /* copies of gradients to host memory are queued */
    bool finished;       /* parameters have their gradients or parts; only buffers are left */
    struct fc_reduction *next;
} fc_reduction;

/* Allocates an empty reduction for up to `total` parameters. Stores the current stream: the
 * caller allocates the input on it. Returns NULL if malloc fails. */
fc_reduction *fc_reduction_new(fc_group_base *base, size_t total);
/* Returns the elements of the whole output, of all `total` parameters and the gaps between them. */
int64_t fc_reduction_output_numel(const fc_reduction *r);
/* Writes the label of the collective over the first `count` parameters to *label. */
void fc_reduction_set_label(const fc_reduction *r, size_t count, const fc_divide *divide,
                            fct_op_label *label);
/* Waits for the collective in flight. With streams, only orders the current stream after the
 * collective. */
FC_CHECK fc_status fc_reduction_wait(fc_reduction *r);
/* Returns true if the partial outputs of all parameters are a buffer that was an earlier output,
 * with the layout of this output. Only with streams. */
bool fc_reduction_has_partial_output(const fc_reduction *r);
/* Sets the output of a group of one rank: the input. If fc_reduction_has_partial_output, that
 * buffer is the output, and the input is added to it. The gradients then have memory of the reduce
 * stream. */
FC_CHECK fc_status fc_reduction_use_input(fc_reduction *r);
/* Adds the partial outputs of earlier backwards to the output and clears the partial outputs. With
 * keep_partial, adds the output's parts to the partial outputs instead. All additions are one
 * operation. */
FC_CHECK fc_status fc_reduction_merge_partials(fc_reduction *r);
/* Waits for the collective, scales, casts and passes each parameter its gradient. With streams,
 * r->output stays set if another stream uses the output, or if casts of it may be queued. The views
 * do not keep its memory: a view that is added to an existing .grad is released at once. */
FC_CHECK fc_status fc_reduction_finish(fc_reduction *r);
/* Returns true if user code must run on the result before backward continues. A hook may issue
 * collectives, so the hook must run at the same point on all ranks. A poll completes at different
 * points on different ranks. */
bool fc_reduction_must_finish_now(const fc_reduction *r);
/* Takes `r`. Defers the release of memory that the backend may still use. Releases all other
 * memory, ordered after the streams that used that memory. */
void fc_reduction_abandon(fc_reduction *r);

/* Takes `r` and appends it as the newest reduction in flight. */
void fc_reduction_append(fc_reduction *r);
/* Finishes the oldest reductions until at most `keep` are in flight, and releases their inputs. */
FC_CHECK fc_status fc_reduction_recycle(fc_comm_ctx *c, size_t keep);
/* Records that the current stream has waited for the end of all reductions in flight. Inputs
 * that were allocated on that stream can then be freed without another wait. */
void fc_reduction_mark_settled(fc_comm_ctx *c);
/* Without streams: finishes the oldest reductions whose collectives are complete, to free their
 * buffers early. */
FC_CHECK fc_status fc_reduction_poll(fc_comm_ctx *c);
/* Returns true if a reduction of the group `base` is in flight. */
bool fc_reduction_has(const fc_comm_ctx *c, const fc_group_base *base);
/* Discards the reductions of the group `base` (NULL: of all groups) without a wait. Their gradients
 * are lost. */
void fc_reduction_discard(fc_comm_ctx *c, const fc_group_base *base);
/* Checks the invariants of the list between transitions. Returns FC_ESTATE with a message if one is
 * violated. */
FC_CHECK fc_status fc_reduction_check(fc_comm_ctx *c);

#endif
