/* Copies between host and device memory; see offload.h. Owns nothing. All copies are queued on the
 * current stream. The copies use tensor aliases, whose bounds csrc/bridge checks. */
#include "offload.h"

#include "../bridge/device.h"

/* Creates a 1-D view of `bytes` bytes, `start` bytes into the storage, as elements of `dtype`. */
static fc_status view_1d(const fct_tensor *base, fct_dtype dtype, int64_t start, int64_t bytes,
                         fct_tensor **out) {
    const int64_t size = fc_dtype_size(dtype);
    const int64_t sizes[1] = {bytes / size};
    const int64_t strides[1] = {1};
    return fct_tensor_alias_as(base, dtype, 1, sizes, strides, start / size, out) == 0 ? FC_OK
                                                                                       : FC_ERAISED;
}

/* Copies a shard without a cast to `start` bytes into the storage of `target`; both as elements of
 * `dtype`. */
static fc_status upload_shard(const fc_param *p, const fc_slot *slot, fct_dtype dtype,
                              const fct_tensor *target, int64_t start, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts facts;
    fct_tensor *from = NULL;
    fct_tensor *to = NULL;
    const int64_t bytes = slot->numel * fc_dtype_size(slot->source);
    FC_TRY(fc_param_shard_facts(p, false, &facts, err));
    if (bytes > 0) {
        FC_TRY(view_1d(p->sharded_data, dtype, facts.offset_bytes, bytes, &from));
        FC_TRY(view_1d(target, dtype, start, bytes, &to));
        FC_TRY_RAISED(fct_tensor_upload(to, from));
    }
done:
    fct_tensor_release(from);
    fct_tensor_release(to);
    return status;
}

fc_status fc_offload_upload(const fc_gather_plan *plan, fc_param *const *params,
                            const fct_tensor *buffer, int64_t start, fc_error *err) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        FC_TRY(upload_shard(params[slot->param], slot, plan->dtype, buffer, start + slot->offset,
                            err));
    }
done:
    return status;
}

/* Copies the shard to the device, without a cast. A shard that the user has moved to the device is
 * not copied. */
static fc_status stage_shard(fc_param *p, const fc_slot *slot, fct_device device, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts facts;
    fct_tensor *staged = NULL;
    if (slot->extended) {
        return FC_OK;
    }
    FC_TRY(fc_param_shard_facts(p, false, &facts, err));
    if (!p->offloaded || fct_device_is_same_type(facts.device, device)) {
        return FC_OK;
    }
    FC_TRY_RAISED(fct_tensor_empty(slot->numel, slot->source, device, &staged));
    FC_TRY(upload_shard(p, slot, slot->source, staged, 0, err));
    p->staged = staged;
    staged = NULL;
done:
    fct_tensor_release(staged);
    return status;
}

static void unstage(fc_param *p) {
    fct_tensor_release(p->staged);
    p->staged = NULL;
}

fc_status fc_offload_stage(const fc_gather_plan *plan, fc_param *const *params, fct_device device,
                           fc_error *err) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < plan->count; i++) {
        FC_TRY(stage_shard(params[plan->slots[i].param], &plan->slots[i], device, err));
    }
done:
    return status;
}

void fc_offload_unstage(const fc_gather_plan *plan, fc_param *const *params) {
    for (size_t i = 0; i < plan->count; i++) {
        unstage(params[plan->slots[i].param]);
    }
}

/* Copies one shard to its flat tensor. A shard that needs a cast is first copied to device memory.
 * For an extended parameter, copies one input, which is on the device, to its output. */
static fc_status fill_output(fc_param *p, const fc_slot *slot, fct_device device, fc_error *err) {
    fc_status status = FC_OK;
    fct_tensor *to = NULL;
    fct_tensor *cast = NULL;
    if (slot->extended) {
        fct_facts facts;
        FC_TRY(fc_param_input_facts(p, slot->input, slot->numel, slot->source, &facts, err));
        FC_TRY_RAISED(fct_tensor_copy(p->extension.outputs[slot->input].tensor,
                                      p->extension.inputs[slot->input].tensor));
        return FC_OK;
    }
    if (slot->source == slot->compute) {
        return upload_shard(p, slot, slot->source, p->flat, 0, err);
    }
    FC_TRY(stage_shard(p, slot, device, err));
    if (slot->numel > 0) {
        fct_tensor *from = p->staged != NULL ? p->staged : p->sharded_data;
        if (fc_dtype_is_complex(slot->source) && !fc_dtype_is_complex(slot->compute)) {
            FC_TRY_RAISED(fct_tensor_cast(from, slot->compute, &cast)); /* keeps the real parts */
            from = cast;
        }
        FC_TRY(view_1d(p->flat, slot->compute, 0, slot->numel * fc_dtype_size(slot->compute), &to));
        FC_TRY_RAISED(fct_tensor_copy(to, from));
    }
done:
    fct_tensor_release(to);
    fct_tensor_release(cast);
    unstage(p);
    return status;
}

fc_status fc_offload_fill(const fc_gather_plan *plan, fc_param *const *params, fct_device device,
                          fc_error *err) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < plan->count; i++) {
        FC_TRY(fill_output(params[plan->slots[i].param], &plan->slots[i], device, err));
    }
done:
    return status;
}

fc_status fc_offload_copy_gradient(const fc_param *p, const fc_callbacks *callbacks,
                                   fct_tensor *view, fct_tensor **local, bool *queued) {
    bool async =
        p->pinned && !callbacks->has_grad(p->owner) && !callbacks->needs_grad_now(p->owner);
    if (fct_tensor_to_host(view, async, local) != 0) {
        return FC_ERAISED;
    }
    *queued = async;
    return FC_OK;
}
