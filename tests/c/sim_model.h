/* A model under the core, as csrc/python would drive it: a root state and a row of layers below it,
 * each with its parameter groups, the host's call-backs, autograd's order of events, an optimizer,
 * and an account of what every parameter and gradient has to be.
 *
 * All numbers are small multiples of powers of two, so that sums and means are exact in every
 * type and the tests can ask for equality. The gradients of the j-th of all ranks are (j + 1)
 * times those of rank 0; with replicas the ranks are numbered shard group by shard group. */
#ifndef FSDP_C_TESTS_SIM_MODEL_H
#define FSDP_C_TESTS_SIM_MODEL_H

#include "sim.h"

#include "core/group.h"
#include "core/state.h"

enum { SIM_LAYERS_MAX = 8, SIM_LAYER_GROUPS_MAX = 2, SIM_PARAMS_MAX = 8, SIM_TAPE_MAX = 128 };

/* Whose shard has hooks that take part in the gather; see sim_extension.c. */
typedef enum sim_extended {
    SIM_NOT_EXTENDED,
    SIM_EXTENDED,
    SIM_EXTENDED_TYPES, /* with inputs of two types */
    SIM_EXTENDED_GROWS  /* and one more whose size is another at each gather */
} sim_extended;

/* One parameter. A type of 0 stands for the default. */
typedef struct sim_shape {
    int32_t ndim;
    int64_t sizes[3];
    int32_t dim;       /* that is cut */
    fct_dtype dtype;   /* of the sharded parameter; default float32 */
    fct_dtype compute; /* default: the same */
    bool frozen;
    bool unused;     /* gets no gradient */
    bool early;      /* gets one in the first backward of a step only */
    bool hooked;     /* has a post-accumulate-grad hook */
    bool transposed; /* its gradient is not contiguous */
    bool tied;       /* registered in two places */
    sim_extended extended;
} sim_shape;

typedef struct sim_scenario {
    const char *name;
    sim_config device;
    int64_t world; /* of the shard group */
    int64_t rank;
    int64_t replicas; /* HSDP: shard groups that all-reduce among each other; 0: no such mesh */
    int64_t replica;  /* which of them this rank is in */
    int64_t post_forward_world; /* resharding to a smaller group after forward; 0: none */
    size_t layers;
    size_t layer_groups; /* default 1 */
    size_t shape_count;
    sim_shape shapes[SIM_PARAMS_MAX]; /* of every group */
    fct_dtype reduce_dtype;           /* default: the gradients' own */
    size_t forwards;                  /* before each backward; default 1 */
    size_t unsynced;                  /* backwards that do not reduce before the one that does */
    size_t unreplicated; /* backwards that reduce-scatter only before the one that all-reduces */
    size_t repeats;      /* how often all this happens before the optimizer's step; default 1 */
    size_t forward_prefetch; /* how many layers ahead; 0: no list */
    size_t backward_prefetch;
    size_t max_reductions; /* default 1 */
    double divide_factor;  /* 0: none */
    bool force_sum;
    bool stay_after_forward; /* reshard_after_forward=False, everywhere */
    bool root_stays;         /* the same for the root alone: the default of fully_shard */
    bool stay_while_unsynced;
    bool async_unshard;
    bool reduce_unused;
    fc_overlap overlap; /* of reductions with what comes after them */
    bool own_scatter;   /* reduce-scatters have a process group of their own */
    bool user_reduce;   /* a user's all-reduce hook: doubles the row */
    bool recompute;     /* activation checkpointing around each layer */
    /* Before each backward, one that records and gives no gradients: the next goes through what
     * it recorded, too. */
    bool doubled;
    bool modules_share_group; /* module_count > 1 */
    /* Outputs hook nothing: backward has nodes, but neither a beginning nor an end. */
    bool unhooked;
    int64_t bucket_bytes; /* gradients are reduced in buckets of this size; 0: all at once */
    bool last_first;      /* autograd reaches the last parameters of a group first */
    bool twice;           /* each parameter's gradient comes in two parts */
    bool offload;         /* shards and gradients are in the host's memory: pinned, if not */
    bool unpinned;
    bool memory_of_groups; /* buffers are from the process groups */
    bool without_memory;   /* which turn out to have none */
} sim_scenario;

typedef struct sim_param {
    fc_param core;
    sim_shape shape;
    char name[48];
    int64_t numel;
    double *full;         /* the whole parameter's values */
    double *gradient;     /* what this step's backwards gave on rank 0, summed */
    size_t contributions; /* how many there were */
    /* The sharded parameter over this rank's elements; its .grad is the result. */
    fct_tensor *sharded;
    fct_tensor *unsharded;    /* the host's reference */
    fct_tensor *post_forward; /* likewise: the parameter as the smaller group's shard */
    fct_tensor *replacement;  /* what a user has put in the place of the shard; owned, or NULL */
    fc_sharded_state registered[2]; /* second slot only where tied */
    size_t seed;
    size_t hooked_gathers; /* for which its first hook was called */
} sim_param;

