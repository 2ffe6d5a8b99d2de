/* One parameter: its shard, its unsharded tensor and its partial gradients. */
#ifndef FSDP_C_CORE_PARAM_H
#define FSDP_C_CORE_PARAM_H

#include "../bridge/autograd.h"
#include "../bridge/tensor.h"
#include "extension.h"
#include "layout.h"
#include "status.h"

/* Sharded state of a parameter: selects which of the three parameter objects the modules hold. */
typedef enum fc_sharded_state {
    FC_SHARDED = 1,
    FC_SHARDED_POST_FORWARD = 2, /* resharded to a smaller group between forward and backward */
    FC_UNSHARDED = 3
} fc_sharded_state;

struct fc_buckets;

typedef struct fc_param {
    /* the Python object Param (fcd_param in a dry run); borrowed, outlives the struct */
    void *owner;
    /* FQN for error messages; borrowed from the owner, may be NULL */
    const char *name;
    fc_layout layout;              /* of the shard */
    fc_layout post_forward_layout; /* of the smaller group's shard; world 0: no smaller group */
    int32_t ndim;
    int64_t *local_sizes; /* [ndim] this rank's shard; owned, allocated together with strides */
    int64_t *strides;     /* [ndim] of the shard, contiguous */
    int64_t flat_numel;   /* elements of `flat`: padded shards of all ranks, larger layout */
    fct_dtype orig_dtype;
    fct_dtype param_dtype;  /* dtype of computation; FCT_NO_DTYPE: no cast */
    fct_dtype reduce_dtype; /* of accumulated gradients; FCT_NO_DTYPE: the gradient's own dtype */
    /* grad_dtype of `unsharded`, the dtype in which backwards without reduction accumulate in .grad
     * (torch 2.15). FCT_NO_DTYPE: not set; these backwards accumulate in `accumulated` if
     * reduce_dtype is set and differs from the compute dtype, else in .grad. */
    fct_dtype grad_dtype;
    /* dtype of the sharded gradient if the user has set grad_dtype of the sharded parameter (torch
     * 2.15), else unused. FCT_NO_DTYPE: that of the reduction. */
    fct_dtype sharded_grad_dtype;
    /* the user has set grad_dtype of the sharded parameter */
    bool overrides_grad_dtype;
    bool defers_cast; /* autograd leaves a gradient in its own dtype; see fc_param_begin_grad() */
    bool aliased;     /* flat shares the shard's memory: one rank, no cast, no copy, no free */
    bool extended;    /* the shard has all-gather hooks; `extension` replaces flat */
    /* requires_grad of `unsharded` and of the sharded parameter, when they were last equal */
    bool unsharded_requires_grad;
    bool offloaded; /* shard and gradient stay in host memory; no effect without streams */
    bool pinned;    /* the host memory of shard and gradient is pinned */
    /* State whose parameter object is registered on the modules; 0: unknown after a failed swap. */
    fc_sharded_state registered_state;
    /* The unsharded parameter is a DTensor; callbacks->unwrap_grad reads its gradients. */
    bool wrapped;
    uint64_t aliased_version; /* version of the shard when flat became its alias */
    /* Counted references. */
    fct_tensor *sharded_data; /* 1-D, padded_numel elements: sent in a gather */
    fct_tensor *staged;       /* device copy of an offloaded shard during the pack; else NULL */
    /* 1-D, padded_numel elements of post_forward_layout in the compute dtype, while the parameter
     * is resharded to a smaller group; else NULL. If `extended`: the rank's part of the only
     * output, in its dtype. */
    fct_tensor *post_forward_data;
    fct_tensor *flat; /* flat_numel elements in the compute dtype; storage freed while sharded */
    /* Used if `extended`, and if the fallback gathered into outputs that are not flat tensors. */
    fc_extension extension;
    /* The parameter over flat, N-D: the leaf that autograd accumulates into. */
    fct_tensor *unsharded;
    const void *leaf_before; /* address of `unsharded` at the beginning of the backward */
    /* partial gradient of backwards without reduction, in reduce_dtype; after fc_param_keep_grad()
     * in the dtype of .grad */
    fct_tensor *accumulated;
    fct_tensor *partial; /* HSDP: output that is not all-reduced yet; padded_numel elements */
    /* Notification of the gradient of `unsharded`; owned. bucket.c creates the subscription, in
     * groups with several buckets. */
    fct_grad_subscription *subscription;
    int64_t subscription_stream; /* id of the stream that was current when it was created */
    /* buckets of the group, after the buckets were cut; borrowed */
    struct fc_buckets *buckets;
    size_t bucket; /* index of the parameter's bucket */
    bool awaited;  /* no gradient so far in this backward */
} fc_param;

/* Zeroes the struct and computes the layout: dimension `dim` split over `world` ranks. Borrows
 * `owner`. Returns FC_EASSERT or FC_ENOMEM on failure. */
FC_CHECK fc_status fc_param_init(fc_param *p, void *owner, int32_t ndim, const int64_t *sizes,
                                 int32_t dim, int64_t world, int64_t rank, fc_error *err);
/* Enables resharding to a smaller group between forward and backward. `sizes` are the sizes passed
 * to fc_param_init; dim 0 is split over `world` ranks. Call it before the first unshard. */
FC_CHECK fc_status fc_param_init_post_forward(fc_param *p, const int64_t *sizes, int64_t world,
                                              int64_t rank, fc_error *err);
void fc_param_fini(fc_param *p); /* Releases everything. Safe on a zeroed struct. */

/* Each setter adds a reference to its argument and releases the previous tensor. NULL is
 * allowed. */
