/* The gradients of a group at the end of its backward, until they are reduced: kept with the
 * parameters, or taken out into the group's reduce plan. Owns nothing. */
#include "gradient.h"

fc_status fc_gradient_fold(fc_group *g, fc_span span) {
    fc_status status = FC_OK;
    void *range = fc_group_enter_range(g, "post_backward_accumulate");
    for (size_t i = span.first; i < span.end; i++) {
        FC_TRY(fc_param_fold_grad(g->params[i]));
    }
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_gradient_keep(fc_group *g) {
    fc_status status = FC_OK;
    void *range = fc_group_enter_range(g, "post_backward_reshard");
    if (g->reshard_after_backward) {
        FC_TRY(g->via->reshard(g));
    }
    for (size_t i = 0; i < g->count; i++) {
        FC_TRY(fc_param_stash_grad(g->params[i]));
    }
done:
    fct_profile_exit(range);
    return status;
}

/* Zeros in place of a gradient; 1-D where the parameter was never unsharded. */
static fc_status zero_grad(const fc_group *g, const fc_param *p, fct_tensor **out) {
    fc_status status = FC_OK;
    fct_tensor *like = NULL;
    if (p->unsharded != NULL) {
        FC_TRY_RAISED(fct_tensor_zeros_like(p->unsharded, out));
    } else {
        FC_TRY_RAISED(
            fct_tensor_empty(p->layout.numel, fc_param_compute_dtype(p), g->device, &like));
        FC_TRY_RAISED(fct_tensor_zeros_like(like, out));
    }
done:
    fct_tensor_release(like);
    return status;
}

/* One parameter's gradient for the reduction: plain, or NULL where it has none. */
static fc_status collect_grad(const fc_group *g, fc_param *p, fct_tensor **out) {
    fc_status status = FC_OK;
    fct_tensor *grad = NULL;
    fc_param_take_grad(p, &grad);
    if (grad == NULL && g->reduce_unused &&
        (p->unsharded != NULL ? fct_tensor_requires_grad(p->unsharded)
                              : g->host->requires_grad(p->owner))) {
        FC_TRY(zero_grad(g, p, &grad));
    }
    if (grad != NULL && p->wrapped && p->unsharded != NULL) {
        fct_tensor *local = NULL;
        FC_TRY_RAISED(g->host->unwrap_grad(p->owner, grad, &local));
        fct_tensor_release(grad);
        grad = local;
    }
    *out = grad;
    grad = NULL;
done:
    fct_tensor_release(grad);
    return status;
}

fc_status fc_gradient_collect(fc_group *g, fc_span span, bool last) {
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &g->reduce_plan;
    void *range = fc_group_enter_range(g, "post_backward_reshard");
    FC_TRY(fc_reduce_plan_reserve(plan, g->count));
    fc_reduce_plan_drop_grads(plan);
    for (size_t i = span.first; i < span.end; i++) {
        fct_tensor *grad = NULL;
        FC_TRY(collect_grad(g, g->params[i], &grad));
        if (grad != NULL) {
            plan->params[plan->count] = g->params[i];
            plan->grads[plan->count] = grad;
            plan->count++;
        }
    }
    if (last && g->reshard_after_backward) {
        FC_TRY(g->via->reshard(g));
    }
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_gradient_requirements(fc_group *g) {
    fc_status status = FC_OK;
    for (size_t i = 0; g->sharded_state == FC_UNSHARDED && i < g->count; i++) {
        fc_param *p = g->params[i];
        bool wanted = p->unsharded != NULL ? fct_tensor_requires_grad(p->unsharded) : p->required;
        if (wanted != p->required) {
            FC_TRY_RAISED(g->host->require_grad(p->owner, wanted));
            p->required = wanted;
        }
    }
done:
    return status;
}
