/* State machine of the parameter group, drawn in group.h. Owns the gather, the buckets and the
 * reducer, which perform the transfers.
 *
 * Invariant: outside of a transition every parameter's `registered_state` equals sharded_state,
 * unless `registration_dirty` is set. This file uses the current stream only through the modules
 * that it calls. */
#include "group.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/error.h"
#include "reduction.h"
#include "registration.h"

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

/* ---- invariants ---- */

/* Checks the invariants that also hold between the collection of gradients and their reduction. */
static fc_status check_registration_and_memory(fc_group *g) {
    fc_status status = FC_OK;
    FC_TRY(g->registration_dirty ? FC_OK : fc_registration_check(&g->base, g->sharded_state));
    FC_TRY(fc_group_base_check(&g->base));
    FC_TRY(fc_gather_check(&g->gather, g->sharded_state == FC_UNSHARDED));
    FC_TRY(fc_bucket_check(&g->buckets));
    FC_TRY(fc_reduction_check(g->base.comm));
    FC_TRY(fc_comm_check(g->base.comm));
done:
    return status;
}

fc_status fc_group_check(fc_group *g) {
    fc_status status = FC_OK;
    FC_TRY(check_registration_and_memory(g));
    FC_TRY(fc_reduce_check(&g->reducer));
done:
    return status;
}

/* Last step of every transition, also of a failed transition. Returns `status`. Debug builds abort
 * if `check` fails. A group without a context has run no transition. */
static fc_status verify_transition(fc_group *g, fc_status (*check)(fc_group *g), fc_status status) {
#ifndef NDEBUG
    if (g->base.comm != NULL && check(g) != FC_OK) {
        (void)fprintf(stderr, "fsdp_c: invariant broken in group '%s': %s\n",
                      g->base.name != NULL ? g->base.name : "?", g->base.comm->error.message);
        abort();
    }
#else
    (void)g;
    (void)check;
#endif
    return status;
}

/* ---- init and fini ---- */

void fc_group_init(fc_group *g, void *owner, const fc_callbacks *callbacks, fc_comm_ctx *comm,
                   fc_param **params, size_t count, fct_device device, int64_t world,
                   int64_t rank) {
    assert(callbacks != NULL && (count == 0 || params != NULL));
    memset(g, 0, sizeof *g);
    g->transitions = &fc_group_transitions;
    fc_group_base_init(&g->base, owner, callbacks, comm, params, count, device, world, rank);
    fc_gather_init(&g->gather, &g->base);
    fc_bucket_init(&g->buckets, &g->base);
    fc_reducer_init(&g->reducer, &g->base);
    g->place = (fc_place){.siblings = 1, .modules = 1};
    g->settings = (fc_group_settings){.reduce_grads = true,
                                      .reshard_after_forward = true,
                                      .reshard_after_backward = true,
                                      .unshard_in_backward = true};
    g->sharded_state = FC_SHARDED;
    g->training_state = FC_IDLE;
}

void fc_group_fini(fc_group *g) {
    assert(g->transitions != NULL || g->base.params == NULL);
    fc_comm_ctx *comm = g->base.comm;
    if (g->transitions == NULL) {
        return;
    }
    fc_gather_fini(&g->gather);
    fc_reducer_fini(&g->reducer);
    fc_bucket_fini(&g->buckets);
    if (comm != NULL) {
        fc_order_remove(&comm->order, g);
    }
    fc_index_stack_fini(&g->post_forward_indices);
    fc_group_base_fini(&g->base);
    memset(g, 0, sizeof *g);
    fct_memory_trim();
}