void fc_param_set_sharded_data(fc_param *p, fct_tensor *data);
void fc_param_set_accumulated(fc_param *p, fct_tensor *grad);
void fc_param_set_partial(fc_param *p, fct_tensor *partial);
void fc_param_set_unsharded(fc_param *p, fct_tensor *unsharded);
void fc_param_set_flat(fc_param *p, fct_tensor *flat);
/* Releases flat, outputs, inner tensors and the unsharded tensor, with its .grad: see
 * fc_param_keep_grad(). The next unshard creates them again. Precondition: the parameter is
 * sharded. */
void fc_param_release_unsharded(fc_param *p);

/* Returns the dtype of gathered data and of computation. */
fct_dtype fc_param_compute_dtype(const fc_param *p);
/* Returns the dtype of the sharded gradient. FCT_NO_DTYPE: that of the reduction. */
fct_dtype fc_param_sharded_grad_dtype(const fc_param *p);
/* Returns the number of tensors that are gathered for the parameter: 1, unless the parameter is
 * extended. */
size_t fc_param_input_count(const fc_param *p);
/* Checks input `i` of an extended parameter and writes its metadata to *facts. The input must have
 * `numel` contiguous elements of `dtype`. */
FC_CHECK fc_status fc_param_input_facts(const fc_param *p, size_t i, int64_t numel, fct_dtype dtype,
                                        fct_facts *facts, fc_error *err);
/* Returns the tensor that is gathered for a parameter that is not extended: its shard, or the
 * staged device copy. `post_forward`: the smaller group's shard, in the compute dtype. Borrowed. */
fct_tensor *fc_param_shard(const fc_param *p, bool post_forward);
/* Checks the shard and writes its metadata to *facts. The shard must have padded_numel contiguous
 * elements inside its storage, of orig_dtype (`post_forward`: of the compute dtype). */
FC_CHECK fc_status fc_param_shard_facts(const fc_param *p, bool post_forward, fct_facts *facts,
                                        fc_error *err);
/* Copies this rank's part of flat into a new post_forward_data. For an extended parameter its only
 * output is used. Returns FC_EASSERT if there are several outputs or the output cannot be split. */
FC_CHECK fc_status fc_param_keep_post_forward(fc_param *p, fct_device device, fc_error *err);
/* Releases post_forward_data. NULL is allowed. */
void fc_param_drop_post_forward(fc_param *p);
/* Writes to *can whether flat may share the shard's memory. Flat may if the parameter is not
 * extended, and the shard holds the whole parameter. The shard must have the compute dtype, on a
 * device of the type of `device`. */
FC_CHECK fc_status fc_param_can_alias(const fc_param *p, fct_device device, bool *can,
                                      fc_error *err);
/* Makes flat an alias of the shard. Must be called again after the shard was replaced.
 * Precondition: fc_param_can_alias(). */
FC_CHECK fc_status fc_param_alias_flat(fc_param *p);
/* Moves the memory of `gathered`, which holds the parts of all ranks, to flat. Creates flat if
 * necessary. Afterwards `gathered` has no memory. fc_param_return_flat() moves the memory back. */
FC_CHECK fc_status fc_param_adopt_flat(fc_param *p, fct_device device, fct_tensor *gathered,
                                       fc_error *err);
void fc_param_return_flat(fc_param *p, fct_tensor *gathered);
/* Creates flat if it is missing or an alias, and allocates its memory. A failure allocates
 * none. */
FC_CHECK fc_status fc_param_alloc_flat(fc_param *p, fct_device device, fc_error *err);
/* Allocates the outputs of an extended parameter's latest inputs and its inner tensors; see
 * fc_extension_alloc(). */
FC_CHECK fc_status fc_param_alloc_outputs(fc_param *p, int64_t world, fct_device device,
                                          fc_error *err);
/* can_free returns true if the memory can be freed. free frees the memory of flat, outputs and
 * inner tensors and keeps the tensors. If an array or another process shares the memory, free
 * releases the tensors instead. */
bool fc_param_can_free(const fc_param *p);
void fc_param_free(fc_param *p);

/* Runs at the beginning of the group's backward. With `defers_cast`, disables autograd's cast to
 * grad_dtype for gradients that are reduced at the end or added to an earlier gradient. */
FC_CHECK fc_status fc_param_begin_grad(fc_param *p, bool reduces);
/* Runs at the end of the group's backward. Restores grad_dtype, and casts a gradient that stays in
 * .grad to grad_dtype. If the cast fails, .grad is unchanged. */
FC_CHECK fc_status fc_param_end_grad(fc_param *p);
/* Adds .grad of the unsharded parameter to `accumulated`, if that exists, and clears .grad. */
FC_CHECK fc_status fc_param_accumulate_grad(fc_param *p);
/* Moves or adds .grad of the unsharded parameter to `accumulated`, before that parameter is
 * released. */
FC_CHECK fc_status fc_param_keep_grad(fc_param *p);
/* If reduce_dtype is set and differs from the compute dtype, moves .grad to `accumulated`, cast to
 * reduce_dtype. Otherwise, and always with grad_dtype, .grad stays in place. */
FC_CHECK fc_status fc_param_to_accumulated_grad(fc_param *p);
/* Takes the partial gradient: `accumulated`, or .grad of the unsharded parameter. *grad is a new
 * reference, or NULL if there is no gradient. */
void fc_param_take_grad(fc_param *p, fct_tensor **grad);
/* Drops all partial gradients. */
void fc_param_drop_grad(fc_param *p);

#endif
