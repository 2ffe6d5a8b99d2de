/* Transfer plans: the memory layout of a group's transfers. A gather plan is built again only after
 * a shard or dtype was replaced, or if an extension has other inputs. A reduce plan is laid out in
 * each backward and holds that backward's gradients. A transfer changes a plan only by set_split,
 * which assigns the slots to chunks.
 *
 * A gather plan arranges the data that one rank sends: the inputs of the group's parameters, in
 * order. A parameter without extension has one input, its padded shard. An extended parameter
 * (extension.h) has the inputs that its hook returned, which may differ at each gather. The inputs
 * of one rank in this order are its rank shard. If all inputs have one dtype, the buffer has that
 * dtype. Otherwise the buffer's dtype is uint8 (bytes).
 *
 * Memory is a list of chunks. Each chunk is one tensor that holds a part of every rank shard, in
 * rank order; a slot gives the chunk and the offset of an input. A packed plan has one chunk, the
 * gather buffer. A split plan (CPU only) gives its own chunk to each large parameter of a real
 * floating dtype. All dimensions of the parameter before the sharded one must have size 1. The
 * chunk becomes the parameter's unsharded memory without a copy. A gather plan is split only if its
 * inputs have one dtype and no parameter is extended. The other inputs share one more chunk, the
 * packed tail. The runs (fct_run) of a plan list the parts of a rank shard in order, each with its
 * chunk and offset. The transport sends the parts in this order, so ranks with packed and with
 * split plans can take part in one collective.
 *
 * On CUDA slots and rank shards start at multiples of 16 bytes, so that vector loads stay aligned
 * after a small parameter. The bytes between two slots are undefined. The layout does not depend on
 * the available kernels, so all ranks have the same layout.
 *
 * A reduce plan lays out the gradients that exist in this backward, in the reduce dtype and with
 * the same alignment. The pack writes zeros to the gaps, because a user's hook may read them. */
#ifndef FSDP_C_CORE_PLAN_H
#define FSDP_C_CORE_PLAN_H

#include "../bridge/collective.h"
#include "../bridge/tensor.h"
#include "../kernels/kernels.h"
#include "dtype.h"
#include "param.h"
#include "status.h"

/* Position of one input in the chunks. */
typedef struct fc_slot {
    size_t param; /* index of the parameter in the group */
    size_t input; /* index among the inputs of an extended parameter, else 0 */
    bool extended;
    bool owns_chunk;   /* in a split plan this input has its own chunk */
    size_t chunk;      /* index of the chunk */
    int64_t offset;    /* in bytes, within one rank's part of the chunk */
    int64_t numel;     /* elements of all blocks */
    int64_t outer;     /* blocks of equal size; 1 if dim 0 is sharded */
    fct_dtype source;  /* dtype of the input */
    fct_dtype compute; /* dtype in the chunk */
} fc_slot;

/* One tensor of a transfer. */
typedef struct fc_chunk {
    int64_t numel; /* elements of the plan's dtype in each rank's part */
    bool owned;    /* the chunk is one parameter's own; false for the packed chunk */
} fc_chunk;

/* The chunks of a plan and the order of a rank shard in these chunks. Owns its arrays. */
typedef struct fc_chunk_list {
    bool split;       /* large parameters have their own chunks */
    fc_chunk *chunks; /* [capacity + 1] owned chunks in slot order, then the packed chunk */
    size_t count;
    fct_run *runs; /* [capacity + 1] a rank shard in order; adjacent runs of a chunk are merged */
    size_t run_count;
    int64_t rank_numel; /* elements in a rank shard */
    size_t capacity;    /* maximal number of slots */
    size_t owners;      /* number of slots that get their own chunk in a split plan */
} fc_chunk_list;

typedef struct fc_gather_plan {
    bool valid;
    bool post_forward; /* plan of the smaller group's shards */
    bool native;       /* the kernels support every cast; otherwise torch casts some inputs */
    bool casts;        /* at least one input is cast: its compute dtype differs from its dtype */
    bool extended;     /* at least one parameter is extended */
    bool from_host;    /* the device has streams, and at least one sent shard is offloaded */
    fct_dtype dtype;
    int device_type;    /* device type whose kernels cast */
    int64_t align;      /* alignment of slots and rank shards, in bytes */
    int64_t world;      /* ranks of the collective */
    int64_t rank_numel; /* elements of dtype in a rank shard */
    int64_t rank_bytes;
    fc_slot *slots; /* [count] one per input, in parameter order */
    size_t count;
    fc_chunk_list chunks;
} fc_gather_plan;

/* Position of one gradient in the chunks. */
typedef struct fc_gradient_slot {
    bool owns_chunk; /* in a split plan this gradient has its own chunk */
    size_t chunk;
    int64_t offset; /* in elements, within one rank's part of the chunk */
} fc_gradient_slot;

