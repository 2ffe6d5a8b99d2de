/* Transfer plans: what does not change between steps, computed once. They hold no address, and who
 * uses one does not change it.
 *
 * A gather plan lays what a rank sends out in one row: the inputs of a group's parameters, one
 * after the other. A parameter's only input is its padded shard; an extended one has those that its
 * hook gave (extension.h), which may be others at each gather. Rank r's row stands at r * row_bytes
 * of the gather buffer. Where all types are equal the buffer has that type, else it is bytes. An
 * input's slot is `outer` blocks of equal size (one, where dim 0 is cut). On CUDA slots and rows
 * start at multiples of 16 bytes, so that a parameter of one element does not slow down all that
 * stand behind it; what is between two slots means nothing. Which kernels there are is not asked:
 * all ranks lay out the same.
 *
 * Where rows go directly from memory to memory (the CPU), a large parameter's part is a piece of
 * its own, that comes from and goes to the parameter's own memory; all other parts are packed into
 * one more, the rest. `cuts` says which: it depends on shapes and types only, so that it is the
 * same on all ranks, whatever each of them has in its row. Rows with extended parameters are whole.
 *
 * A reduce plan does the same, without gaps, for the gradients that are there in this backward, in
 * the reduce type. */
#ifndef FSDP_C_CORE_PLAN_H
#define FSDP_C_CORE_PLAN_H

#include "../kernels/kernels.h"
#include "../torch/torch_abi.h"
#include "dtype.h"
#include "param.h"
#include "status.h"

/* Where one input stands in a row. */
typedef struct fc_slot {
    size_t param; /* whose it is: an index into the parameters */
    size_t input; /* which of an extended parameter's; else 0 */
    bool extended;
    int64_t offset;    /* in bytes */
    int64_t rest;      /* in bytes, in a row of the rest; FC_OWN_PIECE: it is not there */
    int64_t numel;     /* elements, of all blocks */
    int64_t outer;     /* blocks */
    fct_dtype source;  /* the input's type */
    fct_dtype compute; /* the row's */
} fc_slot;

enum { FC_OWN_PIECE = -1 };

typedef struct fc_gather_plan {
    bool valid;
    bool post_forward; /* of the shards on the smaller group that forward left behind */
    bool native;       /* the kernels can do every cast; else torch copies do the packing */
    bool casts;        /* some compute type is another than the shard's */
    bool extended;     /* some parameters are */
    bool from_host;    /* some shards are offloaded: they are in the host's memory */
    fct_dtype dtype;
    int64_t align;     /* of slots and rows, in bytes */
    int64_t world;     /* ranks that take part: rows of the buffer */
    int64_t row_numel; /* elements of dtype in a row */
    int64_t row_bytes;
    int64_t rest_bytes; /* of a row of what is not a piece of its own */
    fc_slot *slots;     /* [count] of the inputs, in the order of the parameters */
    fct_cut *cuts;      /* [count] of which cut_count are used: the pieces, in elements of dtype */
    size_t count;
    size_t cut_count;
} fc_gather_plan;

typedef struct fc_reduce_plan {
    bool native; /* the kernels can do every cast */
    fct_dtype dtype;
    int64_t row_numel;  /* elements of dtype in one rank's row */
    fc_param **params;  /* [capacity] those with a gradient, in group order; borrowed */
    fct_tensor **grads; /* [capacity] their gradients; counted, owned here until dropped */
    int64_t *offsets;   /* [capacity] of each in a row, in elements, once they are laid out */
    int64_t *rests;     /* [capacity] of each in a row of the rest, or FC_OWN_PIECE */
    int64_t rest_numel; /* elements of dtype in one rank's row of the rest */
    fct_cut *cuts;      /* [capacity] of which cut_count are used: the pieces */
    size_t cut_count;
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
/* Parameters from `bytes` bytes on are pieces of their own, in plans that are made from now on: on
 * all ranks the same. For tests; a quarter of a mebibyte at the start. */
void fc_pieces_from(int64_t bytes);
/* How the plan's rows are cut; borrows from it. */
fct_cuts fc_gather_plan_cuts(const fc_gather_plan *plan);
fct_cuts fc_reduce_plan_cuts(const fc_reduce_plan *plan);

/* Room for `capacity` gradients. */
FC_CHECK fc_status fc_reduce_plan_reserve(fc_reduce_plan *plan, size_t capacity);
/* Lays out the collected gradients: checks them, fills offsets and row_numel. *foreign: one is of a
 * kind that only the host can read; nothing is laid out then. Without a reduce dtype the widest of
 * the gradients' is taken. FC_EASSERT where there is none. A real reduce dtype is that of the parts
 * of complex gradients. */
FC_CHECK fc_status fc_reduce_plan_lay_out(fc_reduce_plan *plan, fct_dtype reduce_dtype,
                                          bool *foreign, fc_error *err);
/* Cuts the rows of the gradients that somebody else lays out, all of them one after the other: in
 * `reduce_dtype` or, without one, in the first one's. */
void fc_reduce_plan_cut_only(fc_reduce_plan *plan, fct_dtype reduce_dtype);
void fc_reduce_plan_drop_grads(fc_reduce_plan *plan);
void fc_reduce_plan_fini(fc_reduce_plan *plan);

#endif
