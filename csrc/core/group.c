/* The parameter group's state machine (drawn in group.h). Owns its arrays, plans, the gather in
 * flight and its process group handle; borrows parameters and the comm context. Stream rules:
 * copy-in and gather run on the context's gather streams in forward and pre-backward and on the
 * current stream otherwise; copy-out always on the current stream. */
#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "transfer.h"

/* ---- life ---- */

void fc_group_init(fc_group *g, void *owner, const fc_host *host, fc_comm *comm, fc_param **params,
                   size_t count, fct_device device, int64_t world, int64_t rank) {
    memset(g, 0, sizeof *g);
    g->owner = owner;
    g->host = host;
    g->comm = comm;
    g->params = params;
    g->count = count;
    g->module_count = 1;
    g->device = device;
    g->world = world;
    g->rank = rank;
    g->sharded_state = FC_SHARDED;
    g->training_state = FC_IDLE;
    g->reduce_grads = true;
    g->all_reduce_grads = true;
    g->reshard_after_forward = true;
    g->reshard_after_backward = true;
    g->unshard_in_backward = true;
    g->orig_dtype = FCT_NO_DTYPE;
    g->reduce_dtype = FCT_NO_DTYPE;
}

/* Gives up on the gather in flight without waiting. */
static void drop_gather(fc_group *g) {
    if (!g->gather.active) {
        return;
    }
    if (g->comm != NULL) {
        fc_comm_park(g->comm, g->gather.work, g->gather.buffer, NULL);
        fc_comm_put_event(g->comm, g->gather.done);
    }
    memset(&g->gather, 0, sizeof g->gather);
}

/* The same with work on the buffer still queued: whichever stream it was allocated on waits for
 * that first. */
static void abandon_gather(fc_group *g) {
    if (g->gather.active && g->comm != NULL && g->comm->streams_ready) {
        fct_stream current = fct_stream_current(g->device);
        fc_comm_settle_streams(g->comm, current, g->comm->gather_stream);
        fc_comm_settle_streams(g->comm, g->comm->copy_in_stream, current);
    }
    drop_gather(g);
}

void fc_group_fini(fc_group *g) {
    abandon_gather(g);
    if (g->comm != NULL) {
        fc_reduce_discard(g->comm, g);
        fc_order_forget(&g->comm->order, g);
        fc_comm_put_event(g->comm, g->reduced);
    }
    fc_gather_plan_fini(&g->gather_plan);
    fc_reduce_plan_fini(&g->reduce_plan);
    fc_positions_fini(&g->positions);
    fct_pg_release(g->pg);
    free((void *)g->params);
    memset(g, 0, sizeof *g);
}

fc_status fc_group_set_comm(fc_group *g, fc_comm *comm) {
    if (g->comm == comm) {
        return FC_OK;
    }
    if (g->comm != NULL) {
        fc_reduce_discard(g->comm, g);
        fc_order_forget(&g->comm->order, g);
        fc_comm_put_event(g->comm, g->reduced);
        g->reduced = NULL;
    }
    g->positions.count = 0;
    g->comm = comm;
    return FC_OK;
}

void fc_group_invalidate(fc_group *g) {
    g->gather_plan.valid = false;
}

/* ---- profiler ranges, with stock's names ---- */

static void *enter_range(const fc_group *g, const char *label) {
    char name[256];
    if (!fct_profile_active()) {
        return NULL;
    }
    if (g->name != NULL && g->name[0] != '\0') {
        (void)snprintf(name, sizeof name, "FSDP::%s (%s)", label, g->name);
    } else {
        (void)snprintf(name, sizeof name, "FSDP::%s", label);
    }
    return fct_profile_enter(name);
}

/* ---- sharded state ---- */

/* Changes whenever a shard is written, replaced or moved: through its local tensor and by
 * optimizers (the version of sharded_data), or by operations on the parameter as a whole (the
 * host's). */