typedef struct fc_reduce_plan {
    bool native; /* the kernels support every cast */
    fct_dtype dtype;
    int64_t align;           /* of slots and rank shards, in elements of dtype; at least 1 */
    int64_t rank_numel;      /* elements of dtype in a rank shard */
    fc_param **params;       /* [capacity] parameters with a gradient, in group order; borrowed */
    fct_tensor **grads;      /* [capacity] their gradients; counted references */
    fc_gradient_slot *slots; /* [capacity] valid after fc_reduce_plan_lay_out */
    fc_chunk_list chunks;
    size_t count;
    size_t capacity;
} fc_reduce_plan;

/* Builds the plan from the parameters' layouts and dtypes. `post_forward`: uses the post-forward
 * layouts. Returns FC_ENOMEM, FC_EASSERT or FC_EVALUE on failure. */
FC_CHECK fc_status fc_gather_plan_build(fc_gather_plan *plan, fc_param *const *params, size_t count,
                                        int64_t world, bool post_forward, fct_device device,
                                        fc_error *err);
/* Returns true if the plan is valid and matches the current inputs of the parameters. */
bool fc_gather_plan_fits(const fc_gather_plan *plan, fc_param *const *params, size_t count);
/* Returns FC_ESTATE with a message if a valid plan does not match the current inputs. */
FC_CHECK fc_status fc_gather_plan_check(const fc_gather_plan *plan, fc_param *const *params,
                                        size_t count, fc_error *err);
void fc_gather_plan_fini(fc_gather_plan *plan);
/* Return the tensor that is sent for a slot (input), and the tensor that the parts of all ranks are
 * copied to (output). Borrowed. */
fct_tensor *fc_slot_input(const fc_gather_plan *plan, const fc_slot *slot, fc_param *const *params);
fct_tensor *fc_slot_output(const fc_slot *slot, fc_param *const *params);
/* Checks the input of a slot and writes its metadata to *facts; see fc_param_shard_facts(). */
FC_CHECK fc_status fc_slot_input_facts(const fc_gather_plan *plan, const fc_slot *slot,
                                       fc_param *const *params, fct_facts *facts, fc_error *err);
/* Sets the size in bytes from which a parameter gets its own chunk, for plans that are built later.
 * The default is 256 KiB. Only for tests; all ranks must set the same value. Process-wide. */
void fc_set_min_owned_chunk_bytes(int64_t bytes);
/* Returns true if a split plan would give at least one parameter its own chunk. */
bool fc_chunk_list_can_split(const fc_chunk_list *list);
/* Assign the slots of a plan to chunks. Precondition: the gather plan is valid, or the reduce plan
 * is laid out. If `split`, also fc_chunk_list_can_split(). */
void fc_gather_plan_set_split(fc_gather_plan *plan, bool split);
void fc_reduce_plan_set_split(fc_reduce_plan *plan, bool split);
/* Returns the order of a rank shard within the chunks, for the transport. The result borrows from
 * the list. */
fct_chunk_layout fc_chunk_list_layout(const fc_chunk_list *list);

/* Reserves space for `capacity` gradients. If the arrays grow, collected gradients are dropped.
 * Returns FC_ENOMEM on failure. */
FC_CHECK fc_status fc_reduce_plan_reserve(fc_reduce_plan *plan, size_t capacity);
/* Checks the collected gradients and lays them out in one chunk: sets slots and rank_numel. Sets
 * *needs_fallback and lays out nothing if a gradient is a tensor subclass without memory: only
 * torch's functions can read it.
 *
 * `reduce_dtype` FCT_NO_DTYPE: the widest dtype of the gradients; returns FC_EASSERT if two of
 * their dtypes have no wider one in common (fc_dtype_wider). For complex gradients a real reduce
 * dtype is the dtype of their parts. */
FC_CHECK fc_status fc_reduce_plan_lay_out(fc_reduce_plan *plan, fct_dtype reduce_dtype,
                                          bool *needs_fallback, fc_error *err);
/* Returns the offset of the slot after a slot of `numel` elements at `offset`. */
int64_t fc_reduce_plan_next_offset(int64_t align, int64_t offset, int64_t numel);
/* Returns the elements between the end of slot `i` of a packed plan and the next slot or the end of
 * the rank shard. */
int64_t fc_reduce_plan_gap(const fc_reduce_plan *plan, size_t i);
/* Releases the collected gradients. The arrays are kept. */
void fc_reduce_plan_drop_grads(fc_reduce_plan *plan);
void fc_reduce_plan_fini(fc_reduce_plan *plan);

#endif
