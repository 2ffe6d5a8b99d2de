/* All-gather extensions: what a parameter has that takes part in its own gather, by hooks of the
 * tensor that its shard is. Its hooks are the host's business (host.h).
 *
 *   shard --first hook--> inputs --gather--> outputs --second hook--> unsharded parameter
 *                                                                     over inner tensors
 *
 * Inputs are there from the first hook until they are packed; what is known of them stays. Outputs
 * and inner tensors stay, and have memory while the parameter is unsharded. All of this is given
 * and freed by the sizes of the storages themselves, on the device's current stream. */
#ifndef FSDP_C_CORE_EXTENSION_H
#define FSDP_C_CORE_EXTENSION_H

#include "../torch/torch_abi.h"
#include "status.h"

/* One tensor that the first hook gave, 1-D. */
typedef struct fc_input {
    fct_tensor *tensor; /* counted; NULL once it was packed */
    int64_t numel;
    fct_dtype dtype;
} fc_input;

/* A tensor that is kept while its memory comes and goes. */
typedef struct fc_kept_tensor {
    fct_tensor *tensor; /* counted */
    int64_t bytes;      /* of its storage, while that has memory */
} fc_kept_tensor;

typedef struct fc_extension {
    fc_input *inputs; /* [input_count] of the latest gather */
    size_t input_count;
    fc_kept_tensor *outputs; /* [output_count] 1-D, the parts of all ranks of one input each */
    size_t output_count;
    fc_kept_tensor *inner; /* [inner_count] */
    size_t inner_count;
} fc_extension;

/* Releases all; safe on a zeroed struct. */
void fc_extension_fini(fc_extension *e);

/* What the first hook gave; takes new references. FC_ENOMEM. */
FC_CHECK fc_status fc_extension_set_inputs(fc_extension *e, fct_tensor *const *inputs,
                                           size_t count);
void fc_extension_drop_inputs(fc_extension *e);
/* The tensors that others gathered into, and what the second hook made; take new references.
 * FC_ENOMEM. */
FC_CHECK fc_status fc_extension_set_outputs(fc_extension *e, fct_tensor *const *outputs,
                                            size_t count);
FC_CHECK fc_status fc_extension_set_inner(fc_extension *e, fct_tensor *const *inner, size_t count);

/* Lets the former go, or both. */
void fc_extension_forget_outputs(fc_extension *e);
void fc_extension_forget(fc_extension *e);

/* Memory for the outputs of the latest inputs, from `world` ranks, and for the inner tensors.
 * Outputs of other sizes or types are replaced. FC_ESTATE where something else lies over such a
 * one: what the second hook made would lose its memory. After a failure some may have memory. */
FC_CHECK fc_status fc_extension_alloc(fc_extension *e, int64_t world, fct_device device,
                                      const char *name, fc_error *err);
/* Frees the memory of outputs and inner tensors, where it can (fct_storage_can_free()). */
bool fc_extension_can_free(const fc_extension *e);
void fc_extension_free(fc_extension *e);
/* Bytes that they hold. */
int64_t fc_extension_bytes(const fc_extension *e);

#endif
