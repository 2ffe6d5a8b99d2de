/* Runs the calls of a dry run. Each call makes the same calls to the core, in the same order, as a
 * hook of csrc/python/step.c or a node of autograd. Owns nothing.
 *
 * Memory that the core allocates during a call is counted as FCD_GATHERED in forward and at
 * pre-backward. It is counted as FCD_GRADIENTS at post-backward, at the end of backward and for a
 * new gradient. */
#include "step.h"

#include <string.h>

#include "../core/dtype.h"
#include "boundary_device.h"

const char *const fcd_call_names[FCD_CALL_COUNT] = {
#define FCD_CALL_NAME(name, text, arguments) text,
    FCD_CALLS(FCD_CALL_NAME)
#undef FCD_CALL_NAME
};

const int fcd_call_arguments[FCD_CALL_COUNT] = {
#define FCD_CALL_ARGUMENTS(name, text, arguments) arguments,
    FCD_CALLS(FCD_CALL_ARGUMENTS)
#undef FCD_CALL_ARGUMENTS
};

/* ---- forward ---- */

static fc_status enter_groups(fc_state *state) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < state->group_count; i++) {
        bool entering = false;
        FC_TRY(fc_group_pre_forward(state->groups[i], &entering));
    }
done:
    return status;
}

static fc_status pre_forward(fc_state *state) {
    fc_status status = FC_OK;
    if (state->training_state == FC_PRE_BACKWARD) {
        return fc_state_recompute(state);
    }
    const bool first = state->training_state != FC_FORWARD;
    if (first && state->iteration->forward_root == NULL) {
        fcd_enter_range("root_pre_forward");
        status = fc_state_begin_iteration(state, true);
        fcd_leave_range();
        FC_TRY(status);
    }
    state->training_state = FC_FORWARD;
    FC_TRY(enter_groups(state));
    if (first && state->forward_prefetch_count > 0) {
        FC_TRY(fc_state_forward_prefetch(state));
    }
done:
    return status;
}

