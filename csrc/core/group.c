/* The parameter group's state machine (drawn in group.h). Owns its arrays, plans and process group
 * handles; borrows parameters and the comm context. The gather itself is gather.c's, the reduction
 * reduce.c's. */
#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bucket.h"
#include "gather.h"
#include "gradient.h"
#include "reduce.h"

const fc_transitions fc_group_transitions = {
    .unshard = fc_group_unshard,
    .wait_unshard = fc_group_wait_unshard,
    .reshard = fc_group_reshard,
    .to_sharded = fc_group_to_sharded,
    .pre_backward = fc_group_pre_backward,
    .post_backward = fc_group_post_backward,
    .finalize_backward = fc_group_finalize_backward,
    .backward_prefetch = fc_group_backward_prefetch,
};

/* ---- life ---- */

void fc_group_init(fc_group *g, void *owner, const fc_host *host, fc_comm *comm, fc_param **params,
                   size_t count, fct_device device, int64_t world, int64_t rank) {
    memset(g, 0, sizeof *g);
    g->via = &fc_group_transitions;
    g->owner = owner;
    g->host = host;
    g->comm = comm;
    g->params = params;
    g->count = count;
    g->module_count = 1;
    g->device = device;
    g->siblings = 1;
    fc_link_set(&g->shard, NULL, world, rank);
    g->sharded_state = FC_SHARDED;
    g->training_state = FC_IDLE;
    g->reduce_grads = true;
    g->all_reduce_grads = true;
    g->reshard_after_forward = true;
    g->reshard_after_backward = true;
    g->unshard_in_backward = true;
    g->reduce_dtype = FCT_NO_DTYPE;
}

void fc_group_fini(fc_group *g) {
    fc_gather_abandon(g);
    if (g->comm != NULL) {
        fc_reduce_discard(g->comm, g);
        fc_order_forget(&g->comm->order, g);
        fc_comm_put_event(g->comm, g->reduced);
        fc_comm_put_event(g->comm, g->resharded);
    }
    fc_gather_plan_fini(&g->gather_plan);
    fc_gather_plan_fini(&g->forward_plan);
    fc_reduce_plan_fini(&g->reduce_plan);
    fc_positions_fini(&g->positions);
    fc_bucket_fini(g);
    fc_link_fini(&g->shard);
    fc_link_fini(&g->scatter);
    fc_link_fini(&g->replicate);
    fc_link_fini(&g->forward);
    free((void *)g->params);
    memset(g, 0, sizeof *g);
}

fc_status fc_group_set_comm(fc_group *g, fc_comm *comm) {
    if (g->comm == comm) {
        return FC_OK;
    }
    if (g->comm != NULL && fc_reduce_has(g->comm, g)) {
        return fc_error_set(&g->comm->error, FC_ESTATE,
                            "a parameter group cannot change its communication context while its "
                            "gradients are being reduced");
    }
    if (g->comm != NULL) {
        fc_order_forget(&g->comm->order, g);
        fc_comm_put_event(g->comm, g->reduced);
        g->reduced = NULL;
        fc_comm_put_event(g->comm, g->resharded);
        g->resharded = NULL;
    }
    g->positions.count = 0;
    g->comm = comm;
    return FC_OK;
}

void fc_group_invalidate(fc_group *g) {
    g->gather_plan.valid = false;
    g->forward_plan.valid = false;
    g->buckets.valid = false;
}

/* ---- profiler ranges, with stock's names ---- */

static const char rs_wait[] = "post_backward_rs_wait";

void *fc_group_enter_range(const fc_group *g, const char *label) {
    char name[256];
    if (!fct_profile_active()) {
        return NULL;
    }
    const char *fqn = g->name != NULL ? g->name : "";
    /* One of stock's ranges has its brackets for the root, too. */
    if (fqn[0] != '\0' || strcmp(label, rs_wait) == 0) {
        (void)snprintf(name, sizeof name, "FSDP::%s (%s)", label, fqn);
    } else {
        (void)snprintf(name, sizeof name, "FSDP::%s", label);
    }
    return fct_profile_enter(name);
}

static void note(const fc_group *g, const char *label) {
    if (g->host->log != NULL) {
        g->host->log(g->owner, label);
    }
}

