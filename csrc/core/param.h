/* One parameter: its shard, its unsharded tensor and its partial gradient. */
#ifndef FSDP_C_CORE_PARAM_H
#define FSDP_C_CORE_PARAM_H

#include "../torch/torch_abi.h"
#include "extension.h"
#include "layout.h"
#include "status.h"

/* Which of its three faces a parameter shows to the modules. */
typedef enum fc_sharded_state {
    FC_SHARDED = 1,
    FC_SHARDED_POST_FORWARD = 2, /* resharded to a smaller group between forward and backward */
    FC_UNSHARDED = 3
} fc_sharded_state;

struct fc_buckets;

typedef struct fc_param {
    void *owner;                   /* the host's object; borrowed, outlives this struct's use */
    const char *name;              /* for messages; borrowed from the owner, may be NULL */
    fc_layout layout;              /* of the shard */
    fc_layout post_forward_layout; /* of the smaller group's shard; world 0: no such resharding */
    int32_t ndim;
    int64_t *local_sizes; /* [ndim] this rank's shard; owned, one block with strides */
    int64_t *strides;     /* [ndim] of the shard, contiguous */
    int64_t flat_numel;   /* room for either layout's padded rows of all ranks */
    fct_dtype orig_dtype;
    fct_dtype param_dtype;  /* compute type; FCT_NO_DTYPE: no cast */
    fct_dtype reduce_dtype; /* FCT_NO_DTYPE: the gradient's own */
    bool aliased;   /* flat is the shard's own memory: one rank, no cast, nothing to copy or free */
    bool extended;  /* hooks of the shard take part in its gather: `extension` stands for flat */
    bool required;  /* unsharded required grad when it was registered */
    bool offloaded; /* the shard is in the host's memory, and so are its gradients; on devices
                       without streams that is where all are */
    bool pinned;    /* and in pinned memory there */
    fc_sharded_state face; /* that the modules hold; 0: nobody knows, a swap has failed */
    bool wrapped; /* the unsharded parameter is a wrapper (DTensor): its gradients are unwrapped by
                     the host */
    /* Counted references. */
    fct_tensor *sharded_data; /* flat, padded_numel elements: what is sent */
    fct_tensor *staged;       /* a copy of it on the device, while it is packed there; else NULL */
    /* The same of post_forward_layout in the compute type, while resharded to a smaller group; else
     * NULL. */
    fct_tensor *post_forward_data;
    fct_tensor *flat; /* flat_numel elements in the compute type; storage freed while sharded */
    /* Of extended parameters; outputs also where others gathered into what is no flat tensor. */
    fc_extension extension;
    /* The parameter over flat, ND; the leaf that autograd accumulates into. */
    fct_tensor *unsharded;
    fct_tensor *accumulated; /* partial gradient in reduce_dtype, of backwards without reduction */
    fct_tensor *partial;     /* padded_numel elements in the reduce type: reduce-scattered, but not
                                all-reduced yet (HSDP) */
    /* Only in groups that are reduced in several buckets; bucket.c's. */
    fct_watch *watch;           /* of unsharded: says when its gradient is there */
    struct fc_buckets *buckets; /* who is told; borrowed */
    size_t bucket;              /* which of its buckets */
    bool awaited;               /* no gradient yet in this backward */
} fc_param;

/* Zeroes the struct and computes the layout: `dim` cut over `world` ranks. FC_EASSERT,
 * FC_ENOMEM. */
FC_CHECK fc_status fc_param_init(fc_param *p, void *owner, int32_t ndim, const int64_t *sizes,
                                 int32_t dim, int64_t world, int64_t rank, fc_error *err);
/* Between forward and backward the parameter may be resharded to a smaller group: dim 0 of the
 * `ndim` sizes given to init, over `world` ranks. Before the first unshard. */
FC_CHECK fc_status fc_param_init_post_forward(fc_param *p, const int64_t *sizes, int64_t world,
                                              int64_t rank, fc_error *err);
void fc_param_fini(fc_param *p); /* releases everything; safe on a zeroed struct */