static fc_status post_forward(fc_state *state) {
    fc_status status = FC_OK;
    if (state->training_state == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    for (size_t i = 0; i < state->group_count; i++) {
        FC_TRY(fc_group_post_forward(state->groups[i]));
    }
    FC_TRY(fc_state_end_forward(state));
done:
    return status;
}

/* ---- backward ---- */

static int end_backward(void *owner) {
    fcd_root *root = (fcd_root *)owner;
    fcd_enter_range("root_post_backward_callback");
    const fc_status status = fc_iteration_end_backward(&root->iteration, &root->comm);
    fcd_leave_range();
    return (int)status;
}

/* Retains or releases the owner of end_backward(). No count is needed: the model owns the root
 * until the callbacks are removed. */
static void ignore_reference(void *owner) {
    (void)owner;
}

static fc_status pre_backward(fc_state *state) {
    const fct_hook at_end = {state->owner, end_backward, ignore_reference, ignore_reference};
    return fc_state_pre_backward(state, &at_end);
}

/* In the autograd graph the post-backward node of a later group runs before that of an earlier
 * group. */
static fc_status post_backward(fc_state *state) {
    fc_status status = FC_OK;
    for (size_t i = state->group_count; i-- > 0;) {
        FC_TRY(fc_group_leave_backward(state->groups[i]));
        FC_TRY(fc_state_post_backward(state, state->groups[i]));
    }
done:
    return status;
}

/* ---- memory that the model allocates ---- */

static fc_status alloc_storage(fcd_model *m, size_t index, int64_t bytes) {
    if (m->storages[index] != NULL) {
        return fc_error_set(&m->error, FC_EVALUE, "storage %zu is allocated already", index);
    }
    if (bytes < 0) {
        return fc_error_set(&m->error, FC_EVALUE, "%lld bytes; expected at least 0",
                            (long long)bytes);
    }
    m->storages[index] = fcd_storage_new(bytes, FCD_ACTIVATIONS, false);
    return m->storages[index] != NULL ? FC_OK : FC_ENOMEM;
}

static void free_storage(fcd_model *m, size_t index) {
    fcd_storage_release(m->storages[index]);
    m->storages[index] = NULL;
}

/* Returns memory for a gradient of `bytes` bytes: the model's storage `index`, with the model's
 * reference, or a new storage if the model has none there. Returns NULL if malloc fails. */
static fcd_storage *take_gradient_storage(fcd_model *m, int64_t index, int64_t bytes) {
    fcd_storage *storage = index >= 0 ? m->storages[index] : NULL;
    if (storage == NULL) {
        return fcd_storage_new(bytes, FCD_GRADIENTS, false);
    }
    fcd_storage_reassign(storage, bytes, FCD_GRADIENTS);
    m->storages[index] = NULL;
    return storage;
}

static fc_status accumulate(fcd_model *m, fcd_param *p, int64_t index, int64_t bytes) {
    const fcd_param_description *d = p->description;
    const int64_t needed = p->core.layout.numel * fc_dtype_size(d->compute);
    fct_tensor *leaf = p->core.unsharded;
    if (leaf == NULL || !fct_tensor_requires_grad(leaf)) {
        return fc_error_set(&m->error, FC_EVALUE, "parameter '%s' is not unsharded, or is frozen",
                            d->name);
    }
    if (bytes < needed) {
        return fc_error_set(&m->error, FC_EVALUE, "%lld bytes; the gradient of '%s' needs %lld",
                            (long long)bytes, d->name, (long long)needed);
    }
    const bool adds = fct_grad_has(leaf); /* autograd adds in place */
    if (adds) {
        fcd_append_event(FCD_ADD, -1, 0, needed, d->name);
    }
    if (adds && index < 0) {
        return (fc_status)fcd_run_subscriptions(leaf);
    }
    fcd_storage *storage = take_gradient_storage(m, index, bytes);
    fct_tensor *grad =
        storage != NULL ? fcd_tensor_over(storage, d->compute, d->ndim, d->sizes) : NULL;
    fcd_storage_release(storage);
    if (grad == NULL) {
        return FC_ENOMEM;
    }
    fct_tensor_retain(grad); /* autograd holds a reference until its hooks return */
    fcd_accumulate_grad(leaf, grad);
    const fc_status status = (fc_status)fcd_run_subscriptions(leaf);
    fct_tensor_release(grad);
    return status;
}

static void zero_grad(fcd_model *m) {
    for (size_t i = 0; i < m->unit_count; i++) {
        for (size_t j = 0; j < m->units[i].count; j++) {
            fct_tensor_release(m->units[i].params[j].grad);
            m->units[i].params[j].grad = NULL;
        }
    }
}

/* ---- calls ---- */

/* Checks that argument `index` is in [min, end). */
static fc_status check_argument(fcd_model *m, const fcd_call *call, size_t index, const char *label,
                                int64_t min, size_t end) {
    const int64_t value = call->arguments[index];
    return value >= min && value < (int64_t)end
               ? FC_OK
               : fc_error_set(&m->error, FC_EVALUE, "%s %lld; expected %lld to %lld", label,
                              (long long)value, (long long)min, (long long)end - 1);
}

/* Sets the simulated state of autograd and the purpose of memory that the call allocates. */
static void set_call_state(fcd_call_kind kind) {
    fcd_record *r = fcd_current_record;
    const bool reduces =
        kind == FCD_CALL_POST_BACKWARD || kind == FCD_CALL_END || kind == FCD_CALL_GRADIENT;
    r->purpose = reduces ? FCD_GRADIENTS : FCD_GATHERED;
    r->in_backward = kind == FCD_CALL_BACKWARD || (r->in_backward && kind != FCD_CALL_END);
    /* Activation checkpointing runs a forward inside backward, with gradients enabled. */
    r->grad_enabled =
        !r->in_backward || kind == FCD_CALL_PRE_FORWARD || kind == FCD_CALL_POST_FORWARD;
}

static fc_status run_state_call(fcd_model *m, const fcd_call *call) {
    fc_status status = FC_OK;
    FC_TRY(check_argument(m, call, 0, "state", 0, m->description->state_count));
    fc_state *state = &m->states[call->arguments[0]];
    switch (call->kind) {
    case FCD_CALL_PRE_FORWARD:
        return pre_forward(state);
    case FCD_CALL_POST_FORWARD:
        return post_forward(state);
    case FCD_CALL_PRE_BACKWARD:
        return pre_backward(state);
    default:
        return post_backward(state);
    }
done:
    return status;
}

static fc_status run_gradient(fcd_model *m, const fcd_call *call) {
    fc_status status = FC_OK;
    const int64_t *a = call->arguments;
    FC_TRY(check_argument(m, call, 0, "unit", 0, m->unit_count));
    FC_TRY(check_argument(m, call, 1, "parameter", 0, m->units[a[0]].count));
    FC_TRY(check_argument(m, call, 2, "storage", -1, m->storage_count));
    FC_TRY(accumulate(m, &m->units[a[0]].params[a[1]], a[2], a[3]));
done:
    return status;
}

static fc_status run_call(fcd_model *m, const fcd_call *call) {
    fc_status status = FC_OK;
    switch (call->kind) {
    case FCD_CALL_BACKWARD:
        break;
    case FCD_CALL_END:
        status = (fc_status)fcd_run_end_callbacks();
        break;
    case FCD_CALL_ALLOC:
        FC_TRY(check_argument(m, call, 0, "storage", 0, m->storage_count));
        FC_TRY(alloc_storage(m, (size_t)call->arguments[0], call->arguments[1]));
        break;
    case FCD_CALL_FREE:
        FC_TRY(check_argument(m, call, 0, "storage", 0, m->storage_count));
        free_storage(m, (size_t)call->arguments[0]);
        break;
    case FCD_CALL_GRADIENT:
        FC_TRY(run_gradient(m, call));
        break;
    case FCD_CALL_ZERO_GRAD:
        zero_grad(m);
        break;
    default:
        FC_TRY(run_state_call(m, call));
    }
done:
    return status;
}

/* Copies the message of a failure to m->error, unless that is set. The boundary stores messages in
 * the record, and the core stores them in the comm context of a root. */
static void copy_message(fcd_model *m, fc_status status) {
    if (m->error.message[0] != '\0') {
        return;
    }
    const char *found = fcd_current_record->error;
    for (size_t i = 0; found[0] == '\0' && i < m->description->state_count; i++) {
        found = m->roots[i].comm.error.message;
    }
    (void)fc_error_set(&m->error, status, "%s", found[0] != '\0' ? found : "out of memory");
}

fc_status fcd_model_call(fcd_model *m, const fcd_call *call) {
    set_call_state(call->kind);
    const fc_status status = run_call(m, call);
    fcd_release_deferred();
    if (status != FC_OK) {
        copy_message(m, status);
    }
    return status;
}