/* ---- sharded state ---- */

/* Changes whenever a shard is written, replaced or moved: through its local tensor and by
 * optimizers (the version of sharded_data), or by operations on the parameter as a whole (the
 * host's). Address and versions are mixed in one after the other: a lower address must not make up
 * for a higher version. */
static uint64_t shard_fingerprint(const fc_group *g) {
    const uint64_t prime = UINT64_C(1099511628211);
    uint64_t print = 0;
    for (size_t i = 0; i < g->count; i++) {
        const fct_tensor *data = g->params[i]->sharded_data;
        uint64_t versions = data != NULL ? fct_tensor_version(data) : 0;
        if (g->host->shard_version != NULL) {
            versions |= (uint64_t)g->host->shard_version(g->params[i]->owner) << 32;
        }
        print = (print * prime + (uint64_t)(uintptr_t)data) * prime + versions;
    }
    return print;
}

/* Registers one face on all modules. On failure the group's own again, also where the failed swap
 * got half way; a rollback that fails leaves the group torn. */
static fc_status swap_all(fc_group *g, fc_sharded_state face) {
    fc_sharded_state own = g->sharded_state;
    for (size_t i = 0; i < g->count; i++) {
        if (g->host->swap(g->params[i]->owner, face) == 0) {
            continue;
        }
        void *error = fct_error_set_aside();
        size_t changed = g->torn ? g->count : i + 1;
        bool restored = own != face;
        while (own != face && changed-- > 0) {
            restored = g->host->swap(g->params[changed]->owner, own) == 0 && restored;
        }
        g->torn = !restored;
        fct_error_put_back(error);
        return FC_ERAISED;
    }
    g->torn = false;
    return FC_OK;
}

/* Registers the group's own face where a rollback has failed. */
static fc_status mend(fc_group *g) {
    return g->torn ? swap_all(g, g->sharded_state) : FC_OK;
}

static void drop_forward(fc_group *g) {
    for (size_t i = 0; i < g->count; i++) {
        (void)g->host->make_forward(g->params[i]->owner, NULL);
        fc_param_drop_forward(g->params[i]);
    }
}

fc_status fc_group_to_sharded(fc_group *g) {
    fc_status status = FC_OK;
    if (g->sharded_state == FC_SHARDED) {
        return mend(g);
    }
    FC_TRY(fc_gradient_requirements(g));
    FC_TRY(swap_all(g, FC_SHARDED));
    fc_gather_free(g);
    if (g->sharded_state == FC_SHARDED_POST_FORWARD) {
        drop_forward(g);
    }
    g->sharded_state = FC_SHARDED;
done:
    return status;
}

void fc_group_set_keep_storage(fc_group *g, bool keep) {
    g->keep_storage = keep;
    if (g->sharded_state != FC_UNSHARDED) {
        fc_gather_free(g);
    }
}

fc_status fc_group_to_unsharded(fc_group *g) {
    fc_status status = FC_OK;
    if (g->sharded_state == FC_UNSHARDED) {
        return mend(g);
    }
    FC_TRY(fc_gather_adopt(g));
    FC_TRY(swap_all(g, FC_UNSHARDED));
    fc_gather_abandon(g);
    if (g->sharded_state == FC_SHARDED_POST_FORWARD) {
        drop_forward(g);
    }
    g->sharded_state = FC_UNSHARDED;
    g->gathered_version = shard_fingerprint(g);
done:
    return status;
}

fc_status fc_group_to_sharded_post_forward(fc_group *g) {
    fc_status status = FC_OK;
    if (g->sharded_state != FC_UNSHARDED) {
        return FC_OK;
    }
    if (g->forward.name == NULL) {
        return fc_error_set(&g->comm->error, FC_ESTATE,
                            "there is no smaller group to reshard to after forward");
    }
    void *pause = fct_functorch_pause();
    FC_TRY(fc_gradient_requirements(g));
    for (size_t i = 0; i < g->count; i++) {
        fc_param *p = g->params[i];
        FC_TRY(fc_param_keep_forward(p, g->device));
        FC_TRY_RAISED(g->host->make_forward(p->owner, p->forward_data));
    }
    if (g->comm->has_streams) {
        fct_event *copied = NULL;
        FC_TRY(fc_comm_record(g->comm, fct_stream_current(g->device), &copied));
        fc_comm_put_event(g->comm, g->resharded);
        g->resharded = copied;
    }
    FC_TRY(swap_all(g, FC_SHARDED_POST_FORWARD));
    fc_gather_free(g);
    g->sharded_state = FC_SHARDED_POST_FORWARD;
done:
    if (status != FC_OK) {
        drop_forward(g);
    }
    fct_functorch_resume(pause);
    return status;
}

