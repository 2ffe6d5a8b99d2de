/* FSDP states and the iteration that they share. Owns arrays of borrowed pointers only. This file
 * contains the calls that a state makes to its groups in each hook. The part of a hook that handles
 * tensors and Python objects is in csrc/python/step.c.
 *
 * Invariant: at most one end-of-backward callback is registered per backward (callback_queued).
 * Streams: an iteration starts by ordering the gather streams after the compute stream. */
#include "state.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reduction.h"
#include "unsharded.h"

void fc_iteration_init(fc_iteration *it) {
    memset(it, 0, sizeof *it);
    it->is_last_backward = true;
}

/* Returns true if the root has only one group. */
static bool has_single_group(const fc_iteration *it) {
    size_t groups = 0;
    for (size_t i = 0; i < it->count && groups < 2; i++) {
        groups += it->states[i]->group_count;
    }
    return groups == 1;
}

void fc_iteration_update_siblings(const fc_iteration *it) {
    assert(it->count == 0 || it->states != NULL);
    const bool has_siblings = !has_single_group(it);
    for (size_t i = 0; i < it->count; i++) {
        for (size_t j = 0; j < it->states[i]->group_count; j++) {
            fc_bucket_set_siblings(&it->states[i]->groups[j]->buckets, has_siblings);
        }
    }
}

void fc_iteration_set_states(fc_iteration *it, fc_state **states, size_t count) {
    assert(count == 0 || states != NULL);
    free((void *)it->states);
    it->states = states;
    it->count = count;
    fc_iteration_update_siblings(it);
}

void fc_iteration_fini(fc_iteration *it) {
    assert(it->count == 0 || it->states != NULL);
    fc_iteration_set_states(it, NULL, 0);
}

/* ---- invariants ---- */

static fc_status check_iteration(const fc_iteration *it, fc_error *error) {
    if (it->callback_counted && !it->callback_queued) {
        return fc_error_set(error, FC_ESTATE, "a callback is counted that was not queued");
    }
    for (size_t i = 0; i < it->count; i++) {
        if (it->states[i] == NULL) {
            return fc_error_set(error, FC_ESTATE, "state %zu of %zu is missing", i, it->count);
        }
    }
    return FC_OK;
}

fc_status fc_state_check(const fc_state *s) {
    fc_status status = FC_OK;
    FC_TRY(check_iteration(s->iteration, &s->comm->error));
    for (size_t i = 0; i < s->group_count; i++) {
        FC_TRY(fc_group_check(s->groups[i]));
    }
done:
    return status;
}

/* Runs as the last step of a hook, also if the hook returns early or fails. Returns `status`. Debug
 * builds abort if an invariant is violated. */
static fc_status verify_state(const fc_state *s, fc_status status) {
#ifndef NDEBUG
    for (size_t i = 0; i < s->group_count; i++) {
        assert(fc_group_is_ready(s->groups[i]));
    }
    if (fc_state_check(s) != FC_OK) {
        (void)fprintf(stderr, "fsdp_c: invariant broken in a state: %s\n", s->comm->error.message);
        abort();
    }
#else
    (void)s;
#endif
    return status;
}

/* Runs verify_state for all states of the iteration. */
static fc_status verify_iteration(const fc_iteration *it, fc_status status) {
#ifndef NDEBUG
    for (size_t i = 0; i < it->count; i++) {
        if (it->states[i]->comm != NULL) {
            FC_IGNORE(verify_state(it->states[i], FC_OK));
        }
    }
#else
    (void)it;
#endif
    return status;
}

/* ---- visits ---- */

/* Visits the groups of each state, in the order of the array. `reverse`: visits the groups of one
 * state from the last to the first. */
static fc_status visit_states(struct fc_state *const *states, size_t count, bool reverse,
                              fc_visit visit) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < count; i++) {
        /* A visit may replace the array. The former array is freed later. */
        fc_group *const *groups = states[i]->groups;
        const size_t group_count = states[i]->group_count;
        for (size_t j = 0; j < group_count; j++) {
            FC_TRY(visit(groups[reverse ? group_count - 1 - j : j]));
        }
    }
done:
    return status;
}

fc_status fc_state_visit_groups(const fc_state *s, fc_visit visit) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < s->group_count; i++) {
        FC_TRY(visit(s->groups[i]));
    }
done:
    return status;
}

fc_status fc_state_visit_forward_prefetch(const fc_state *s, fc_visit visit) {
    return visit_states(s->forward_prefetch, s->forward_prefetch_count, false, visit);
}