fc_status fc_group_set_comm(fc_group *g, fc_comm_ctx *comm) {
    assert(fc_group_is_initialized(g));
    fc_comm_ctx *before = g->base.comm;
    if (before == comm) {
        return FC_OK;
    }
    if (before != NULL && fc_reduction_has(before, &g->base)) {
        return fc_error_set(&before->error, FC_ESTATE,
                            "a parameter group cannot change its communication context while its "
                            "gradients are being reduced");
    }
    if (before != NULL) {
        fc_order_remove(&before->order, g);
        fc_reducer_return_events(&g->reducer);
        fc_gather_return_event(&g->gather);
        if (g->gather.pending.done != NULL) { /* a pending gather moves to the new context */
            fc_comm_transfer_event(before, comm);
        }
    }
    g->post_forward_indices.count = 0;
    g->base.comm = comm;
    return verify_transition(g, check_registration_and_memory, FC_OK);
}

void fc_group_invalidate(fc_group *g) {
    assert(g->transitions != NULL || g->base.params == NULL);
    fc_group_base_refresh(&g->base);
    fc_gather_invalidate(&g->gather);
    fc_bucket_invalidate(&g->buckets);
}

/* ---- sharded state ---- */

/* Registers the parameters of `state` on all modules. If that fails, restores the group's state. */
static fc_status swap_all(fc_group *g, fc_sharded_state state) {
    return fc_registration_swap(&g->base, g->sharded_state, state, &g->registration_dirty);
}

/* Registers the parameters of the group's state again after a failed rollback. */
static fc_status repair_registration(fc_group *g) {
    return g->registration_dirty ? swap_all(g, g->sharded_state) : FC_OK;
}

/* Copies requires_grad from the unsharded parameters to the sharded parameters. */
static fc_status copy_requires_grad(fc_group *g) {
    return g->sharded_state == FC_UNSHARDED ? fc_unsharded_copy_requires_grad(&g->base) : FC_OK;
}

/* Releases the shards of the post-forward process group (reshard_after_forward as an int). */
static void drop_post_forward_shards(fc_group *g) {
    if (g->sharded_state == FC_SHARDED_POST_FORWARD) {
        fc_unsharded_drop_post_forward(&g->base);
    }
}

fc_status fc_group_to_sharded(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    if (g->sharded_state == FC_SHARDED) {
        status = repair_registration(g);
        goto done;
    }
    FC_TRY(copy_requires_grad(g));
    FC_TRY(swap_all(g, FC_SHARDED));
    fc_gather_free(&g->gather);
    drop_post_forward_shards(g);
    g->sharded_state = FC_SHARDED;
done:
    return verify_transition(g, check_registration_and_memory, status);
}

void fc_group_set_keep_storage(fc_group *g, bool keep) {
    assert(fc_group_is_initialized(g));
    g->gather.keep_storage = keep;
    if (g->sharded_state != FC_UNSHARDED) {
        fc_gather_free(&g->gather);
    }
    (void)verify_transition(g, check_registration_and_memory, FC_OK);
}

fc_status fc_group_to_unsharded(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    if (g->sharded_state == FC_UNSHARDED) {
        status = repair_registration(g);
        goto done;
    }
    FC_TRY(fc_unsharded_adopt(&g->base));
    FC_TRY(swap_all(g, FC_UNSHARDED));
    fc_gather_abandon(&g->gather);
    drop_post_forward_shards(g);
    g->sharded_state = FC_UNSHARDED;
    g->gathered_version = fc_group_base_shard_version(&g->base);
done:
    return verify_transition(g, check_registration_and_memory, status);
}

fc_status fc_group_to_sharded_post_forward(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    if (g->sharded_state != FC_UNSHARDED) {
        return verify_transition(g, check_registration_and_memory, status);
    }
    if (g->base.post_forward.name == NULL) {
        return fc_error_set(&g->base.comm->error, FC_ESTATE,
                            "no smaller group: reshard_after_forward is not a number of ranks");
    }
    void *pause = fct_functorch_pause();
    FC_TRY(copy_requires_grad(g));
    FC_TRY(fc_gather_keep_post_forward(&g->gather));
    FC_TRY(swap_all(g, FC_SHARDED_POST_FORWARD));
    fc_gather_free(&g->gather);
    g->sharded_state = FC_SHARDED_POST_FORWARD;
done:
    if (status != FC_OK) {
        fc_unsharded_drop_post_forward(&g->base);
    }
    fct_functorch_resume(pause);
    return verify_transition(g, check_registration_and_memory, status);
}