fc_status fc_group_reshard(fc_group *g) {
    if (g->training_state == FC_FORWARD) {
        if (!g->reshard_after_forward) {
            return FC_OK;
        }
        if (g->forward.name != NULL) {
            return fc_group_to_sharded_post_forward(g);
        }
    }
    return g->via->to_sharded(g);
}

/* ---- unshard ---- */

fc_status fc_group_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    fc_status status = FC_OK;
    bool between_steps = pass == FC_FORWARD || pass == FC_IDLE;
    if (g->gather.active && !between_steps) {
        return FC_OK;
    }
    uint64_t version = shard_fingerprint(g);
    bool current = version == g->gathered_version;
    if (g->gather.active) {
        if (current) {
            return FC_OK;
        }
        fc_gather_abandon(g); /* a prefetch that nobody used, and an optimizer step since */
    }
    if (g->sharded_state != FC_SHARDED) {
        if (between_steps && !current) {
            /* The shards were written since (an optimizer step after an evaluation left us
             * unsharded). */
            FC_TRY(fc_group_to_sharded(g));
        } else if (g->sharded_state == FC_UNSHARDED) {
            return mend(g);
        }
    }
    if (!g->unshard_in_backward && pass == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    FC_TRY(fc_gather_start(g, async_op, pass == FC_FORWARD || pass == FC_PRE_BACKWARD));
    g->gathered_version = version;
done:
    return status;
}

fc_status fc_group_wait_unshard(fc_group *g) {
    fc_status status = FC_OK;
    void *range = NULL;
    fct_event *copied = NULL;
    if (!g->gather.active) {
        return FC_OK;
    }
    if (g->training_state == FC_FORWARD) {
        FC_TRY(fc_comm_release_kept(g->comm));
    }
    if (g->shard.world > 1) {
        range = fc_group_enter_range(g, "all_gather_copy_out");
    }
    FC_TRY(fc_gather_await(g));
    FC_TRY(fc_gather_copy_out(g));
    status = fc_gather_end_copy_out(g, &copied);
    if (status == FC_OK) {
        status = swap_all(g, FC_UNSHARDED);
    }
    if (status != FC_OK) {
        fc_comm_put_event(g->comm, copied);
        fc_gather_free(g);
        if (g->gather.hosted) {
            fc_gather_retire(g, NULL); /* the host hands its rows out once */
        }
        goto done; /* else the rows stay: the wait can be repeated */
    }
    if (g->sharded_state == FC_SHARDED_POST_FORWARD) {
        drop_forward(g);
    }
    g->sharded_state = FC_UNSHARDED;
    fc_gather_retire(g, copied);
done:
    fct_profile_exit(range);
    return status;
}

/* ---- one training step ---- */