static fc_status visit_backward_prefetch(const fc_state *s, fc_visit visit) {
    return visit_states(s->backward_prefetch, s->backward_prefetch_count, true, visit);
}

fc_status fc_state_visit_pre_backward(const fc_state *s, fc_visit visit) {
    fc_status status = FC_OK;
    FC_TRY(fc_state_visit_groups(s, visit));
    FC_TRY(visit_backward_prefetch(s, visit));
    for (size_t i = 0; s->backward_prefetch_count == 0 && i < s->group_count; i++) {
        FC_TRY(fc_group_visit_targets(s->groups[i], visit));
    }
done:
    return status;
}

fc_status fc_iteration_visit_groups(const fc_iteration *it, fc_visit visit) {
    return visit_states(it->states, it->count, false, visit);
}

/* ---- end of a backward ---- */

/* Returns a fingerprint that changes if a backward with create_graph=True gives a parameter a
 * gradient. Such a backward adds gradients out of place, so it replaces the gradient tensor. */
static uint64_t grad_fingerprint(const fc_group *g) {
    uint64_t fingerprint = 0;
    for (size_t i = 0; i < g->base.count; i++) {
        const fct_tensor *unsharded = g->base.params[i]->unsharded;
        const void *grad = unsharded != NULL ? fct_grad_identity(unsharded) : NULL;
        fingerprint = fingerprint * UINT64_C(1099511628211) + (uint64_t)(uintptr_t)grad;
    }
    return fingerprint;
}

/* Returns true if a backward with create_graph=True entered the group, did not reach its
 * post-backward node and gave no parameter a gradient. Such a backward computed gradients of inner
 * tensors. The next backward can enter the graph that was recorded without running a hook. */
static bool entered_untracked(const fc_group *g) {
    return g->training_state == FC_PRE_BACKWARD && grad_fingerprint(g) == g->grads_before;
}

/* Runs the post-backward of a group that autograd did not reach, because no input requires grad. If
 * the next backward may need the parameters without a hook, the parameters stay unsharded until the
 * end of that backward. */
static fc_status finish_group(fc_group *g, bool records) {
    if (records && entered_untracked(g)) {
        g->backward_kind = FC_BACKWARD_UNTRACKED;
    }
    fc_status status = g->transitions->post_backward(g);
    g->backward_kind = FC_BACKWARD_PLAIN;
    return status;
}

static fc_status finish_groups(fc_state *s) {
    fc_status status = FC_OK;
    fc_group *const *groups = s->groups; /* a hook of a gradient may replace the array */
    for (size_t i = s->group_count; i-- > 0;) {
        fc_group *g = groups[i];
        if (g->training_state != FC_POST_BACKWARD) {
            FC_TRY(finish_group(g, s->iteration->records));
        }
        g->training_state = FC_IDLE;
        g->backward_kind = FC_BACKWARD_PLAIN;
    }
    s->training_state = FC_IDLE;
done:
    return status;
}

/* Removes groups that have no outstanding backward. The indices of the remaining groups do not
 * change, because other roots may share the context. */
static void prune_order(fc_order *order) {
    size_t end = 0;
    for (size_t i = 0; i < order->count; i++) {
        if (order->items[i] != NULL && order->items[i]->post_forward_indices.count == 0) {
            order->items[i] = NULL;
        }
        end = order->items[i] != NULL ? i + 1 : end;
    }
    order->count = end;
}

/* Ends the backward in one comm context. `last`: no further backward belongs to this step. */
static fc_status end_backward_in_comm(fc_comm_ctx *c, bool last) {
    if (last) {
        prune_order(&c->order);
    }
    fc_status status = last || !c->has_streams ? fc_reduction_recycle(c, 0) : FC_OK;
    return status == FC_OK && last ? fc_comm_release_outputs(c) : status;
}

/* Removes groups without an outstanding backward from the order, so that the next backward does not
 * prefetch them. Used if the caller completes backwards (fc_iteration.manual). */
static fc_status prune_order_in_comm(fc_comm_ctx *c, bool unused) {
    (void)unused;
    prune_order(&c->order);
    return FC_OK;
}

/* Resets one context. `after` false: the first step, before the groups release memory. `after`
 * true: the last step. */
static fc_status reset_comm(fc_comm_ctx *c, bool after) {
    if (!after) {
        return fc_comm_quiesce(c);
    }
    prune_order(&c->order);
    fc_status status = fc_comm_release_outputs(c);
    return status == FC_OK ? fc_comm_release_gather(c) : status;
}

