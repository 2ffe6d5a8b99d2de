/* A simulated model, which calls csrc/core as csrc/python does. It has a root state and a sequence
 * of layers with their parameter groups, the fc_callbacks, autograd's order of events and an
 * optimizer. It also records the expected value of every parameter and gradient (sim_account.c).
 *
 * All numbers are small multiples of powers of two, so sums and means are exact in every dtype and
 * tests compare for equality. The gradients of rank j are (j + 1) times those of rank 0. With
 * replicas the ranks are numbered shard group by shard group. */
#ifndef FSDP_C_TESTS_SIM_MODEL_H
#define FSDP_C_TESTS_SIM_MODEL_H

#include "sim.h"

#include "core/group.h"
#include "core/state.h"

enum { SIM_LAYERS_MAX = 8, SIM_LAYER_GROUPS_MAX = 2, SIM_PARAMS_MAX = 8, SIM_TAPE_MAX = 128 };

/* Kind of all-gather extension of a parameter; see sim_extension.c. */
typedef enum sim_extended {
    SIM_NOT_EXTENDED,
    SIM_EXTENDED,
    SIM_EXTENDED_TYPES, /* with inputs of two dtypes */
    SIM_EXTENDED_GROWS  /* with a third input, of another size at each gather */
} sim_extended;

/* One parameter. A dtype of 0 selects the default. */
typedef struct sim_shape {
    int32_t ndim;
    int64_t sizes[3];
    int32_t dim;       /* sharded dim */
    fct_dtype dtype;   /* of the sharded parameter; default float32 */
    fct_dtype compute; /* default: the same */
    bool frozen;
    bool unused;     /* gets no gradient */
    bool early;      /* gets a gradient only in the first backward of a step */
    bool hooked;     /* has a post-accumulate-grad hook */
    bool transposed; /* its gradient is not contiguous */
    bool tied;       /* registered in two modules */
    sim_extended extended;
} sim_shape;

typedef struct sim_scenario {
    const char *name;
    sim_config device;
    int64_t world; /* of the shard group */
    int64_t rank;
    int64_t replicas; /* HSDP: number of shard groups that all-reduce with each other; 0: no HSDP */
    int64_t replica;  /* index of this rank's shard group */
    int64_t post_forward_world; /* size of the smaller group that forward reshards to; 0: none */
    size_t layers;
    size_t layer_groups; /* default 1 */
    size_t shape_count;
    sim_shape shapes[SIM_PARAMS_MAX]; /* of every group */
    fct_dtype reduce_dtype;           /* default: the gradients' own */
    size_t forwards;                  /* before each backward; default 1 */
    size_t unsynced;                  /* backwards without reduction before the one that reduces */
    size_t unreplicated; /* backwards with reduce-scatter only before the one that all-reduces */
    size_t repeats;      /* repetitions of the above before the optimizer step; default 1 */
    size_t forward_prefetch; /* number of layers to prefetch; 0: no explicit prefetch */
    size_t backward_prefetch;
    size_t max_reductions; /* default 1 */
    double divide_factor;  /* 0: none */
    bool force_sum;
    bool no_reshard_after_forward;      /* reshard_after_forward=False, everywhere */
    bool root_no_reshard_after_forward; /* the same for the root only: the default of fully_shard */
    bool no_reshard_while_unsynced;
    bool async_unshard;
    bool reduce_unused;
    fc_overlap overlap; /* overlap of reductions with later work */
    bool own_scatter;   /* reduce-scatters use their own process group */
    bool user_reduce;   /* a user's all-reduce hook, which doubles the reduced gradients */
    bool recompute;     /* activation checkpointing of each layer */
    /* Before each backward, a backward that records a graph (create_graph) runs and gives no
     * gradients. The next backward also runs through the graph that it recorded. */
    bool two_graphs;
    bool modules_share_group; /* each group has two modules */
    /* No output has a hook: backward has nodes, but neither a beginning nor an end. */
    bool outputs_without_hooks;
    int64_t bucket_bytes; /* size of gradient buckets in bytes; 0: one reduction */
    bool last_first;      /* autograd reaches the last parameters of a group first */
    bool split_gradients; /* each parameter's gradient arrives in two parts */
    bool offload;         /* shards and gradients are in host memory: pinned, unless `unpinned` */
    bool unpinned;
    bool memory_of_groups; /* buffers come from the process groups' allocators */
    bool without_memory;   /* but the process groups have no allocator */
    bool has_agreement;    /* each backward ends with an agreement on its collectives */
    bool checksums;        /* ranks compare checksums of data */
    bool swaps_layers;     /* forward runs the second layer before the first */
    bool skips_layer;      /* forward leaves out the last layer */
} sim_scenario;

typedef struct sim_param {
    fc_param core;
    sim_shape shape;
    char name[48];
    int64_t numel;
    double *full;         /* expected values of the unsharded parameter */
    double *gradient;     /* sum of rank 0's gradients of the backwards of this step */
    size_t contributions; /* number of gradients in that sum */
    /* Sharded parameter over this rank's elements. Its .grad is the result. */
    fct_tensor *sharded;
    fct_tensor *unsharded;          /* reference that Python would own */
    fct_tensor *post_forward;       /* the same for the parameter over the smaller group's shard */
    fct_tensor *replacement;        /* shard that a user has assigned; owned, or NULL */
    fc_sharded_state registered[2]; /* second slot only if tied */
    size_t seed;                    /* selects the initial values and the gradients */
    size_t hooked_gathers;          /* gathers for which its first hook was called */
} sim_param;