static uint64_t shard_fingerprint(const fc_group *g) {
    uint64_t print = 0;
    for (size_t i = 0; i < g->count; i++) {
        const fct_tensor *data = g->params[i]->sharded_data;
        uint64_t one = (uint64_t)(uintptr_t)data;
        if (data != NULL) {
            one += fct_tensor_version(data);
        }
        if (g->host->shard_version != NULL) {
            one += (uint64_t)g->host->shard_version(g->params[i]->owner) << 32;
        }
        print = print * UINT64_C(1099511628211) + one;
    }
    return print;
}

/* Registers one side on all modules; on failure the other side again, also where the failed swap
 * got half way. */
static fc_status swap_all(fc_group *g, bool unsharded) {
    for (size_t i = 0; i < g->count; i++) {
        if (g->host->swap(g->params[i]->owner, unsharded) != 0) {
            void *error = fct_error_set_aside();
            for (size_t back = i + 1; back-- > 0;) {
                (void)g->host->swap(g->params[back]->owner, !unsharded);
            }
            fct_error_put_back(error);
            return FC_ERAISED;
        }
    }
    return FC_OK;
}

fc_status fc_group_to_sharded(fc_group *g) {
    fc_status status = FC_OK;
    if (g->sharded_state == FC_SHARDED) {
        return FC_OK;
    }
    FC_TRY(swap_all(g, false));
    for (size_t i = 0; i < g->count; i++) {
        fc_param_free_flat(g->params[i]);
    }
    g->sharded_state = FC_SHARDED;
done:
    return status;
}

fc_status fc_group_reshard(fc_group *g) {
    if (g->training_state == FC_FORWARD && !g->reshard_after_forward) {
        return FC_OK;
    }
    return fc_group_to_sharded(g);
}

/* ---- unshard ---- */

static fc_status prepare_gather(fc_group *g) {
    fc_status status = FC_OK;
    if (g->pg == NULL && g->world > 1) {
        FC_TRY_RAISED(fct_pg_resolve(g->pg_name, &g->pg));
    }
    if (!g->gather_plan.valid) {
        FC_TRY(fc_gather_plan_build(&g->gather_plan, g->params, g->count, &g->comm->error));
    }
    fc_comm_reap(g->comm);
done:
    return status;
}

/* Allocates the gather buffer, packs this rank's row and issues the collective, all on the current
 * stream. `gather` stream is the one the collective goes to; on failure nothing is kept. */
static fc_status issue_gather(fc_group *g, bool async_op, const fct_stream *gather_stream,
                              fc_gather *gather) {
    fc_status status = FC_OK;
    fct_tensor *input = NULL;
    const fc_gather_plan *plan = &g->gather_plan;
    const int64_t size[1] = {plan->row_numel};
    const int64_t stride[1] = {1};
    FC_TRY_RAISED(
        fct_tensor_empty(g->world * plan->row_numel, plan->dtype, g->device, &gather->buffer));
    FC_TRY(fc_transfer_pack(&g->gather_plan, g->params, gather->buffer, g->rank, &g->comm->error));
    FC_TRY_RAISED(
        fct_tensor_alias(gather->buffer, 1, size, stride, g->rank * plan->row_numel, &input));
    if (gather_stream != NULL) {
        FC_TRY(fc_comm_order_streams(g->comm, *gather_stream, fct_stream_current(g->device)));
        (void)fct_stream_set_current(*gather_stream);
    }
    FC_TRY_RAISED(fct_all_gather(g->pg, gather->buffer, input, async_op, &gather->work));
    if (gather_stream != NULL && gather->work != NULL) {
        FC_TRY_RAISED(fct_work_wait(gather->work));
        fct_work_release(gather->work);
        gather->work = NULL;
    }
    if (g->comm->has_streams && !async_op) {
        FC_TRY(fc_comm_record(g->comm, fct_stream_current(g->device), &gather->done));
    }
done:
    fct_tensor_release(input);
    return status;
}