/* Calls `visit` for the root's context, and for other contexts of groups (share_comm_ctx replaces a
 * group's context after lazy init). A context may be visited twice. Stops at the first failure. */
static fc_status visit_comms(const fc_iteration *it, fc_comm_ctx *c,
                             fc_status (*visit)(fc_comm_ctx *c, bool flag), bool flag) {
    fc_status status = FC_OK;
    const fc_comm_ctx *previous = c;
    FC_TRY(visit(c, flag));
    for (size_t i = 0; i < it->count; i++) {
        for (size_t j = 0; j < it->states[i]->group_count; j++) {
            fc_comm_ctx *other = it->states[i]->groups[j]->base.comm;
            if (other != previous && other != c) {
                FC_TRY(visit(other, flag));
            }
            previous = other;
        }
    }
done:
    return status;
}

static fc_status start_agreement(fc_group *g) {
    return fc_group_base_start_agreement(&g->base);
}

static fc_status await_agreements(const fc_iteration *it, fc_error *error) {
    fc_status first = FC_OK;
    for (size_t i = 0; i < it->count; i++) {
        for (size_t j = 0; j < it->states[i]->group_count; j++) {
            const fc_status status = fc_group_base_await_agreement(&it->states[i]->groups[j]->base,
                                                                   first == FC_OK ? error : NULL);
            if (status == FC_ERAISED) {
                return status;
            }
            first = first == FC_OK ? status : first;
        }
    }
    return first;
}

/* Ends the interval of the checksums of a device with streams. */
static fc_status end_checksum_interval(fc_comm_ctx *c, bool unused) {
    (void)unused;
    return fc_device_checksums_end_interval(c->device_checksums);
}

/* Completes the reductions. Meanwhile the ranks agree on the collectives of the iteration, all of
 * which were issued. So no gradient of a collective that differs reaches an optimizer. With
 * checksums the ranks agree after the reductions, because some checksums are known only then. */
static fc_status complete_reductions(const fc_iteration *it, fc_comm_ctx *c, bool last) {
    fc_status status = FC_OK;
    if (!c->checksums) {
        FC_TRY(visit_states(it->states, it->count, false, start_agreement));
    }
    FC_TRY(visit_comms(it, c, end_backward_in_comm, last));
    if (c->checksums) {
        FC_TRY(visit_comms(it, c, end_checksum_interval, last));
        FC_TRY(visit_states(it->states, it->count, false, start_agreement));
    }
    FC_TRY(await_agreements(it, &c->error));
done:
    return status;
}

fc_status fc_iteration_end_backward(fc_iteration *it, fc_comm_ctx *c) {
    assert(it->callback_queued || !it->callback_counted);
    fc_status status = FC_OK;
    bool last = it->is_last_backward && !it->manual;
    it->forward_root = NULL;
    for (size_t i = 0; i < it->count; i++) {
        fc_state *s = it->states[i];
        FC_TRY(finish_groups(s));
        for (size_t j = 0; last && j < s->group_count; j++) {
            FC_TRY(s->groups[j]->transitions->finalize_backward(s->groups[j]));
        }
    }
    if (it->manual) {
        FC_TRY(visit_comms(it, c, prune_order_in_comm, last));
    } else {
        FC_TRY(complete_reductions(it, c, last));
    }
    it->callback_queued = false;
    it->callback_counted = false;
    it->records = false;
done:
    return verify_iteration(it, status);
}

bool fc_iteration_is_lost(const fc_iteration *it) {
    return it->callback_queued && it->callback_counted && it->callbacks == 0;
}

fc_status fc_iteration_finalize(fc_iteration *it) {
    assert(it->count == 0 || it->states != NULL);
    fc_status status = FC_OK;
    for (size_t i = 0; i < it->count; i++) {
        fc_group *const *groups = it->states[i]->groups;
        for (size_t j = it->states[i]->group_count; j-- > 0;) {
            fc_group *g = groups[j];
            if (!g->deferred || !g->settings.reduce_grads) {
                continue;
            }
            /* the partial outputs must be in fc_param.partial before post_backward */
            if (fc_group_base_is_replicated(&g->base)) {
                FC_TRY(fc_reduction_recycle(g->base.comm, 0));
            }
            FC_TRY(g->transitions->post_backward(g));
            g->training_state = FC_IDLE;
        }
    }
    it->pending = true;
done:
    return verify_iteration(it, status);
}

