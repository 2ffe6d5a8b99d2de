/* The callbacks of the core (core/callbacks.h) for the parameters of a dry run. These callbacks
 * keep the tensors that csrc/python would keep, and record registrations and gradients. */
#include "callbacks.h"

#include "boundary.h"
#include "unit.h"

static void replace(fct_tensor **slot, fct_tensor *value) {
    fct_tensor *previous = *slot;
    *slot = value;
    fct_tensor_release(previous);
}

static int make_unsharded(void *owner, fct_tensor *flat, fct_tensor **unsharded) {
    fcd_param *p = (fcd_param *)owner;
    const fcd_param_description *d = p->description;
    int64_t strides[FCD_DIMS_MAX];
    fct_tensor *tensor = NULL;
    fct_facts facts;
    int64_t stride = 1;
    for (int32_t i = d->ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= d->sizes[i] > 1 ? d->sizes[i] : 1;
    }
    fct_tensor_facts(flat, &facts);
    if (fct_tensor_alias(flat, d->ndim, d->sizes, strides, facts.offset_bytes / facts.itemsize,
                         &tensor) != 0 ||
        fct_tensor_set_requires_grad(tensor, p->requires_grad) != 0) {
        return -1;
    }
    replace(&p->unsharded, tensor);
    *unsharded = tensor;
    return 0;
}

static int make_post_forward(void *owner, fct_tensor *data) {
    fcd_param *p = (fcd_param *)owner;
    if (data != NULL) {
        fct_tensor_retain(data);
    }
    fcd_defer_release(p->post_forward);
    p->post_forward = data;
    return 0;
}

static int swap(void *owner, fc_sharded_state state) {
    const fcd_param *p = (const fcd_param *)owner;
    fcd_append_event(FCD_REGISTER, -1, (int64_t)state, 0, p->description->name);
    return 0;
}

static bool requires_grad(void *owner) {
    return ((const fcd_param *)owner)->requires_grad;
}

static int set_requires_grad(void *owner, bool value) {
    ((fcd_param *)owner)->requires_grad = value;
    return 0;
}

static int set_sharded_grad(void *owner, fct_tensor *local) {
    fcd_param *p = (fcd_param *)owner;
    fct_facts facts;
    fct_tensor_facts(local, &facts);
    fcd_append_event(FCD_GRADIENT, -1, 0, facts.numel * facts.itemsize, p->description->name);
    if (p->grad != NULL) {
        return fct_tensor_add(p->grad, local);
    }
    fct_tensor_retain(local);
    p->grad = local;
    return 0;
}

static bool has_grad(void *owner) {
    return ((const fcd_param *)owner)->grad != NULL;
}

static bool needs_grad_now(void *owner) {
    (void)owner;
    return false;
}

/* fcd_model_call() runs the notification and returns its failure. */
static int grad_arrived(void *owner) {
    fcd_param *p = (fcd_param *)owner;
    if (!fc_bucket_arrived(&p->core)) {
        return 0;
    }
    fcd_unit *unit = (fcd_unit *)p->core.buckets->base->owner;
    return (int)fc_group_reduce_buckets(&unit->core);
}

const fc_callbacks fcd_callbacks = {
    .make_unsharded = make_unsharded,
    .make_post_forward = make_post_forward,
    .swap = swap,
    .requires_grad = requires_grad,
    .set_requires_grad = set_requires_grad,
    .set_sharded_grad = set_sharded_grad,
    .has_grad = has_grad,
    .needs_grad_now = needs_grad_now,
    .grad_arrived = grad_arrived,
};