typedef struct sim_group {
    fc_group core;
    char name[24];
    char pg_names[4][32]; /* of the process groups shard, scatter, replicate and post_forward */
    sim_param params[SIM_PARAMS_MAX];
    size_t count;
    size_t hook; /* latest hook that has refreshed the group; see sim_hook.c */
} sim_group;

typedef struct sim_layer {
    fc_state core;
    sim_group groups[SIM_LAYER_GROUPS_MAX];
    size_t group_count;
} sim_layer;

typedef enum sim_tape_kind { SIM_NODE, SIM_COMPUTE, SIM_OUTPUT } sim_tape_kind;

typedef struct sim_model {
    sim_scenario scenario;
    fc_comm_ctx comm;
    fc_iteration iteration;
    sim_layer layers[SIM_LAYERS_MAX + 1]; /* [0] is the root */
    size_t layer_count;
    bool ready;       /* lazy initialization is complete */
    size_t backwards; /* backwards of this step so far */
    size_t raises_in; /* computations of layers until one raises; 0: none raises */
    struct {
        sim_tape_kind kind;
        sim_layer *layer;
        sim_group *group;
    } tape[SIM_TAPE_MAX];
    size_t tape_length;
} sim_model;

/* Call it between sim_begin() and sim_end(). Its calls never fail. */
sim_model *sim_model_new(const sim_scenario *scenario);
void sim_model_free(sim_model *m);

/* Runs all forwards and backwards of one step, up to the reduced gradients. Stops at the first
 * failure. */
FC_CHECK fc_status sim_model_step(sim_model *m);
/* The parts of a step. A forward with grad records the tape; a backward runs and clears it. */
FC_CHECK fc_status sim_model_forward(sim_model *m, bool grad);
FC_CHECK fc_status sim_model_backward(sim_model *m);
/* Gradient handling of the next backwards: keep, reduce-scatter, or reduce-scatter and
 * all-reduce. */
typedef enum sim_sync { SIM_NO_SYNC, SIM_SCATTER_ONLY, SIM_SYNC } sim_sync;
void sim_model_set_sync(sim_model *m, sim_sync sync);
/* Checks the sharded gradients, updates the shards with them and drops them. */
void sim_model_optimize(sim_model *m);
void sim_model_zero_grad(sim_model *m);
/* Drops the interrupted step: the state of autograd, the expected gradients, and the number of
 * gathers that selects the sizes of SIM_EXTENDED_GROWS. */
void sim_model_discard_step(sim_model *m);
/* Records a failure if fc_group_check() fails or the registration is inconsistent. */
void sim_model_check(sim_model *m, const char *when);
/* Records a failure if a sharded parameter does not have the expected values. */
void sim_model_check_shards(sim_model *m);
/* Returns a sum over the expected values of all parameters, for the comparison of runs.
 * sim_model_check_shards() compares the sharded parameters with these values. */
double sim_model_digest(sim_model *m);

extern const fc_callbacks sim_callbacks;

/* ---- sim_hook.c: hooks ---- */

/* Runs `call` as a hook. `refresh` first calls sim_hook_refresh() for the groups that the call can
 * reach. Evaluates to the status of the call. */
#define SIM_HOOK(refresh, call) (sim_hook_begin(), (void)!(refresh), sim_hook_end(call))
void sim_hook_begin(void);
fc_status sim_hook_end(fc_status status);
fc_status sim_hook_refresh(fc_group *g); /* an fc_visit */
/* Each entry records a failure if a hook runs that has not refreshed the group. */
extern const fc_transitions sim_transitions;
/* Count calls of callbacks: sim_callback counts one. sim_callbacks_of returns how often the
 * callback `name` was called since the latest reset, or for NULL the sum of all. */
void sim_callback(const char *name);
void sim_callbacks_reset(void);
size_t sim_callbacks_of(const char *name);

/* ---- sim_account.c: expected places and values of elements ---- */

/* Elements of one rank's padded shard, with `dim` split over `world` ranks, and the number of those
 * without padding. */
int64_t sim_padded_numel(const sim_param *p, int32_t dim, int64_t world);
int64_t sim_local_numel(const sim_param *p, int32_t dim, int64_t world, int64_t rank);
/* Writes the padded shard of `rank`: its chunk of `full`, then zeros. */
void sim_shard_values(const sim_param *p, const double *full, int32_t dim, int64_t world,
                      int64_t rank, double *out);
fct_dtype sim_compute_dtype(const sim_param *p);
/* Write the rank shard that a rank sends in the all-gathers of a sim_group: of its shards, or of
 * its post-forward shards. */
void sim_write_shard(void *context, int64_t rank, void *shard, int64_t bytes);
void sim_write_forward_shard(void *context, int64_t rank, void *shard, int64_t bytes);
/* Returns the ratio of this rank's gradients to those of rank 0. */
double sim_gradient_weight(const sim_scenario *s);
/* Returns the ratio of the reduced gradient to rank 0's, summed over backwards. */
double sim_reduced_scale(const sim_scenario *s);

/* ---- sim_extension.c: parameters with all-gather extensions ---- */

fc_status sim_extend_inputs(void *param);
fc_status sim_extend_unsharded(void *param);
/* Returns the number of inputs that each rank sends (at most 3), with their dtypes and sizes.
 * `grown`: elements of the input whose size changes. */
size_t sim_describe_extension_inputs(const sim_param *p, int64_t padded, int64_t grown,
                                     fct_dtype *dtypes, int64_t *numels);
/* Creates the parameter as a contiguous tensor over flat memory. */
int sim_whole_tensor(const sim_param *p, const fct_tensor *flat, fct_tensor **out);

/* ---- sim_scenarios.c ---- */

/* Calls `visit` for every scenario on every kind of device. */
void sim_each_scenario(void (*visit)(const sim_scenario *scenario, const char *device));

#endif