fc_status fc_iteration_complete(fc_iteration *it, fc_comm_ctx *c) {
    assert(c != NULL && (it->count == 0 || it->states != NULL));
    fc_status status = FC_OK;
    for (size_t i = 0; i < it->count; i++) {
        for (size_t j = 0; j < it->states[i]->group_count; j++) {
            FC_TRY(
                it->states[i]->groups[j]->transitions->finalize_backward(it->states[i]->groups[j]));
        }
    }
    FC_TRY(complete_reductions(it, c, true));
    it->pending = false;
done:
    return verify_iteration(it, status);
}

void fc_state_init(fc_state *s, void *owner, fc_iteration *iteration, fc_comm_ctx *comm) {
    assert((iteration == NULL) == (comm == NULL));
    memset(s, 0, sizeof *s);
    s->owner = owner;
    s->iteration = iteration;
    s->comm = comm;
    s->training_state = FC_IDLE;
}

void fc_state_fini(fc_state *s) {
    assert(s->group_count == 0 || s->groups != NULL);
    if (s->iteration != NULL && s->iteration->forward_root == s) {
        s->iteration->forward_root = NULL;
    }
    free((void *)s->groups);
    free((void *)s->forward_prefetch);
    free((void *)s->backward_prefetch);
    memset(s, 0, sizeof *s);
}

/* Makes the gathers of all states under the root wait for `e`. Roots that share a context may have
 * states with another context. */
static fc_status make_gathers_wait(const fc_state *s, fct_event *e) {
    fc_status status = FC_OK;
    const fc_comm_ctx *last = s->comm;
    FC_TRY(fc_comm_gather_streams_wait(s->comm, e));
    for (size_t i = 0; i < s->iteration->count; i++) {
        fc_comm_ctx *c = s->iteration->states[i]->comm;
        if (c != s->comm && c != last) {
            FC_TRY(fc_comm_gather_streams_wait(c, e));
        }
        last = c;
    }
done:
    return status;
}

fc_status fc_state_begin_iteration(fc_state *s, bool after_compute) {
    assert(s->iteration != NULL && s->comm != NULL);
    fc_status status = FC_OK;
    fct_event *event = NULL;
    if (s->iteration->forward_root != NULL) {
        goto done;
    }
    if (fc_device_checksums_is_half_full(s->comm->device_checksums)) {
        FC_TRY(fc_device_checksums_end_interval(s->comm->device_checksums));
    }
    if (s->comm->streams_ready && after_compute) {
        FC_TRY(fc_comm_record(s->comm, fct_stream_current(s->comm->device), &event));
        FC_TRY(make_gathers_wait(s, event));
    }
    s->iteration->forward_root = s;
    s->comm->step++;
    s->iteration->order_mark = s->comm->order.count;
    fct_memory_begin_round();
done:
    fc_comm_put_event(s->comm, event);
    return verify_state(s, status);
}

fc_status fc_state_recompute(fc_state *s) {
    assert(s->iteration != NULL && s->comm != NULL);
    fc_status status = FC_OK;
    for (size_t i = 0; i < s->group_count; i++) {
        if (s->groups[i]->sharded_state != FC_UNSHARDED || s->groups[i]->registration_dirty) {
            FC_TRY(s->groups[i]->transitions->unshard(s->groups[i], s->groups[i]->training_state,
                                                      false));
            FC_TRY(s->groups[i]->transitions->wait_unshard(s->groups[i]));
        }
    }
done:
    return verify_state(s, status);
}

static fc_status prefetch_in_forward(fc_group *g) {
    return fc_group_prefetch(g, FC_FORWARD);
}

static fc_status prefetch_in_backward(fc_group *g) {
    return fc_group_prefetch(g, FC_PRE_BACKWARD);
}

fc_status fc_state_forward_prefetch(fc_state *s) {
    assert(s->forward_prefetch_count == 0 || s->forward_prefetch != NULL);
    return verify_state(s, fc_state_visit_forward_prefetch(s, prefetch_in_forward));
}

/* Removes the entries of a forward with gradients disabled, because no backward follows. */
static void remove_order_since(fc_order *order, size_t mark) {
    while (order->count > mark) {
        fc_group *g = order->items[--order->count];
        if (g != NULL && g->post_forward_indices.count > 0 &&
            g->post_forward_indices.items[g->post_forward_indices.count - 1] == order->count) {
            g->post_forward_indices.count--;
        }
    }
}