fc_status fc_group_pre_forward(fc_group *g, bool *entering) {
    fc_status status = FC_OK;
    note(g, "pre_forward");
    void *range = fc_group_enter_range(g, "pre_forward");
    bool first = g->training_state != FC_FORWARD;
    g->training_state = FC_FORWARD;
    FC_TRY(g->via->unshard(g, g->training_state, g->unshard_async_op));
    FC_TRY(g->via->wait_unshard(g));
    FC_TRY(fc_bucket_watch(g));
    *entering = first;
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_post_forward(fc_group *g) {
    fc_status status = FC_OK;
    note(g, "post_forward");
    void *range = fc_group_enter_range(g, "post_forward");
    if (!fct_in_backward()) {
        size_t position = 0;
        FC_TRY(g->via->reshard(g));
        FC_TRY(fc_order_append(&g->comm->order, g, &position));
        FC_TRY(fc_positions_push(&g->positions, position));
    }
    g->training_state = FC_IDLE;
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_prefetch(fc_group *g, fc_training_state pass) {
    void *range = NULL;
    if (fct_profile_active()) {
        char name[256];
        (void)snprintf(name, sizeof name, "FSDP::%s_prefetch for %s",
                       pass == FC_FORWARD ? "forward" : "backward",
                       g->name != NULL ? g->name : "None");
        range = fct_profile_enter(name);
    }
    fc_status status = g->via->unshard(g, pass, g->unshard_async_op);
    fct_profile_exit(range);
    return status;
}

/* Of a fully_shard call with several groups, the last but one in backward order prefetches all
 * groups of the unit before, so that they overlap with the reduction of the unit's first. */
static fc_status prefetch_unit(const fc_group *g, size_t position) {
    fc_status status = FC_OK;
    const fc_order *order = &g->comm->order;
    const void *target = NULL;
    while (position-- > 0) {
        fc_group *other = order->items[position];
        if (other == NULL || other->unit == g->unit) {
            continue;
        }
        if (target != NULL && other->unit != target) {
            break;
        }
        target = other->unit;
        FC_TRY(fc_group_prefetch(other, FC_PRE_BACKWARD));
    }
done:
    return status;
}

fc_status fc_group_backward_prefetch(fc_group *g) {
    if (g->training_state != FC_PRE_BACKWARD || g->positions.count == 0) {
        return FC_OK; /* several backwards: the first one has cleared the positions */
    }
    size_t position = g->positions.items[--g->positions.count];
    const fc_order *order = &g->comm->order;
    if (position == 0 || position > order->count) {
        return FC_OK;
    }
    if (g->siblings > 1) {
        return g->index == 1 ? prefetch_unit(g, position) : FC_OK;
    }
    fc_group *previous = order->items[position - 1];
    return previous != NULL ? fc_group_prefetch(previous, FC_PRE_BACKWARD) : FC_OK;
}

fc_status fc_group_pre_backward(fc_group *g, bool default_prefetch) {
    fc_status status = FC_OK;
    if (g->training_state == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    note(g, "pre_backward");
    void *range = fc_group_enter_range(g, "pre_backward");
    g->training_state = FC_PRE_BACKWARD;
    FC_TRY(fc_reduce_poll(g->comm));
    FC_TRY(g->via->unshard(g, g->training_state, g->unshard_async_op));
    FC_TRY(g->via->wait_unshard(g));
    fc_bucket_begin(g);
    if (default_prefetch) {
        FC_TRY(g->via->backward_prefetch(g));
    }
done:
    fct_profile_exit(range);
    return status;
}

/* Reduces what was collected, where there is anything to reduce. */
static fc_status reduce_grads(fc_group *g, fc_span span, bool partial_group) {
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &g->reduce_plan;
    void *range = NULL;
    if (plan->count == 0 && !fc_reduce_pending(g, span)) {
        return FC_OK;
    }
    range = fc_group_enter_range(g, "post_backward_reduce");
    bool hosted = g->host->moves != NULL && g->host->moves(g->owner, FC_MOVE_REDUCE);
    if (!hosted) {
        FC_TRY(fc_reduce_plan_lay_out(plan, g->reduce_dtype, &g->comm->error));
        hosted = plan->foreign;
    }
    if (hosted) {
        FC_TRY_RAISED(
            g->host->reduce(g->owner, plan->params, plan->grads, plan->count, partial_group));
    } else {
        FC_TRY(fc_reduce_start(g, span, partial_group));
    }
done:
    fc_reduce_plan_drop_grads(plan);
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_reduce(fc_group *g, fc_span span, bool last, bool partial) {
    fc_status status = FC_OK;
    void *range = NULL;
    size_t room = fc_bucket_in_flight(g);
    FC_TRY(fc_gradient_fold(g, span));
    FC_TRY(fc_gradient_collect(g, span, last));
    if (g->index == g->siblings - 1 && g->comm->reductions >= room) {
        range = fc_group_enter_range(g, rs_wait);
        FC_TRY(fc_reduce_recycle(g->comm, room - 1));
        fct_profile_exit(range);
        range = NULL;
    }
    FC_TRY(reduce_grads(g, span, partial));
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_post_backward(fc_group *g) {
    fc_status status = FC_OK;
    bool partial = g->module_count > 1 && g->training_state == FC_FORWARD;
    note(g, "post_backward");
    g->training_state = FC_POST_BACKWARD;
    g->deferred = !g->reduce_grads || (g->replicate.name != NULL && !g->all_reduce_grads);
    if (g->reduce_grads) {
        FC_TRY(fc_bucket_reduce_rest(g, partial));
    } else {
        FC_TRY(fc_gradient_fold(g, (fc_span){0, g->count}));
        FC_TRY(fc_gradient_keep(g));
    }
done:
    return status;
}

fc_status fc_group_leave_backward(fc_group *g) {
    return g->doubled && g->comm->has_streams ? FC_OK : g->via->post_backward(g);
}

static fc_status wait_and_put(fc_group *g, fct_event **event) {
    if (*event == NULL) {
        return FC_OK;
    }
    if (fct_event_wait(*event, fct_stream_current(g->device)) != 0) {
        return FC_ERAISED;
    }
    fc_comm_put_event(g->comm, *event);
    *event = NULL;
    return FC_OK;
}

fc_status fc_group_see_reduced(fc_group *g) {
    fc_status status = FC_OK;
    if (g->reduced != NULL) {
        FC_TRY_RAISED(fct_event_wait(g->reduced, fct_stream_current(g->device)));
    }
    if (g->host->finalize != NULL) {
        FC_TRY_RAISED(g->host->finalize(g->owner));
    }
done:
    return status;
}

fc_status fc_group_finalize_backward(fc_group *g) {
    fc_status status = FC_OK;
    FC_TRY(wait_and_put(g, &g->comm->last_reduced));
    FC_TRY(wait_and_put(g, &g->comm->last_all_reduced));
    if (g->host->finalize != NULL) {
        FC_TRY_RAISED(g->host->finalize(g->owner));
    }
    fc_comm_put_event(g->comm, g->reduced);
    g->reduced = NULL;
    if (g->gather.active) {
        FC_TRY(fc_gather_await(g));
        fc_gather_abandon(g);
    }
    g->positions.count = 0;
done:
    return status;
}

fc_status fc_group_reset(fc_group *g) {
    fc_reduce_discard(g->comm, g);
    fc_reduce_plan_drop_grads(&g->reduce_plan);
    if (g->host->drop_reduce != NULL) {
        g->host->drop_reduce(g->owner);
    }
    for (size_t i = 0; i < g->count; i++) {
        fc_param_drop_grad(g->params[i]);
    }
    fc_gather_abandon(g);
    fc_bucket_reset(g);
    g->positions.count = 0;
    g->training_state = FC_IDLE;
    g->doubled = false;
    g->deferred = false;
    fc_comm_put_event(g->comm, g->reduced);
    g->reduced = NULL;
    return g->via->to_sharded(g);
}

fc_status fc_group_check(fc_group *g) {
    if (g->gather.active && g->sharded_state == FC_UNSHARDED) {
        return fc_error_set(&g->comm->error, FC_ESTATE,
                            "a gather is in flight while the group is unsharded");
    }
    if (!g->gather.active &&
        (g->gather.buffer != NULL || g->gather.work != NULL || g->gather.done != NULL)) {
        return fc_error_set(&g->comm->error, FC_ESTATE,
                            "an inactive gather holds a buffer, work or event");
    }
    for (size_t i = 0; i < g->count; i++) {
        const fc_param *p = g->params[i];
        fct_facts facts = {0};
        if (p->flat == NULL) {
            if (g->sharded_state == FC_UNSHARDED && !p->hosted) {
                return fc_error_set(&g->comm->error, FC_ESTATE,
                                    "unsharded, but a parameter has no unsharded tensor");
            }
            continue;
        }
        if (p->aliased || g->keep_storage) {
            continue;
        }
        fct_tensor_facts(p->flat, &facts);
        bool holds = facts.storage_bytes != 0;
        bool expected = g->sharded_state == FC_UNSHARDED && facts.numel > 0;
        if (holds != expected) {
            return fc_error_set(&g->comm->error, FC_ESTATE,
                                "parameter %zu holds %lld bytes while %s", i,
                                (long long)facts.storage_bytes, expected ? "unsharded" : "sharded");
        }
    }
    return FC_OK;
}
