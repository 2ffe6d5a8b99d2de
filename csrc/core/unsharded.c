/* Memory and parameter objects of unsharded parameters; see unsharded.h. Owns nothing. Memory is
 * allocated and freed on the device's current stream. */
#include "unsharded.h"

#include <assert.h>

/* ---- memory ---- */

fc_status fc_unsharded_can_alias(const fc_group_base *base, bool *can) {
    assert(base->comm != NULL);
    fc_status status = FC_OK;
    *can = base->shard.world == 1 && !fc_group_base_uses_fallback(base, FC_FALLBACK_GATHER);
    for (size_t i = 0; *can && i < base->count; i++) {
        FC_TRY(fc_param_can_alias(base->params[i], base->device, can, &base->comm->error));
    }
done:
    return status;
}

fc_status fc_unsharded_alias(fc_group_base *base, bool *all) {
    assert(base->shard.world == 1);
    fc_status status = FC_OK;
    FC_TRY(fc_unsharded_can_alias(base, all));
    for (size_t i = 0; *all && i < base->count; i++) {
        FC_TRY(fc_param_alias_flat(base->params[i]));
    }
    if (*all) {
        fc_unsharded_record_versions(base);
    }
done:
    return status;
}

void fc_unsharded_record_versions(fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    for (size_t i = 0; i < base->count; i++) {
        base->params[i]->aliased_version = fc_group_base_version_of(base, base->params[i]);
    }
}

static bool is_owned(const fc_gather_plan *plan, const fc_slot *slot, const fc_chunks *chunks) {
    return plan->chunks.chunks[slot->chunk].owned && slot->chunk < chunks->count;
}

fc_status fc_unsharded_alloc(fc_group_base *base, const fc_gather_plan *plan,
                             const fc_chunks *chunks) {
    assert(plan->valid);
    fc_status status = FC_OK;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        fc_param *p = base->params[slot->param];
        if (slot->extended) {
            continue;
        }
        if (is_owned(plan, slot, chunks)) {
            FC_TRY(fc_param_adopt_flat(p, base->device, chunks->tensors[slot->chunk],
                                       &base->comm->error));
        } else {
            FC_TRY(fc_param_alloc_flat(p, base->device, &base->comm->error));
        }
    }
    for (size_t i = 0; plan->extended && i < base->count; i++) {
        if (base->params[i]->extended) {
            FC_TRY(fc_param_alloc_outputs(base->params[i], plan->world, base->device,
                                          &base->comm->error));
        }
    }
done:
    return status;
}

void fc_unsharded_return_chunks(fc_group_base *base, const fc_gather_plan *plan,
                                const fc_chunks *chunks) {
    assert(plan->count == 0 || plan->slots != NULL);
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (is_owned(plan, slot, chunks)) {
            fc_param_return_flat(base->params[slot->param], chunks->tensors[slot->chunk]);
        }
    }
}

fc_status fc_unsharded_can_free(const fc_group_base *base) {
    for (size_t i = 0; i < base->count; i++) {
        const char *name = base->params[i]->name;
        if (!fc_param_can_free(base->params[i])) {
            return fc_error_set(&base->comm->error, FC_ESTATE,
                                "Trying to resize storage that is not resizable\n"
                                "The unsharded memory of parameter '%s' cannot be freed on rank "
                                "%lld: its numpy() (or another process) shares it. Take a copy, "
                                "param.detach().clone().numpy(), and call reset_iter_state().",
                                name != NULL ? name : "?", (long long)base->shard.rank);
        }
    }
    return FC_OK;
}

void fc_unsharded_free(fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    bool notifies = fc_group_base_uses_fallback(base, FC_FALLBACK_FREE);
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        if (notifies && !p->aliased) {
            base->callbacks->free_unsharded(p->owner);
        }
        fc_param_free(p);
    }
}

/* ---- parameter objects ---- */

fc_status fc_unsharded_make(fc_group_base *base, bool extends) {
    assert(base->comm != NULL && (base->count == 0 || base->params != NULL));
    fc_status status = FC_OK;
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        if (extends && p->extended) {
            FC_TRY(base->callbacks->extend_unsharded(p->owner));
        } else if (p->unsharded == NULL) {
            fct_tensor *unsharded = NULL;
            if (p->flat == NULL) { /* Python code of an earlier iteration has released it */
                return fc_error_set(&base->comm->error, FC_EASSERT,
                                    "parameters were changed while they were gathered");
            }
            FC_TRY_RAISED(base->callbacks->make_unsharded(p->owner, p->flat, &unsharded));
            fc_param_set_unsharded(p, unsharded);
        }
        bool requires_grad = base->callbacks->requires_grad(p->owner);
        if (fct_tensor_requires_grad(p->unsharded) != requires_grad) {
            FC_TRY_RAISED(fct_tensor_set_requires_grad(p->unsharded, requires_grad));
        }
        p->unsharded_requires_grad = requires_grad;
    }
done:
    return status;
}