fc_status fc_state_end_forward(fc_state *s) {
    assert(s->iteration != NULL && s->comm != NULL);
    fc_status status = FC_OK;
    s->training_state = FC_IDLE;
    if (s->iteration->forward_root == s) {
        if (!fct_grad_enabled()) {
            remove_order_since(&s->comm->order, s->iteration->order_mark);
        }
        FC_TRY(fc_comm_release_gather(s->comm));
        s->iteration->forward_root = NULL;
    }
done:
    return verify_state(s, status);
}

/* Sets backward_kind for a state whose only group has several buckets. For other groups
 * FC_BACKWARD_SOLE_GROUP has the effect of FC_BACKWARD_PLAIN. */
static void classify_backward(fc_state *s) {
    fc_group *g = s->group_count == 1 ? s->groups[0] : NULL;
    if (g != NULL && g->backward_kind != FC_BACKWARD_DOUBLE && fc_bucket_has_several(&g->buckets)) {
        bool is_sole_group = !s->iteration->records && has_single_group(s->iteration);
        g->backward_kind = is_sole_group ? FC_BACKWARD_SOLE_GROUP : FC_BACKWARD_PLAIN;
    }
}

static fc_status enter_backward(fc_state *s, const fct_hook *at_end) {
    fc_status status = FC_OK;
    if (!s->iteration->callback_queued) {
        FC_TRY_RAISED(fct_autograd_at_end(at_end));
        s->iteration->callback_queued = true;
        s->iteration->callback_counted = true;
        s->iteration->records = fct_grad_enabled();
    }
    classify_backward(s);
    s->training_state = FC_PRE_BACKWARD;
done:
    return status;
}

fc_status fc_state_pre_double_backward(fc_state *s, const fct_hook *at_end) {
    assert(s->comm != NULL && at_end != NULL && at_end->call != NULL);
    fc_status status = FC_OK;
    FC_TRY(enter_backward(s, at_end));
    for (size_t i = 0; i < s->group_count; i++) {
        s->groups[i]->backward_kind = FC_BACKWARD_DOUBLE;
        FC_TRY(s->groups[i]->transitions->pre_backward(s->groups[i], false));
    }
done:
    return verify_state(s, status);
}

fc_status fc_state_pre_backward(fc_state *s, const fct_hook *at_end) {
    assert(s->comm != NULL && at_end != NULL && at_end->call != NULL);
    fc_status status = FC_OK;
    FC_TRY(enter_backward(s, at_end));
    for (size_t i = 0; i < s->group_count; i++) {
        fc_group *g = s->groups[i];
        const bool begins = g->training_state != FC_PRE_BACKWARD;
        const bool has_graph = begins && fct_in_backward(); /* else a direct call */
        if (s->iteration->records && begins) {
            g->grads_before = grad_fingerprint(g);
        }
        FC_TRY(has_graph ? fc_unsharded_record_leaves(&g->base) : FC_OK);
        FC_TRY(g->transitions->pre_backward(g, s->backward_prefetch_count == 0));
        FC_TRY(has_graph ? fc_unsharded_check_leaves(&g->base) : FC_OK);
    }
    FC_TRY(visit_backward_prefetch(s, prefetch_in_backward));
done:
    return verify_state(s, status);
}

fc_status fc_state_post_backward(const fc_state *s, fc_group *g) {
    assert(g->base.comm != NULL);
    return verify_state(s, s->iteration->callback_counted || s->iteration->manual
                               ? FC_OK
                               : fc_group_complete_reductions(g));
}

fc_status fc_state_reset(fc_state *s) {
    assert(s->iteration != NULL && s->comm != NULL);
    fc_iteration *it = s->iteration;
    fc_status first = visit_comms(it, s->comm, reset_comm, false);
    if (first != FC_OK) {
        return first; /* streams may still use the memory; the next reset can release it */
    }
    for (size_t i = 0; i < it->count; i++) {
        fc_state *state = it->states[i];
        state->training_state = FC_IDLE;
        for (size_t j = 0; j < state->group_count; j++) {
            fc_status status = fc_group_reset(state->groups[j]);
            first = first == FC_OK ? status : first;
            fc_group_base_drop_checksums(&state->groups[j]->base);
        }
    }
    fc_status status = visit_comms(it, s->comm, reset_comm, true);
    it->forward_root = NULL;
    it->callback_queued = false;
    it->callback_counted = false;
    it->records = false;
    it->pending = false;
    return verify_state(s, first == FC_OK ? status : first);
}
