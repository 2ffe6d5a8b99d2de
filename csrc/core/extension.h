/* All-gather extensions: tensor subclasses whose hooks take part in their parameter's gather. The
 * callbacks run the hooks (callbacks.h).
 *
 *   shard --first hook--> inputs --gather--> outputs --second hook--> unsharded parameter
 *                                                                     over inner tensors
 *
 * The first hook is fsdp_pre_all_gather, the second hook is fsdp_post_all_gather. Inputs exist from
 * the first hook to the pack. Their sizes and dtypes are kept after the pack. The tensor objects of
 * outputs and inner tensors are kept; their storages have memory only while the parameter is
 * unsharded. Memory is allocated and freed by resizing storages on the device's current stream.
 *
 * Preconditions: the struct is zeroed or was changed by these functions only. Lists of `count`
 * tensors are not NULL unless `count` is 0, and `world` is at least 1. */
#ifndef FSDP_C_CORE_EXTENSION_H
#define FSDP_C_CORE_EXTENSION_H

#include "../bridge/types.h"
#include "status.h"

/* One tensor that the first hook returned, 1-D. */
typedef struct fc_input {
    fct_tensor *tensor; /* counted; NULL after the pack */
    int64_t numel;
    fct_dtype dtype;
} fc_input;

/* A tensor that is kept while its memory is allocated and freed. */
typedef struct fc_kept_tensor {
    fct_tensor *tensor; /* counted */
    int64_t bytes;      /* size of the storage while the tensor has memory */
} fc_kept_tensor;

typedef struct fc_extension {
    fc_input *inputs; /* [input_count] inputs of the latest gather */
    size_t input_count;
    fc_kept_tensor *outputs; /* [output_count] 1-D; each holds one input of all ranks */
    size_t output_count;
    fc_kept_tensor *inner; /* [inner_count] */
    size_t inner_count;
} fc_extension;

/* Releases everything. Safe on a zeroed struct. */
void fc_extension_fini(fc_extension *e);

/* Stores the tensors that the first hook returned. Adds references. Returns FC_ENOMEM on
 * failure. */
FC_CHECK fc_status fc_extension_set_inputs(fc_extension *e, fct_tensor *const *inputs,
                                           size_t count);
/* Releases the input tensors. Their sizes and dtypes are kept. */
void fc_extension_drop_inputs(fc_extension *e);
/* Store the outputs of the gather, or the inner tensors that the second hook created. Add
 * references. Return FC_ENOMEM on failure. */
FC_CHECK fc_status fc_extension_set_outputs(fc_extension *e, fct_tensor *const *outputs,
                                            size_t count);
FC_CHECK fc_status fc_extension_set_inner(fc_extension *e, fct_tensor *const *inner, size_t count);

/* Release the outputs, or the outputs and the inner tensors. */
void fc_extension_release_outputs(fc_extension *e);
void fc_extension_release(fc_extension *e);

/* Allocates the outputs for the latest inputs of `world` ranks, and the memory of the inner
 * tensors. Outputs of another size or dtype are replaced. Returns FC_ESTATE if an inner tensor
 * shares the memory of a replaced output. After a failure some tensors may have memory. */
FC_CHECK fc_status fc_extension_alloc(fc_extension *e, int64_t world, fct_device device,
                                      const char *name, fc_error *err);
/* can_free returns true if every storage can be freed (fct_storage_can_free()). free frees the
 * memory of outputs and inner tensors. */
bool fc_extension_can_free(const fc_extension *e);
void fc_extension_free(fc_extension *e);
/* Returns the bytes that outputs and inner tensors occupy. */
int64_t fc_extension_bytes(const fc_extension *e);

#endif