/* Each takes a new reference to its argument and drops the old one. NULL is fine. */
void fc_param_set_sharded_data(fc_param *p, fct_tensor *data);
void fc_param_set_accumulated(fc_param *p, fct_tensor *grad);
void fc_param_set_partial(fc_param *p, fct_tensor *row);
void fc_param_set_unsharded(fc_param *p, fct_tensor *unsharded);
void fc_param_set_flat(fc_param *p, fct_tensor *flat);
/* Drops outputs and unsharded; the next unshard makes them anew. Only while sharded. */
void fc_param_forget_unsharded(fc_param *p);

/* The type that is gathered and computed in. */
fct_dtype fc_param_compute_dtype(const fc_param *p);
/* How many tensors are gathered of the parameter; one, unless it is extended. */
size_t fc_param_input_count(const fc_param *p);
/* Checks input `i` of an extended parameter and reads its facts: `numel` contiguous elements. */
FC_CHECK fc_status fc_param_input_facts(const fc_param *p, size_t i, int64_t numel, fct_dtype dtype,
                                        fct_facts *facts, fc_error *err);
/* What is gathered of any other: its shard, or the copy of it on the device. `post_forward`:
 * the smaller group's shard, in the compute type. Borrowed. */
fct_tensor *fc_param_shard(const fc_param *p, bool post_forward);
/* Checks the shard and reads its facts: padded_numel contiguous elements of orig_dtype (of the
 * compute type) inside their storage. */
FC_CHECK fc_status fc_param_shard_facts(const fc_param *p, bool post_forward, fct_facts *facts,
                                        fc_error *err);
/* Copies this rank's part of flat (of an extended parameter's only output) into a new
 * post_forward_data. FC_EASSERT where there are several, or it cannot be cut. */
FC_CHECK fc_status fc_param_keep_post_forward(fc_param *p, fct_device device, fc_error *err);
void fc_param_drop_post_forward(fc_param *p);
/* Whether flat may be the shard's own memory: that has all of the parameter in the compute type on
 * `device`. */
FC_CHECK fc_status fc_param_can_alias(const fc_param *p, fct_device device, bool *can,
                                      fc_error *err);
/* Makes flat an alias of the shard, for which fc_param_can_alias() said yes; anew where the shard
 * was replaced. */
FC_CHECK fc_status fc_param_alias_flat(fc_param *p);
/* Gives flat, which is made where there is none, the memory of `landing`, which then has none: an
 * equal tensor that the rows of all ranks came into. fc_param_return_flat() gives it back. */
FC_CHECK fc_status fc_param_adopt_flat(fc_param *p, fct_device device, fct_tensor *landing,
                                       fc_error *err);
void fc_param_return_flat(fc_param *p, fct_tensor *landing);
/* Makes flat where there is none (or an alias), and gives it memory. On failure it holds none. */
FC_CHECK fc_status fc_param_alloc_flat(fc_param *p, fct_device device, fct_facts *facts,
                                       fc_error *err);
/* Memory for the outputs of an extended parameter's latest inputs, and for its inner tensors, see
 * fc_extension_alloc(). */
FC_CHECK fc_status fc_param_alloc_outputs(fc_param *p, int64_t world, fct_device device,
                                          fc_error *err);
/* Frees all that and keeps the tensors. Where it cannot, since others share the memory, they keep
 * that and the tensors are forgotten. */
bool fc_param_can_free(const fc_param *p);
void fc_param_free(fc_param *p);

/* Folds .grad of the unsharded parameter into `accumulated` where there is one already. */
FC_CHECK fc_status fc_param_fold_grad(fc_param *p);
/* Moves .grad to `accumulated` in reduce_dtype, where that is set and differs. */
FC_CHECK fc_status fc_param_stash_grad(fc_param *p);
/* Takes the partial gradient out: `accumulated`, else .grad of the unsharded parameter. *grad new,
 * or NULL: none. */
void fc_param_take_grad(fc_param *p, fct_tensor **grad);
/* Forgets every partial gradient. */
void fc_param_drop_grad(fc_param *p);

#endif
