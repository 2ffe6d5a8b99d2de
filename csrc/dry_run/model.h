/* The model of a dry run: states, units and parameters on the core, and the calls that their hooks
 * and autograd make. It needs the record of this thread (record.h).
 *
 * A unit is a parameter group of the core. A state is one fully_shard call; it has the units whose
 * `state` is its index. A root is a state whose forward is outermost. */
#ifndef FSDP_C_DRY_RUN_MODEL_H
#define FSDP_C_DRY_RUN_MODEL_H

#include "../core/state.h"
#include "fake.h"

typedef struct fcd_param_description {
    const char *name; /* borrowed */
    int32_t ndim;
    const int64_t *sizes; /* [ndim] of the whole parameter; borrowed */
    int32_t dim;          /* sharded dim */
    fct_dtype dtype;      /* of the shard */
    fct_dtype compute;
    fct_dtype reduce; /* of reductions and of accumulated gradients */
    bool trained;
} fcd_param_description;

typedef struct fcd_unit_description {
    int32_t state;
    int64_t world;              /* ranks that the unit is sharded over */
    int64_t replicas;           /* ranks that all-reduce; 1: no replicas */
    int64_t post_forward_world; /* size of the smaller group after forward; 0: none */
    fct_dtype reduce;           /* of the group's reductions; FCT_NO_DTYPE: the gradients' own */
    int64_t bucket_bytes;
    bool reshard_after_forward;
    bool reshard_after_backward;
    bool unshard_in_backward;
    bool reduce_grads;
    bool all_reduce_grads;
    bool overlap; /* reductions overlap with backward, where the device can do it */
    bool offload; /* shards and gradients are in host memory */
    bool pinned;
    const fcd_param_description *params; /* [count] borrowed */
    size_t count;
} fcd_unit_description;

typedef struct fcd_state_description {
    int32_t root;                    /* index of the state that is its root; a root's own index */
    int32_t modules;                 /* modules of the fully_shard call */
    const int32_t *forward_prefetch; /* [forward_count] indices of states; borrowed */
    size_t forward_count;
    const int32_t *backward_prefetch;
    size_t backward_count;
} fcd_state_description;

typedef struct fcd_description {
    bool streams;                        /* the device has streams; false: the CPU */
    const fcd_state_description *states; /* in named_modules() pre-order; borrowed */
    size_t state_count;
    const fcd_unit_description *units; /* borrowed */
    size_t unit_count;
} fcd_description;

/* X(enumerator, name, number of arguments). The arguments of the calls:
 *   pre_forward, post_forward, pre_backward, post_backward    state
 *   backward      backward begins
 *   end           backward ends; the callbacks for the end of backward run
 *   alloc         storage of the model, bytes
 *   free          storage of the model; no effect if it became a gradient
 *   gradient      unit, parameter of the unit, storage of the model (-1: none), bytes: autograd
 *                 accumulates a gradient in that storage, which then has `bytes` bytes and is not
 *                 the model's own any more
 *   zero_grad     the sharded parameters lose their gradients */
#define FCD_CALLS(X)                                                                               \
    X(FCD_CALL_PRE_FORWARD, "pre_forward", 1)                                                      \
    X(FCD_CALL_POST_FORWARD, "post_forward", 1)                                                    \
    X(FCD_CALL_BACKWARD, "backward", 0)                                                            \
    X(FCD_CALL_PRE_BACKWARD, "pre_backward", 1)                                                    \
    X(FCD_CALL_POST_BACKWARD, "post_backward", 1)                                                  \
    X(FCD_CALL_END, "end", 0)                                                                      \
    X(FCD_CALL_ALLOC, "alloc", 2)                                                                  \
    X(FCD_CALL_FREE, "free", 1)                                                                    \
    X(FCD_CALL_GRADIENT, "gradient", 4)                                                            \
    X(FCD_CALL_ZERO_GRAD, "zero_grad", 0)

typedef enum fcd_call_kind {
#define FCD_CALL_ENUM(name, text, arguments) name,
    FCD_CALLS(FCD_CALL_ENUM)
#undef FCD_CALL_ENUM
        FCD_CALL_COUNT
} fcd_call_kind;

enum { FCD_ARGUMENTS_MAX = 4 };

typedef struct fcd_call {
    fcd_call_kind kind;
    int64_t arguments[FCD_ARGUMENTS_MAX];
} fcd_call;

/* A parameter. The owner of core.owner is this struct. */
typedef struct fcd_param {
    fc_param core;
    const fcd_param_description *description;
    fct_tensor *unsharded; /* counted references, or NULL */
    fct_tensor *post_forward;
    fct_tensor *grad; /* of the sharded parameter */
    bool requires_grad;
} fcd_param;

enum { FCD_NAME_MAX = 40, FCD_DIMS_MAX = 64 };

typedef struct fcd_unit {
    fc_group core;
    char name[FCD_NAME_MAX];       /* "#N", which fcd_enter_range() reads */
    char shard_name[FCD_NAME_MAX]; /* names of its process groups, for fct_pg_resolve() */
    char replicate_name[FCD_NAME_MAX];
    char post_forward_name[FCD_NAME_MAX];
    fcd_param *params; /* [count] owned */
    size_t count;      /* of initialized parameters */
} fcd_unit;

typedef struct fcd_root {
    fc_iteration iteration;
    fc_comm_ctx comm;
    size_t end_references; /* references of autograd to the callback for the end of backward */
} fcd_root;

typedef struct fcd_model {
    const fcd_description *description;
    fcd_unit *units;   /* [unit_count] owned */
    fc_state *states;  /* [state_count] owned */
    fcd_root *roots;   /* [state_count] owned; entries of other states than roots are not used */
    size_t unit_count; /* of initialized units */
    bool prepared;     /* roots and states are initialized */
    fcd_storage **storages; /* [storage_count] of the model's own tensors; NULL: not allocated */
    size_t storage_count;
    fc_error error;
} fcd_model;

extern const char *const fcd_call_names[FCD_CALL_COUNT];
extern const int fcd_call_arguments[FCD_CALL_COUNT];

/* Sets the model up: shards are allocated, in the purpose FCD_SHARDS. Borrows the description,
 * which must be consistent (fcd_description_check). `storages`: the model's own storages have
 * numbers below it. On failure m->error has a message; free the model in any case. */
FC_CHECK fc_status fcd_model_init(fcd_model *m, const fcd_description *description,
                                  size_t storages);
/* Releases everything. Safe on a zeroed struct. */
void fcd_model_fini(fcd_model *m);
/* Returns FC_EVALUE with a message that names the item if an index, a size or a number of ranks of
 * the description is out of range. */
FC_CHECK fc_status fcd_description_check(const fcd_description *description, fc_error *error);

/* Runs one call. Returns FC_EVALUE if an argument is out of range or the call is not possible now.
 * After a failure m->error has a message, and only fcd_model_fini() may follow. */
FC_CHECK fc_status fcd_model_call(fcd_model *m, const fcd_call *call);

extern const fc_callbacks fcd_callbacks;

#endif