fc_status fc_group_reshard(fc_group *g) {
    assert(fc_group_is_ready(g));
    bool in_forward = g->training_state == FC_FORWARD;
    fc_status status = FC_OK;
    if (in_forward && !g->settings.reshard_after_forward) {
        goto done;
    }
    FC_TRY(fc_gather_can_free(&g->gather));
    FC_TRY(in_forward && g->base.post_forward.name != NULL ? fc_group_to_sharded_post_forward(g)
                                                           : g->transitions->to_sharded(g));
done:
    return verify_transition(g, check_registration_and_memory, status);
}

/* ---- unshard ---- */

/* Only in forward does the copy-in of the next group overlap with the copy-out of this group. */
static fc_stream_mode stream_mode_for_pass(fc_training_state pass) {
    if (pass == FC_FORWARD) {
        return FC_STREAM_DEFERRED;
    }
    return pass == FC_PRE_BACKWARD ? FC_STREAM_OVERLAP : FC_STREAM_DIRECT;
}

/* Sets the training state during the gather: hooks of extended parameters read it, as in torch. */
static fc_status gather_in_pass(fc_group *g, fc_training_state pass, bool async_op) {
    const fc_training_state before = g->training_state;
    g->gather.prefetching = before != pass;
    g->training_state = pass;
    fc_status status = fc_gather_start(&g->gather, g->sharded_state == FC_SHARDED_POST_FORWARD,
                                       async_op, stream_mode_for_pass(pass));
    g->training_state = g->training_state == pass ? before : g->training_state;
    return status;
}

fc_status fc_group_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    assert(fc_group_is_ready(g) && pass >= FC_FORWARD && pass <= FC_IDLE);
    fc_status status = FC_OK;
    bool between_steps = pass == FC_FORWARD || pass == FC_IDLE;
    if (g->gather.pending.active && !between_steps) {
        goto done;
    }
    FC_TRY(fc_group_base_adopt_replaced_shards(&g->base));
    uint64_t version = fc_group_base_shard_version(&g->base);
    bool current = version == g->gathered_version;
    if (g->gather.pending.active) {
        if (current) {
            goto done;
        }
        /* An optimizer step has changed the shards since an unused prefetch. */
        fc_gather_abandon(&g->gather);
    }
    if (g->sharded_state != FC_SHARDED) {
        if (between_steps && !current) {
            /* The shards have changed since the gather, for example by an optimizer step. */
            FC_TRY(fc_group_to_sharded(g));
        } else if (g->sharded_state == FC_UNSHARDED) {
            status = repair_registration(g);
            goto done;
        }
    }
    if (!g->settings.unshard_in_backward && pass == FC_PRE_BACKWARD) {
        goto done;
    }
    const bool from_shards = g->sharded_state == FC_SHARDED; /* post-forward shards are older */
    FC_TRY(gather_in_pass(g, pass, async_op));
    g->gathered_version = from_shards ? version : g->gathered_version;
done:
    return verify_transition(g, check_registration_and_memory, status);
}

fc_status fc_group_wait_unshard(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    void *range = NULL;
    fct_event *copied = NULL;
    if (!g->gather.pending.active) {
        goto done;
    }
    if (g->training_state == FC_FORWARD) {
        FC_TRY(fc_comm_release_gather(g->base.comm));
    }
    if (g->base.shard.world > 1) {
        range = fc_group_base_enter_range(&g->base, "all_gather_copy_out");
    }
    FC_TRY(fc_gather_await(&g->gather));
    FC_TRY(fc_gather_copy_out(&g->gather));
    status = fc_gather_end_copy_out(&g->gather, stream_mode_for_pass(g->training_state), &copied);
    status = status == FC_OK ? swap_all(g, FC_UNSHARDED) : status;
    if (status != FC_OK) {
        fc_gather_undo_copy_out(&g->gather, copied);
        goto done;
    }
    drop_post_forward_shards(g);
    g->sharded_state = FC_UNSHARDED;
    fc_gather_complete(&g->gather, copied);
done:
    fct_profile_exit(range);
    return verify_transition(g, check_registration_and_memory, status);
}

