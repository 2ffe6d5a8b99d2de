/* Gradients at the end of a group's backward; see gradient.h. Owns nothing. All work runs on the
 * current stream. */
#include "gradient.h"

#include <assert.h>

fc_status fc_gradient_begin(const fc_group_base *base, bool reduces) {
    assert(base->count == 0 || base->params != NULL);
    fc_status status = FC_OK;
    for (size_t i = 0; base->defers_casts && i < base->count; i++) {
        FC_TRY(fc_param_begin_grad(base->params[i], reduces));
    }
done:
    return status;
}

fc_status fc_gradient_end(const fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    fc_status status = FC_OK;
    fc_comm_enter_gil_scope(base->comm);
    for (size_t i = 0; base->defers_casts && i < base->count; i++) {
        FC_TRY(fc_param_end_grad(base->params[i]));
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    return status;
}

/* Calls `function` for each parameter of `span`. With FC_FALLBACK_GRADS, calls `callback` instead,
 * which runs Python code. */
static fc_status for_each_grad(const fc_group_base *base, fc_span span,
                               int (*callback)(void *owner), fc_status (*function)(fc_param *p)) {
    fc_status status = FC_OK;
    bool uses_fallback = fc_group_base_uses_fallback(base, FC_FALLBACK_GRADS);
    if (!uses_fallback) { /* a scope must not contain a callback */
        fc_comm_enter_gil_scope(base->comm);
    }
    for (size_t i = span.first; i < span.end; i++) {
        if (uses_fallback) {
            FC_TRY_RAISED(callback(base->params[i]->owner));
        } else {
            FC_TRY(function(base->params[i]));
        }
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    return status;
}

fc_status fc_gradient_accumulate(const fc_group_base *base, fc_span span) {
    void *range = fc_group_base_enter_range(base, "post_backward_accumulate");
    fc_status status =
        for_each_grad(base, span, base->callbacks->accumulate_grad, fc_param_accumulate_grad);
    fct_profile_exit(range);
    return status;
}

fc_status fc_gradient_to_accumulated(const fc_group_base *base) {
    return for_each_grad(base, fc_group_base_all(base), base->callbacks->to_accumulated_grad,
                         fc_param_to_accumulated_grad);
}

/* Creates zeros in place of a missing gradient; 1-D if the parameter was never unsharded. */
static fc_status make_zero_grad(const fc_group_base *base, const fc_param *p, fct_tensor **out) {
    fc_status status = FC_OK;
    fct_tensor *like = NULL;
    if (p->unsharded != NULL) {
        FC_TRY_RAISED(fct_tensor_zeros_like(p->unsharded, out));
    } else {
        FC_TRY_RAISED(
            fct_tensor_empty(p->layout.numel, fc_param_compute_dtype(p), base->device, &like));
        FC_TRY_RAISED(fct_tensor_zeros_like(like, out));
    }
done:
    fct_tensor_release(like);
    return status;
}

/* Replaces a DTensor gradient by its plain local tensor. On failure *grad is unchanged. */
static fc_status unwrap(const fc_group_base *base, const fc_param *p, fct_tensor **grad) {
    fct_tensor *local = NULL;
    if (*grad == NULL || !p->wrapped || p->unsharded == NULL) {
        return FC_OK;
    }
    if (base->callbacks->unwrap_grad(p->owner, *grad, &local) != 0) {
        return FC_ERAISED;
    }
    fct_tensor_release(*grad);
    *grad = local;
    return FC_OK;
}

fc_status fc_gradient_check_zeros(const fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    for (size_t i = 0; i < base->count; i++) {
        const fc_param *p = base->params[i];
        bool has_dtype = !p->overrides_grad_dtype || p->sharded_grad_dtype != FCT_NO_DTYPE ||
                         p->reduce_dtype != FCT_NO_DTYPE;
        if (!has_dtype && base->callbacks->requires_grad(p->owner)) {
            return fc_error_set(
                &base->comm->error, FC_EVALUE,
                "Reducing unused parameters with grad_dtype=None requires an explicit "
                "MixedPrecisionPolicy.reduce_dtype so every rank can build zero gradients of the "
                "same dtype: %s. Set reduce_dtype to the dtype its gradients already have.",
                p->name != NULL ? p->name : "None");
        }
    }
    return FC_OK;
}

/* Takes one parameter's gradient for the reduction as a plain tensor. *out is NULL if there is no
 * gradient. */
static fc_status collect_grad(const fc_group_base *base, fc_param *p, bool uses_fallback,
                              bool zero_unused, fct_tensor **out) {
    fc_status status = FC_OK;
    fct_tensor *grad = NULL;
    if (uses_fallback) {
        FC_TRY_RAISED(base->callbacks->collect_grad(p->owner, &grad));
    } else {
        fc_param_take_grad(p, &grad);
        FC_TRY(unwrap(base, p, &grad));
    }
    if (grad == NULL && zero_unused &&
        (p->unsharded != NULL ? fct_tensor_requires_grad(p->unsharded)
                              : base->callbacks->requires_grad(p->owner))) {
        FC_TRY(make_zero_grad(base, p, &grad));
        FC_TRY(unwrap(base, p, &grad));
    }
    *out = grad;
    grad = NULL;
done:
    fct_tensor_release(grad);
    return status;
}

fc_status fc_gradient_collect(const fc_group_base *base, fc_span span, bool zero_unused,
                              fc_reduce_plan *plan) {
    fc_status status = FC_OK;
    FC_TRY(fc_reduce_plan_reserve(plan, base->count));
    fc_reduce_plan_drop_grads(plan);
    bool uses_fallback = fc_group_base_uses_fallback(base, FC_FALLBACK_GRADS);
    for (size_t i = span.first; i < span.end; i++) {
        fct_tensor *grad = NULL;
        FC_TRY(collect_grad(base, base->params[i], uses_fallback, zero_unused, &grad));
        if (grad != NULL) {
            plan->params[plan->count] = base->params[i];
            plan->grads[plan->count] = grad;
            plan->count++;
        }
    }
done:
    return status;
}

void fc_gradient_drop(const fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    for (size_t i = 0; i < base->count; i++) {
        fc_param_drop_grad(base->params[i]);
    }
}
