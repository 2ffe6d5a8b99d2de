/* Transfer plans: the layout of a group's transfers, computed once and reused by every step. A plan
 * holds no address, and its users do not change it.
 *
 * A gather plan arranges what one rank sends: the inputs of the group's parameters, in order. The
 * only input of an ordinary parameter is its padded shard; an extended parameter (extension.h) has
 * the inputs that its hook returned, which may differ at each gather. A rank's shards in this order
 * are its row. All dtypes equal: the row has that dtype, else it is bytes.
 *
 * Memory is a list of chunks. Each chunk is one tensor that holds a part of every rank's row, rank
 * after rank; a slot says in which chunk an input lies and where. A packed plan has one chunk, the
 * gather buffer. A split plan (CPU only) gives every large parameter a chunk of its own, which
 * becomes its unsharded memory without a copy; the other inputs share one more, the packed tail.
 * The runs of a plan list the row in order, each with its place in a chunk. The transport sends a
 * row in row order, so ranks with packed and with split plans can take part in one collective.
 *
 * On CUDA slots and rows start at multiples of 16 bytes, so that vector loads stay aligned behind a
 * small parameter. The bytes between two slots are undefined. The arrangement does not depend on
 * the available kernels: it is the same on all ranks.
 *
 * A reduce plan does the same, without gaps, for the gradients that exist in this backward, in the
 * reduce dtype. */
#ifndef FSDP_C_CORE_PLAN_H
#define FSDP_C_CORE_PLAN_H

#include "../kernels/kernels.h"
#include "../torch/torch_abi.h"
#include "dtype.h"
#include "param.h"
#include "status.h"

/* Where one input lies. */
typedef struct fc_slot {
    size_t param; /* index of its parameter */
    size_t input; /* index among the inputs of an extended parameter, else 0 */
    bool extended;
    bool owns_chunk;   /* in a split plan it has a chunk of its own */
    size_t chunk;      /* the chunk that holds it */
    int64_t offset;    /* in a rank's part of that chunk, in bytes */
    int64_t numel;     /* elements of all blocks */
    int64_t outer;     /* blocks of equal size; 1 where dim 0 is sharded */
    fct_dtype source;  /* dtype of the input */
    fct_dtype compute; /* dtype in the chunk */
} fc_slot;

/* One tensor of a transfer. */
typedef struct fc_chunk {
    int64_t numel; /* elements of the plan's dtype in each rank's part */
    bool owned;    /* it holds one parameter and nothing else */
} fc_chunk;

/* The chunks of a plan, and the row that they make up. Owns its arrays. */
typedef struct fc_chunk_list {
    bool split;       /* large parameters have chunks of their own */
    fc_chunk *chunks; /* [capacity + 1] the owned ones in row order, then the packed one */
    size_t count;
    fct_run *runs; /* [capacity] the row in order; neighbours within one chunk are merged */
    size_t run_count;
    int64_t row_numel; /* elements in the row */
    size_t capacity;   /* slots that fit */
    size_t owners;     /* slots that a split gives a chunk of their own */
} fc_chunk_list;

typedef struct fc_gather_plan {
    bool valid;
    bool post_forward; /* for the shards on the smaller mesh that forward left behind */
    bool native;       /* the kernels support every cast; else torch copies pack */
    bool casts;        /* some compute dtype differs from the shard's */
    bool extended;     /* some parameters are extended */
    bool from_host;    /* some shards are offloaded to host memory */
    fct_dtype dtype;
    int64_t align;     /* of slots and rows, in bytes */
    int64_t world;     /* ranks that take part */
    int64_t row_numel; /* elements of dtype in a row */
    int64_t row_bytes;
    fc_slot *slots; /* [count] of the inputs, in the order of the parameters */
    size_t count;
    fc_chunk_list chunks;
} fc_gather_plan;