static bool holds_memory(const fc_param *p) {
    fct_facts facts = {0};
    if (p->flat == NULL) {
        return p->extension.output_count > 0 && p->unsharded != NULL;
    }
    fct_tensor_facts(p->flat, &facts);
    return facts.numel == 0 || facts.storage_bytes > 0;
}

fc_status fc_unsharded_adopt(fc_group_base *base) {
    assert(base->comm != NULL);
    for (size_t i = 0; i < base->count; i++) {
        if (!holds_memory(base->params[i])) {
            const char *name = base->params[i]->name;
            return fc_error_set(&base->comm->error, FC_ESTATE, "parameter '%s' was not gathered",
                                name != NULL ? name : "?");
        }
    }
    void *pause = fct_functorch_pause();
    fc_status status = fc_unsharded_make(base, false);
    fct_functorch_resume(pause);
    return status;
}

fc_status fc_unsharded_copy_requires_grad(fc_group_base *base) {
    assert(base->callbacks != NULL && (base->count == 0 || base->params != NULL));
    fc_status status = FC_OK;
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        bool requires_grad = p->unsharded != NULL ? fct_tensor_requires_grad(p->unsharded)
                                                  : p->unsharded_requires_grad;
        if (requires_grad != p->unsharded_requires_grad) {
            FC_TRY_RAISED(base->callbacks->set_requires_grad(p->owner, requires_grad));
            p->unsharded_requires_grad = requires_grad;
        }
    }
done:
    return status;
}

/* ---- leaves ---- */

/* Returns true if a change of the leaf would lose gradients of the parameter. */
static bool needs_leaf(const fc_group_base *base, const fc_param *p) {
    return !p->extended && base->callbacks->requires_grad(p->owner);
}

static fc_status refuse_lost_leaf(fc_group_base *base, const fc_param *p) {
    return fc_error_set(&base->comm->error, FC_ESTATE,
                        "parameter '%s' was converted or replaced between forward and backward, "
                        "so its gradient would be lost\n"
                        "Run forward again before backward.",
                        p->name != NULL ? p->name : "?");
}

fc_status fc_unsharded_record_leaves(fc_group_base *base) {
    assert(base->comm != NULL && (base->count == 0 || base->params != NULL));
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        if (p->unsharded == NULL && needs_leaf(base, p)) {
            return refuse_lost_leaf(base, p);
        }
        p->leaf_before = p->unsharded;
    }
    return FC_OK;
}

/* Whether the values of the unsharded parameter have changed with those of its shard. */
static bool has_changed_alias(const fc_group_base *base, const fc_param *p) {
    fct_facts shard, flat;
    if (!p->aliased || p->aliased_version == fc_group_base_version_of(base, p)) {
        return false;
    }
    fct_tensor_facts(p->sharded_data, &shard);
    fct_tensor_facts(p->flat, &flat);
    return shard.data == flat.data;
}

fc_status fc_unsharded_check_leaves(fc_group_base *base) {
    assert(base->comm != NULL && (base->count == 0 || base->params != NULL));
    for (size_t i = 0; i < base->count; i++) {
        const fc_param *p = base->params[i];
        if (has_changed_alias(base, p)) {
            return fc_error_set(&base->comm->error, FC_ESTATE,
                                "parameter '%s' was changed in place between forward and backward, "
                                "for example by an optimizer's step, and its former values are "
                                "lost\n"
                                "Run backward before the change, or run forward again.",
                                p->name != NULL ? p->name : "?");
        }
        if (p->unsharded != p->leaf_before && needs_leaf(base, p)) {
            return refuse_lost_leaf(base, p);
        }
    }
    return FC_OK;
}

/* ---- invariants ---- */

static fc_status check_memory(const fc_group_base *base, size_t i, bool unsharded, bool kept) {
    const fc_param *p = base->params[i];
    fct_facts facts = {0};
    int64_t bytes = fc_extension_bytes(&p->extension);
    if (unsharded && p->flat == NULL && p->unsharded == NULL) {
        return fc_error_set(&base->comm->error, FC_ESTATE,
                            "unsharded, but a parameter has no unsharded tensor");
    }
    if (p->aliased || kept || (unsharded && p->flat == NULL)) {
        return FC_OK;
    }
    if (p->flat != NULL) {
        fct_tensor_facts(p->flat, &facts);
        bytes += facts.storage_bytes;
    }
    bool expected = unsharded && facts.numel > 0;
    if ((bytes != 0) != expected) {
        return fc_error_set(&base->comm->error, FC_ESTATE,
                            "parameter %zu holds %lld bytes while %s", i, (long long)bytes,
                            expected ? "unsharded" : "sharded");
    }
    return FC_OK;
}

void fc_unsharded_drop_post_forward(const fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    for (size_t i = 0; i < base->count; i++) {
        (void)base->callbacks->make_post_forward(base->params[i]->owner, NULL);
        fc_param_drop_post_forward(base->params[i]);
    }
}

fc_status fc_unsharded_check(const fc_group_base *base, bool unsharded, bool kept) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < base->count; i++) {
        FC_TRY(check_memory(base, i, unsharded, kept));
    }
done:
    return status;
}