static fc_status start_gather(fc_group *g, bool async_op) {
    fc_status status = FC_OK;
    fc_gather gather = {.active = true, .async_op = async_op};
    void *range = NULL;
    FC_TRY(prepare_gather(g));
    if (g->world == 1 || g->gather_plan.row_bytes == 0) {
        g->gather = gather; /* nothing to send: wait copies straight from the shards */
        return FC_OK;
    }
    range = enter_range(g, "all_gather");
    if (g->comm->streams_ready && !async_op &&
        (g->training_state == FC_FORWARD || g->training_state == FC_PRE_BACKWARD)) {
        fct_stream previous = fct_stream_set_current(g->comm->copy_in_stream);
        status = issue_gather(g, async_op, &g->comm->gather_stream, &gather);
        (void)fct_stream_set_current(previous);
    } else {
        status = issue_gather(g, async_op, NULL, &gather);
    }
    g->gather = gather;
    if (status != FC_OK) {
        abandon_gather(g);
    }
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_unshard(fc_group *g, bool async_op) {
    fc_status status = FC_OK;
    if (g->gather.active) {
        return FC_OK;
    }
    uint64_t version = shard_fingerprint(g);
    if (g->sharded_state == FC_UNSHARDED) {
        bool between_steps = g->training_state == FC_FORWARD || g->training_state == FC_IDLE;
        if (!between_steps || version == g->gathered_version) {
            return FC_OK;
        }
        /* The shards were written since (an optimizer step after an evaluation left us unsharded).
         */
        FC_TRY(fc_group_to_sharded(g));
    }
    if (!g->unshard_in_backward && g->training_state == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    FC_TRY(start_gather(g, async_op));
    g->gathered_version = version;
done:
    return status;
}

/* Makes the current stream (or the host) see the gathered rows. */
static fc_status await_gather(fc_group *g) {
    fc_status status = FC_OK;
    if (g->gather.done != NULL) {
        FC_TRY_RAISED(fct_event_wait(g->gather.done, fct_stream_current(g->device)));
    }
    if (g->gather.work != NULL) {
        FC_TRY_RAISED(fct_work_wait(g->gather.work));
        fct_work_release(g->gather.work);
        g->gather.work = NULL;
    }
done:
    return status;
}

/* Everything of the unshard that can fail: memory, contents and the parameter objects. On failure
 * no flat tensor holds memory. */
static fc_status fill_unsharded(fc_group *g) {
    fc_status status = FC_OK;
    size_t allocated = 0;
    fct_facts facts;
    for (; allocated < g->count; allocated++) {
        FC_TRY(fc_param_alloc_flat(g->params[allocated], g->device, &facts, &g->comm->error));
    }
    if (g->world == 1) {
        FC_TRY(fc_transfer_fill(&g->gather_plan, g->params, g->device, &g->comm->error));
    } else if (g->gather.buffer != NULL) {
        FC_TRY(fc_transfer_unpack(&g->gather_plan, g->params, g->gather.buffer, g->world,
                                  &g->comm->error));
    }
    for (size_t i = 0; i < g->count; i++) {
        fc_param *p = g->params[i];
        if (p->unsharded == NULL) {
            fct_tensor *made = NULL;
            FC_TRY_RAISED(g->host->make_unsharded(p->owner, p->flat, &made));
            fct_tensor_retain(made);
            p->unsharded = made;
        }
        bool wanted = g->host->requires_grad(p->owner);
        if (fct_tensor_requires_grad(p->unsharded) != wanted) {
            FC_TRY_RAISED(fct_tensor_set_requires_grad(p->unsharded, wanted));
        }
    }
    return FC_OK;
done:
    for (size_t i = 0; i < g->count; i++) {
        fc_param_free_flat(g->params[i]);
    }
    return status;
}

/* The buffer's end: kept for the next group's wait where copy-in may overlap, freed otherwise. */
static fc_status retire_gather_buffer(fc_group *g) {
    fc_status status = FC_OK;
    fct_event *copied = NULL;
    if (g->comm->has_streams && g->gather.buffer != NULL) {
        FC_TRY(fc_comm_record(g->comm, fct_stream_current(g->device), &copied));
        if (!g->gather.async_op && g->training_state == FC_FORWARD) {
            g->comm->kept.buffer = g->gather.buffer;
            g->comm->kept.copied = copied;
            g->gather.buffer = NULL;
            copied = NULL;
        } else {
            FC_TRY(fc_comm_gather_streams_wait(g->comm, copied));
        }
    }
done:
    fc_comm_put_event(g->comm, copied);
    return status;
}

fc_status fc_group_wait_unshard(fc_group *g) {
    fc_status status = FC_OK;
    void *range = NULL;
    if (!g->gather.active) {
        return FC_OK;
    }
    if (g->training_state == FC_FORWARD) {
        FC_TRY(fc_comm_release_kept(g->comm));
    }
    if (g->world > 1) {
        range = enter_range(g, "all_gather_copy_out");
    }
    FC_TRY(await_gather(g));
    if (!g->gather_plan.valid) {
        FC_TRY(fc_gather_plan_build(&g->gather_plan, g->params, g->count, &g->comm->error));
    }
    FC_TRY(fill_unsharded(g));
    status = retire_gather_buffer(g);
    if (status == FC_OK) {
        status = swap_all(g, true);
    }
    if (status != FC_OK) {
        for (size_t i = 0; i < g->count; i++) {
            fc_param_free_flat(g->params[i]);
        }
        goto done;
    }
    g->sharded_state = FC_UNSHARDED;
    drop_gather(g);
done:
    fct_profile_exit(range);
    return status;
}

/* ---- one training step ---- */

fc_status fc_group_pre_forward(fc_group *g, bool *entering) {
    fc_status status = FC_OK;
    void *range = enter_range(g, "pre_forward");
    bool first = g->training_state != FC_FORWARD;
    g->training_state = FC_FORWARD;
    FC_TRY(fc_group_unshard(g, g->unshard_async_op));
    FC_TRY(fc_group_wait_unshard(g));
    *entering = first;
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_post_forward(fc_group *g) {
    fc_status status = FC_OK;
    void *range = enter_range(g, "post_forward");
    if (!fct_in_backward()) {
        size_t position = 0;
        FC_TRY(fc_group_reshard(g));
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
    fc_training_state before = g->training_state;
    g->training_state = pass;
    fc_status status = fc_group_unshard(g, g->unshard_async_op);
    g->training_state = before;
    fct_profile_exit(range);
    return status;
}

static fc_status prefetch_previous(fc_group *g) {
    if (g->positions.count == 0) {
        return FC_OK; /* several backwards: the first one has cleared them */
    }
    size_t position = g->positions.items[--g->positions.count];
    const fc_order *order = &g->comm->order;
    if (position == 0 || position > order->count || order->items[position - 1] == NULL) {
        return FC_OK;
    }
    return fc_group_prefetch(order->items[position - 1], FC_PRE_BACKWARD);
}

fc_status fc_group_pre_backward(fc_group *g, bool default_prefetch) {
    fc_status status = FC_OK;
    if (g->training_state == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    void *range = enter_range(g, "pre_backward");
    g->training_state = FC_PRE_BACKWARD;
    FC_TRY(fc_reduce_poll(g->comm));
    FC_TRY(fc_group_unshard(g, g->unshard_async_op));
    FC_TRY(fc_group_wait_unshard(g));
    if (default_prefetch) {
        FC_TRY(prefetch_previous(g));
    }
done:
    fct_profile_exit(range);
    return status;
}

static fc_status fold_grads(fc_group *g) {
    fc_status status = FC_OK;
    void *range = enter_range(g, "post_backward_accumulate");
    for (size_t i = 0; i < g->count; i++) {
        FC_TRY(fc_param_fold_grad(g->params[i]));
    }
done:
    fct_profile_exit(range);
    return status;
}

/* Reshards, then keeps the gradients here: a backward that does not reduce. */
static fc_status keep_grads(fc_group *g) {
    fc_status status = FC_OK;
    void *range = enter_range(g, "post_backward_reshard");
    if (g->reshard_after_backward) {
        FC_TRY(fc_group_reshard(g));
    }
    for (size_t i = 0; i < g->count; i++) {
        FC_TRY(fc_param_stash_grad(g->params[i]));
    }
done:
    fct_profile_exit(range);
    return status;
}

/* Takes the gradients out of the parameters, then reshards (before the reduction: less memory). */
static fc_status collect_grads(fc_group *g) {
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &g->reduce_plan;
    void *range = enter_range(g, "post_backward_reshard");
    FC_TRY(fc_reduce_plan_reserve(plan, g->count));
    fc_reduce_plan_drop_grads(plan);
    for (size_t i = 0; i < g->count; i++) {
        fct_tensor *grad = NULL;
        fc_param_take_grad(g->params[i], &grad);
        if (grad == NULL && g->reduce_unused && g->params[i]->unsharded != NULL &&
            fct_tensor_requires_grad(g->params[i]->unsharded)) {
            FC_TRY_RAISED(fct_tensor_zeros_like(g->params[i]->unsharded, &grad));
        }
        if (grad != NULL) {
            plan->params[plan->count] = g->params[i];
            plan->grads[plan->count] = grad;
            plan->count++;
        }
    }
    if (g->reshard_after_backward) {
        FC_TRY(fc_group_reshard(g));
    }
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_post_backward(fc_group *g) {
    fc_status status = FC_OK;
    bool partial = g->module_count > 1 && g->training_state == FC_FORWARD;
    void *range = NULL;
    g->training_state = FC_POST_BACKWARD;
    FC_TRY(fold_grads(g));
    if (!g->reduce_grads) {
        FC_TRY(keep_grads(g));
        return FC_OK;
    }
    FC_TRY(collect_grads(g));
    if (g->comm->reductions >= g->comm->max_reductions) {
        range = enter_range(g, "post_backward_rs_wait");
        FC_TRY(fc_reduce_recycle(g->comm, g->comm->max_reductions - 1));
        fct_profile_exit(range);
        range = NULL;
    }
    if (g->reduce_plan.count > 0) {
        range = enter_range(g, "post_backward_reduce");
        FC_TRY(fc_reduce_start(g, partial));
    }
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_finalize_backward(fc_group *g) {
    fc_status status = FC_OK;
    if (g->comm->last_reduced != NULL) {
        FC_TRY_RAISED(fct_event_wait(g->comm->last_reduced, fct_stream_current(g->device)));
        fc_comm_put_event(g->comm, g->comm->last_reduced);
        g->comm->last_reduced = NULL;
    }
    fc_comm_put_event(g->comm, g->reduced);
    g->reduced = NULL;
    if (g->gather.active) {
        FC_TRY(await_gather(g));
        abandon_gather(g);
    }
    g->positions.count = 0;
done:
    return status;
}

fc_status fc_group_reset(fc_group *g) {
    fc_reduce_discard(g->comm, g);
    fc_reduce_plan_drop_grads(&g->reduce_plan);
    for (size_t i = 0; i < g->count; i++) {
        fc_param_drop_grad(g->params[i]);
    }
    abandon_gather(g);
    g->positions.count = 0;
    g->training_state = FC_IDLE;
    fc_comm_put_event(g->comm, g->reduced);
    g->reduced = NULL;
    return fc_group_to_sharded(g);
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
            if (g->sharded_state == FC_UNSHARDED) {
                return fc_error_set(&g->comm->error, FC_ESTATE,
                                    "unsharded, but a parameter has no unsharded tensor");
            }
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