/* Where one gradient lies. */
typedef struct fc_gradient_slot {
    bool owns_chunk; /* in a split plan it has a chunk of its own */
    size_t chunk;
    int64_t offset; /* in a rank's part of that chunk, in elements */
} fc_gradient_slot;

typedef struct fc_reduce_plan {
    bool native; /* the kernels support every cast */
    fct_dtype dtype;
    int64_t row_numel;       /* elements of dtype in one rank's row */
    fc_param **params;       /* [capacity] those with a gradient, in group order; borrowed */
    fct_tensor **grads;      /* [capacity] their gradients; counted, owned here until dropped */
    fc_gradient_slot *slots; /* [capacity] of the gradients, once they are laid out */
    fc_chunk_list chunks;
    size_t count;
    size_t capacity;
} fc_reduce_plan;

/* Builds the plan anew from the parameters' layouts and dtypes. `post_forward`: from their
 * post-forward layouts. FC_ENOMEM, FC_EASSERT, FC_EVALUE. */
FC_CHECK fc_status fc_gather_plan_build(fc_gather_plan *plan, fc_param *const *params, size_t count,
                                        int64_t world, bool post_forward, fct_device device,
                                        fc_error *err);
/* Whether the plan is valid, and for the inputs that the parameters have now. */
bool fc_gather_plan_fits(const fc_gather_plan *plan, fc_param *const *params, size_t count);
/* FC_ESTATE with a message where a valid plan is not what would be built now. */
FC_CHECK fc_status fc_gather_plan_check(const fc_gather_plan *plan, fc_param *const *params,
                                        size_t count, fc_error *err);
void fc_gather_plan_fini(fc_gather_plan *plan);
/* What is sent of a slot, and what the parts of all ranks are copied to. Borrowed. */
fct_tensor *fc_slot_input(const fc_gather_plan *plan, const fc_slot *slot, fc_param *const *params);
fct_tensor *fc_slot_output(const fc_slot *slot, fc_param *const *params);
/* Checks the input and reads its facts, see fc_param_shard_facts(). */
FC_CHECK fc_status fc_slot_input_facts(const fc_gather_plan *plan, const fc_slot *slot,
                                       fc_param *const *params, fct_facts *facts, fc_error *err);
/* Sets the size in bytes from which a parameter gets a chunk of its own, in plans built from now
 * on. Must be equal on all ranks of a test. For tests; 256 KiB at start. */
void fc_chunks_from(int64_t bytes);
/* Whether a split plan would give any parameter a chunk of its own. */
bool fc_gather_plan_can_split(const fc_gather_plan *plan);
bool fc_reduce_plan_can_split(const fc_reduce_plan *plan);
/* Assigns the slots of a valid (laid out) plan to chunks. `split` requires can_split. */
void fc_gather_plan_set_split(fc_gather_plan *plan, bool split);
void fc_reduce_plan_set_split(fc_reduce_plan *plan, bool split);
/* The row's order in the chunks, for the transport; borrows from the list. */
fct_chunk_layout fc_chunk_list_layout(const fc_chunk_list *list);

/* Reserves space for `capacity` gradients. FC_ENOMEM. */
FC_CHECK fc_status fc_reduce_plan_reserve(fc_reduce_plan *plan, size_t capacity);
/* Lays out the collected gradients in one chunk: checks them, fills slots and row_numel. *foreign:
 * one is a tensor subclass without memory that only the host can read; then nothing is laid out.
 * Without a reduce dtype the widest of the gradients' is used. FC_EASSERT where there is none. A
 * real reduce dtype is the dtype of the parts of complex gradients. */
FC_CHECK fc_status fc_reduce_plan_lay_out(fc_reduce_plan *plan, fct_dtype reduce_dtype,
                                          bool *foreign, fc_error *err);
void fc_reduce_plan_drop_grads(fc_reduce_plan *plan);
void fc_reduce_plan_fini(fc_reduce_plan *plan);

#endif