typedef struct sim_group {
    fc_group core;
    char name[24];
    char pg_names[4][32]; /* of the links shard, scatter, replicate, post_forward */
    sim_param params[SIM_PARAMS_MAX];
    size_t count;
} sim_group;

typedef struct sim_layer {
    fc_state core;
    sim_group groups[SIM_LAYER_GROUPS_MAX];
    size_t group_count;
} sim_layer;

typedef enum sim_tape_kind { SIM_NODE, SIM_COMPUTE, SIM_OUTPUT } sim_tape_kind;

typedef struct sim_model {
    sim_scenario scenario;
    fc_comm comm;
    fc_iteration iteration;
    sim_layer layers[SIM_LAYERS_MAX + 1]; /* [0] is the root */
    size_t layer_count;
    bool ready;       /* lazy initialisation is done */
    size_t backwards; /* of this step, so far */
    size_t hook_owners;
    struct {
        sim_tape_kind kind;
        sim_layer *layer;
        sim_group *group;
    } tape[SIM_TAPE_MAX];
    size_t tape_length;
} sim_model;

/* Between sim_begin() and sim_end(). Nothing of it is made to fail. */
sim_model *sim_model_new(const sim_scenario *scenario);
void sim_model_free(sim_model *m);

/* Everything up to the reduced gradients: forwards and backwards of one step. On failure it
 * stops where it is. */
FC_CHECK fc_status sim_model_step(sim_model *m);
/* The parts of a step. A forward with grad writes the tape, a backward runs and empties it. */
FC_CHECK fc_status sim_model_forward(sim_model *m, bool grad);
FC_CHECK fc_status sim_model_backward(sim_model *m);
/* What the next backwards do with their gradients: keep them, reduce-scatter them, all-reduce
 * them as well. */
typedef enum sim_sync { SIM_NO_SYNC, SIM_SCATTER_ONLY, SIM_SYNC } sim_sync;
void sim_model_set_sync(sim_model *m, sim_sync sync);
/* Checks the sharded gradients, takes a step with them and forgets them. */
void sim_model_optimize(sim_model *m);
void sim_model_zero_grad(sim_model *m);
/* Forgets the interrupted step: what autograd holds, and the account. */
void sim_model_forget_step(sim_model *m);
/* Notes a failure wherever fc_group_check() or the registration does not hold. */
void sim_model_check(sim_model *m, const char *when);
/* Notes a failure where a sharded parameter's values are not the account's. */
void sim_model_check_shards(sim_model *m);
/* Sum over everything that training changed, to compare runs by. */
double sim_model_digest(sim_model *m);

extern const fc_host sim_host;

/* ---- sim_account.c: where elements are and what they have to be ---- */

/* Elements of one rank's padded shard where `dim` is cut over `world` ranks, and how many of
 * them are no padding. */
int64_t sim_padded_numel(const sim_param *p, int32_t dim, int64_t world);
int64_t sim_local_numel(const sim_param *p, int32_t dim, int64_t world, int64_t rank);
/* What `rank` stores of `whole`: its chunk, then zeros. */
void sim_shard_values(const sim_param *p, const double *whole, int32_t dim, int64_t world,
                      int64_t rank, double *out);
fct_dtype sim_compute_dtype(const sim_param *p);
/* Rows that a rank sends in the all-gathers of a sim_group: of its shards, of its forward
 * shards. */
void sim_write_row(void *context, int64_t rank, void *row, int64_t bytes);
void sim_write_forward_row(void *context, int64_t rank, void *row, int64_t bytes);
/* This rank's gradients are so many times those of rank 0. */
double sim_gradient_weight(const sim_scenario *s);
/* What the reduced gradient is of rank 0's, summed over backwards. */
double sim_reduced_scale(const sim_scenario *s);

/* ---- sim_extension.c: parameters whose shards have hooks ---- */

fc_status sim_extend_inputs(void *param);
fc_status sim_extend_unsharded(void *param);
/* Types and sizes of what each rank sends; `grown`: elements of the one whose size changes. Returns
 * how many there are, at most 3. */
size_t sim_extended_inputs(const sim_param *p, int64_t padded, int64_t grown, fct_dtype *dtypes,
                           int64_t *numels);
/* The parameter as a contiguous tensor over flat memory; new. */
int sim_whole_tensor(const sim_param *p, const fct_tensor *flat, fct_tensor **out);

/* ---- sim_scenarios.c ---- */

/* Calls visit for every scenario on every kind of device that it is for. */
void sim_each_scenario(void (*visit)(const sim_scenario *scenario, const char *device));

#endif