/* ---- one training step ---- */

fc_status fc_group_pre_forward(fc_group *g, bool *entering) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    fc_group_base_log(&g->base, "pre_forward");
    void *range = fc_group_base_enter_range(&g->base, "pre_forward");
    bool is_first = g->training_state != FC_FORWARD;
    g->training_state = FC_FORWARD;
    FC_TRY(g->transitions->unshard(g, g->training_state, g->settings.unshard_async_op));
    FC_TRY(g->transitions->wait_unshard(g));
    FC_TRY(fc_bucket_subscribe(&g->buckets));
    *entering = is_first;
done:
    fct_profile_exit(range);
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_post_forward(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    fc_group_base_log(&g->base, "post_forward");
    void *range = fc_group_base_enter_range(&g->base, "post_forward");
    if (!fct_in_backward()) {
        size_t position = 0;
        FC_TRY(g->transitions->reshard(g));
        FC_TRY(fc_order_append(&g->base.comm->order, g, &position));
        FC_TRY(fc_index_stack_push(&g->post_forward_indices, position));
    }
    g->training_state = FC_IDLE;
done:
    fct_profile_exit(range);
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_prefetch(fc_group *g, fc_training_state pass) {
    assert(fc_group_is_ready(g) && pass >= FC_FORWARD && pass <= FC_IDLE);
    const char *name = pass == FC_FORWARD ? "forward" : "backward";
    void *range = fc_group_base_enter_prefetch(&g->base, name);
    fc_status status = g->transitions->unshard(g, pass, g->settings.unshard_async_op);
    fct_profile_exit(range);
    return verify_transition(g, check_registration_and_memory, status);
}

/* Prefetches `g`, a target in the post-forward order. A CPU-bound gather is not prefetched: the
 * prefetch saves no time and keeps one more unit unsharded. */
static fc_status prefetch_by_order(fc_group *g) {
    const bool post_forward = g->sharded_state == FC_SHARDED_POST_FORWARD;
    return fc_gather_is_cpu_bound(&g->gather, post_forward) ? FC_OK
                                                            : fc_group_prefetch(g, FC_PRE_BACKWARD);
}

/* Calls `visit` for all groups of the fully_shard call before that of `g` in the post-forward
 * order. `g` has index 1. Backward reaches the groups of a call from the highest index to index 0,
 * so the gathers overlap the reduction of group 0. */
static fc_status visit_preceding_unit(const fc_group *g, size_t position, fc_visit visit) {
    fc_status status = FC_OK;
    const fc_order *order = &g->base.comm->order;
    const void *unit = NULL;
    while (position-- > 0) {
        fc_group *other = order->items[position];
        if (other == NULL || other->place.unit == g->place.unit) {
            continue;
        }
        if (unit != NULL && other->place.unit != unit) {
            break;
        }
        unit = other->place.unit;
        FC_TRY(visit(other));
    }
done:
    return status;
}

/* Calls `visit` for the groups that `g` prefetches. `position`: index in the post-forward order of
 * the forward whose backward runs. */
static fc_status visit_targets(const fc_group *g, size_t position, fc_visit visit) {
    const fc_order *order = &g->base.comm->order;
    if (position == 0 || position > order->count) {
        return FC_OK;
    }
    if (g->place.siblings > 1) {
        return g->place.index == 1 ? visit_preceding_unit(g, position, visit) : FC_OK;
    }
    fc_group *previous = order->items[position - 1];
    return previous != NULL ? visit(previous) : FC_OK;
}

fc_status fc_group_visit_targets(const fc_group *g, fc_visit visit) {
    const fc_index_stack *indices = &g->post_forward_indices;
    return indices->count > 0 ? visit_targets(g, indices->items[indices->count - 1], visit) : FC_OK;
}

fc_status fc_group_backward_prefetch(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    fc_index_stack *indices = &g->post_forward_indices;
    /* The second backward through a forward has no index: the first has removed it. */
    if (g->training_state == FC_PRE_BACKWARD && indices->count > 0) {
        status = visit_targets(g, indices->items[--indices->count], prefetch_by_order);
    }
    return verify_transition(g, check_registration_and_memory, status);
}

/* Returns true if nothing but the buckets can prevent an eager backward (bucket.h). */
static bool can_be_eager(const fc_group *g) {
    return g->backward_kind == FC_BACKWARD_SOLE_GROUP && g->settings.reduce_grads &&
           !g->reducer.reduce_unused && !g->reducer.has_hook &&
           !fc_group_base_uses_fallback(&g->base, FC_FALLBACK_EAGER);
}

fc_status fc_group_pre_backward(fc_group *g, bool default_prefetch) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    void *range = NULL;
    if (g->training_state == FC_PRE_BACKWARD) {
        goto done;
    }
    fc_group_base_log(&g->base, "pre_backward");
    range = fc_group_base_enter_range(&g->base, "pre_backward");
    g->training_state = FC_PRE_BACKWARD;
    FC_TRY(fc_reduction_poll(g->base.comm));
    FC_TRY(g->transitions->unshard(g, g->training_state, g->settings.unshard_async_op));
    FC_TRY(g->transitions->wait_unshard(g));
    FC_TRY(fc_gradient_begin(&g->base, g->settings.reduce_grads));
    fc_bucket_begin(&g->buckets, can_be_eager(g));
    if (default_prefetch) {
        FC_TRY(g->transitions->backward_prefetch(g));
    }
done:
    fct_profile_exit(range);
    return verify_transition(g, fc_group_check, status);
}

/* Completes the oldest reductions until one more may be in flight. Only the group with the highest
 * index of a call waits, because backward reaches it first, as in torch. */
static fc_status limit_reductions(fc_group *g) {
    fc_status status = FC_OK;
    fc_comm_ctx *c = g->base.comm;
    size_t limit = fc_bucket_in_flight(&g->buckets);
    if (g->place.index == g->place.siblings - 1 && c->reductions >= limit) {
        void *range = fc_group_base_enter_range(&g->base, "post_backward_rs_wait");
        status = fc_reduction_recycle(c, limit - 1);
        fct_profile_exit(range);
    }
    return status;
}

static fc_status reshard_in_backward(fc_group *g) {
    bool keeps_unsharded =
        !g->settings.reshard_after_backward || g->backward_kind == FC_BACKWARD_UNTRACKED;
    return keeps_unsharded ? FC_OK : g->transitions->reshard(g);
}

/* Accumulates and collects the gradients of a span, then issues their reduction. `reshards_first`:
 * backward does not use the parameters any more, so the group reshards before the reduction. */
static fc_status reduce_span(fc_group *g, fc_span span, bool reshards_first, bool order_compute) {
    fc_status status = FC_OK;
    fc_reducer *reducer = &g->reducer;
    void *range = NULL;
    FC_TRY(fc_gradient_accumulate(&g->base, span));
    range = fc_group_base_enter_range(&g->base, "post_backward_reshard");
    FC_TRY(fc_gradient_collect(&g->base, span, reducer->reduce_unused, &reducer->plan));
    FC_TRY(reshards_first ? reshard_in_backward(g) : FC_OK);
    fct_profile_exit(range);
    range = NULL;
    FC_TRY(limit_reductions(g));
    FC_TRY(fc_reduce_run(reducer, span, order_compute));
done:
    fc_reduce_plan_drop_grads(&reducer->plan); /* after a failure the gradients are lost */
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_reduce_buckets(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    fc_span span;
    while (fc_bucket_next(&g->buckets, &span)) {
        FC_TRY(reduce_span(g, span, false, false));
    }
done:
    return verify_transition(g, fc_group_check, status);
}

/* Reduces the remaining gradients by bucket, or together if Python code or a hook needs all. */
static fc_status reduce_remaining(fc_group *g, bool order_compute) {
    fc_status status = FC_OK;
    const fc_buckets *b = &g->buckets;
    FC_TRY(g->reducer.reduce_unused ? fc_gradient_check_zeros(&g->base) : FC_OK);
    if (!fc_bucket_has_several(b) || g->reducer.has_hook ||
        fc_group_base_uses_fallback(&g->base, FC_FALLBACK_REDUCE)) {
        return reduce_span(g, fc_group_base_all(&g->base), true, order_compute);
    }
    for (size_t i = 0; i < b->count; i++) {
        FC_TRY(reduce_span(g, b->items[i].span, i == 0, order_compute));
    }
done:
    return status;
}

/* Accumulates the gradients and reshards, without a reduction. */
static fc_status keep_gradients(fc_group *g) {
    fc_status status = FC_OK;
    void *range = NULL;
    FC_TRY(fc_gradient_accumulate(&g->base, fc_group_base_all(&g->base)));
    range = fc_group_base_enter_range(&g->base, "post_backward_reshard");
    FC_TRY(reshard_in_backward(g));
    FC_TRY(fc_gradient_to_accumulated(&g->base));
done:
    fct_profile_exit(range);
    return status;
}

fc_status fc_group_post_backward(fc_group *g) {
    assert(fc_group_is_ready(g));
    bool order_compute = g->place.modules > 1 && g->training_state == FC_FORWARD;
    bool reduces = g->settings.reduce_grads;
    fc_group_base_log(&g->base, "post_backward");
    g->training_state = FC_POST_BACKWARD;
    g->deferred =
        !reduces || (fc_group_base_is_replicated(&g->base) && !g->reducer.all_reduce_grads);
    fc_bucket_end(&g->buckets);
    fc_status status = reduces ? reduce_remaining(g, order_compute) : keep_gradients(g);
    status = status == FC_OK ? fc_gradient_end(&g->base) : status;
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_leave_backward(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = g->backward_kind == FC_BACKWARD_DOUBLE && g->base.comm->has_streams
                           ? FC_OK
                           : g->transitions->post_backward(g);
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_finalize_backward(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_status status = FC_OK;
    FC_TRY(fc_reduce_settle(&g->reducer));
    if (g->gather.pending.active) {
        FC_TRY(fc_gather_await(&g->gather));
        fc_gather_abandon(&g->gather);
    }
    g->post_forward_indices.count = 0;
done:
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_complete_reductions(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_comm_ctx *c = g->base.comm;
    fc_status status =
        c->has_streams ? fc_reduce_order_compute(&g->reducer) : fc_reduction_recycle(c, 0);
    return verify_transition(g, fc_group_check, status);
}

fc_status fc_group_reset(fc_group *g) {
    assert(fc_group_is_ready(g));
    fc_reduce_reset(&g->reducer);
    fc_gradient_drop(&g->base);
    fc_gather_abandon(&g->gather);
    fc_bucket_end(&g->buckets);
    g->post_forward_indices.count = 0;
    g->training_state = FC_IDLE;
    g->backward_kind = FC_BACKWARD_PLAIN;
    g->deferred = false;
    fct_memory_trim();
    fc_status status = fc_gradient_end(&g->base);
    status = status == FC_OK ? g->transitions->to_sharded(g) : status;
    return verify_transition(g, fc_group_check, status);
}
