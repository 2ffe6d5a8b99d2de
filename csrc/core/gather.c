/* The gather of a group's shards, from the pack to the unsharded parameters. Owns what is in flight
 * (group.gather) until it is retired. Stream rules: copy-in and gather run on the context's gather
 * streams in forward and pre-backward and on the current stream otherwise; copy-out always on the
 * current stream. */
#include "gather.h"

#include <string.h>

#include "link.h"
#include "transfer.h"

/* Gives up on the gather in flight without waiting. */
void fc_gather_drop(fc_group *g) {
    if (!g->gather.active) {
        return;
    }
    if (g->gather.hosted) {
        g->host->drop_gather(g->owner);
    }
    if (g->comm != NULL) {
        fc_comm_park(g->comm, g->gather.work, g->gather.buffer, NULL);
        fc_comm_put_event(g->comm, g->gather.done);
    }
    memset(&g->gather, 0, sizeof g->gather);
}

/* The same with work on the buffer still queued: whichever stream it was allocated on waits for
 * that first. */
void fc_gather_abandon(fc_group *g) {
    if (g->gather.active && g->comm != NULL && g->comm->streams_ready) {
        fct_stream current = fct_stream_current(g->device);
        fc_comm_settle_streams(g->comm, current, g->comm->gather_stream);
        fc_comm_settle_streams(g->comm, g->comm->copy_in_stream, current);
    }
    fc_gather_drop(g);
}

void fc_gather_free(fc_group *g) {
    if (g->keep_storage) {
        return;
    }
    bool watched = g->host->moves != NULL && g->host->moves(g->owner, FC_MOVE_FREE);
    for (size_t i = 0; i < g->count; i++) {
        fc_param *p = g->params[i];
        if (p->hosted || (watched && !p->aliased)) {
            g->host->free_unsharded(p->owner);
        }
        fc_param_free_flat(p);
    }
}

static bool from_forward(const fc_group *g) {
    return g->sharded_state == FC_SHARDED_POST_FORWARD;
}

static fc_status prepare_gather(fc_group *g, fc_gather *gather) {
    fc_status status = FC_OK;
    bool forward = from_forward(g);
    gather->link = forward ? &g->forward : &g->shard;
    gather->plan = forward ? &g->forward_plan : &g->gather_plan;
    if (gather->link->world > 1) {
        FC_TRY(fc_link_open(gather->link));
    }
    if (!gather->plan->valid) {
        FC_TRY(fc_gather_plan_build(gather->plan, g->params, g->count, gather->link->world, forward,
                                    &g->comm->error));
    }
    if (g->resharded != NULL) {
        FC_TRY(fc_comm_gather_streams_wait(g->comm, g->resharded));
        fc_comm_put_event(g->comm, g->resharded);
        g->resharded = NULL;
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
    fc_gather_plan *plan = gather->plan;
    int64_t rank = gather->link->rank;
    const int64_t size[1] = {plan->row_numel};
    const int64_t stride[1] = {1};
    FC_TRY_RAISED(
        fct_tensor_empty(plan->world * plan->row_numel, plan->dtype, g->device, &gather->buffer));
    FC_TRY(fc_transfer_pack(plan, g->params, gather->buffer, rank, &g->comm->error));
    FC_TRY_RAISED(
        fct_tensor_alias(gather->buffer, 1, size, stride, rank * plan->row_numel, &input));
    if (gather_stream != NULL) {
        FC_TRY(fc_comm_order_streams(g->comm, *gather_stream, fct_stream_current(g->device)));
        (void)fct_stream_set_current(*gather_stream);
    }
    FC_TRY(
        fc_link_all_gather(gather->link, g->name, gather->buffer, input, async_op, &gather->work));
    if (gather_stream != NULL) {
        FC_TRY(fc_link_wait(gather->link, g->name, FC_ALL_GATHER, &gather->work));
    }
    if (g->comm->has_streams && !async_op) {
        FC_TRY(fc_comm_record(g->comm, fct_stream_current(g->device), &gather->done));
    }
done:
    fct_tensor_release(input);
    return status;
}

static fc_status start_gather(fc_group *g, bool async_op, bool overlaps) {
    fc_status status = FC_OK;
    fc_gather gather = {.active = true, .async_op = async_op};
    void *range = NULL;
    if (g->host->moves != NULL && g->host->moves(g->owner, FC_MOVE_GATHER)) {
        range = fc_group_enter_range(g, "all_gather");
        FC_TRY_RAISED(g->host->gather(g->owner, async_op, overlaps));
        gather.hosted = true;
        g->gather = gather;
        goto done;
    }
    FC_TRY(prepare_gather(g, &gather));
    if (gather.link->world == 1 || gather.plan->row_bytes == 0) {
        g->gather = gather; /* nothing to send: wait copies straight from the shards */
        return FC_OK;
    }
    range = fc_group_enter_range(g, "all_gather");
    if (g->comm->streams_ready && !async_op && overlaps) {
        fct_stream previous = fct_stream_set_current(g->comm->copy_in_stream);
        status = issue_gather(g, async_op, &g->comm->gather_stream, &gather);
        (void)fct_stream_set_current(previous);
    } else {
        status = issue_gather(g, async_op, NULL, &gather);
    }
    g->gather = gather;
    if (status != FC_OK) {
        fc_gather_abandon(g);
    }
done:
    fct_profile_exit(range);
    return status;
}

/* Under functorch's transforms nothing here is to be wrapped. */
fc_status fc_gather_start(fc_group *g, bool async_op, bool overlaps) {
    void *pause = fct_functorch_pause();
    fc_status status = start_gather(g, async_op, overlaps);
    fct_functorch_resume(pause);
    return status;
}

/* Makes the current stream (or the host) see the gathered rows. */
fc_status fc_gather_await(fc_group *g) {
    fc_status status = FC_OK;
    if (g->gather.done != NULL) {
        FC_TRY_RAISED(fct_event_wait(g->gather.done, fct_stream_current(g->device)));
    }
    FC_TRY(fc_link_wait(g->gather.link, g->name, FC_ALL_GATHER, &g->gather.work));
    if (!g->gather.active) { /* by a signal's handler */
        return fc_error_set(&g->comm->error, FC_ESTATE,
                            "the group was reset while its all-gather was waited for");
    }
done:
    return status;
}

/* One rank: the unsharded parameters may be the shards. All of them, or none: an alias that is made
 * and given up again would cost the parameter the leaf that autograd knows. */
static fc_status alias_all(fc_group *g, bool *all) {
    fc_status status = FC_OK;
    *all = true;
    for (size_t i = 0; *all && i < g->count; i++) {
        FC_TRY(fc_param_can_alias(g->params[i], g->device, all, &g->comm->error));
    }
    for (size_t i = 0; *all && i < g->count; i++) {
        FC_TRY(fc_param_alias_flat(g->params[i]));
    }
done:
    return status;
}

static fc_status move_data(fc_group *g) {
    fc_status status = FC_OK;
    fct_facts facts;
    fc_gather_plan *plan = g->gather.plan;
    if (g->gather.hosted) {
        FC_TRY_RAISED(g->host->copy_out(g->owner));
        return FC_OK;
    }
    if (plan->world == 1 && !plan->forward) {
        bool aliased = false;
        FC_TRY(alias_all(g, &aliased));
        if (aliased) {
            return FC_OK;
        }
    }
    for (size_t i = 0; i < g->count; i++) {
        FC_TRY(fc_param_alloc_flat(g->params[i], g->device, &facts, &g->comm->error));
    }
    if (!plan->valid) {
        FC_TRY(fc_gather_plan_build(plan, g->params, g->count, plan->world, plan->forward,
                                    &g->comm->error));
    }
    if (plan->world == 1) {
        FC_TRY(fc_transfer_fill(plan, g->params, g->device, &g->comm->error));
    } else if (g->gather.buffer != NULL) {
        FC_TRY(fc_transfer_unpack(plan, g->params, g->gather.buffer, &g->comm->error));
    }
done:
    return status;
}

/* The parameter objects over the flat tensors, which require grad as the shards do. */
static fc_status make_parameters(fc_group *g) {
    fc_status status = FC_OK;
    for (size_t i = 0; i < g->count; i++) {
        fc_param *p = g->params[i];
        if (p->unsharded == NULL) {
            fct_tensor *made = NULL;
            FC_TRY_RAISED(g->host->make_unsharded(p->owner, p->flat, &made));
            fc_param_set_unsharded(p, made);
        }
        bool wanted = g->host->requires_grad(p->owner);
        if (fct_tensor_requires_grad(p->unsharded) != wanted) {
            FC_TRY_RAISED(fct_tensor_set_requires_grad(p->unsharded, wanted));
        }
        p->required = wanted;
    }
done:
    return status;
}

static bool holds_memory(const fc_param *p) {
    fct_facts facts = {0};
    if (p->flat == NULL) {
        return p->hosted && p->unsharded != NULL;
    }
    fct_tensor_facts(p->flat, &facts);
    return facts.numel == 0 || facts.storage_bytes > 0;
}

fc_status fc_gather_adopt(fc_group *g) {
    for (size_t i = 0; i < g->count; i++) {
        if (!holds_memory(g->params[i])) {
            const char *name = g->params[i]->name;
            return fc_error_set(&g->comm->error, FC_ESTATE, "parameter '%s' was not gathered",
                                name != NULL ? name : "?");
        }
    }
    void *pause = fct_functorch_pause();
    fc_status status = make_parameters(g);
    fct_functorch_resume(pause);
    return status;
}

/* Everything of the unshard that can fail: memory, contents and the parameter objects. On failure
 * no flat tensor holds memory. */
fc_status fc_gather_copy_out(fc_group *g) {
    fc_status status = FC_OK;
    void *pause = fct_functorch_pause();
    FC_TRY(move_data(g));
    FC_TRY(make_parameters(g));
done:
    if (status != FC_OK) {
        fc_gather_free(g);
    }
    fct_functorch_resume(pause);
    return status;
}

/* The end of the copy-out is recorded where the buffer is to be kept for the next group's wait,
 * because copy-in may overlap. */
fc_status fc_gather_end_copy_out(fc_group *g, fct_event **copied) {
    fc_status status = FC_OK;
    fct_event *end = NULL;
    if (!g->comm->has_streams || g->gather.buffer == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_comm_record(g->comm, fct_stream_current(g->device), &end));
    if (!g->gather.async_op && g->training_state == FC_FORWARD) {
        *copied = end;
        end = NULL;
    } else {
        FC_TRY(fc_comm_gather_streams_wait(g->comm, end));
    }
done:
    fc_comm_put_event(g->comm, end);
    return status;
}

void fc_gather_retire(fc_group *g, fct_event *copied) {
    if (copied != NULL) {
        g->comm->kept.buffer = g->gather.buffer;
        g->comm->kept.copied = copied;
        g->gather.buffer = NULL;
    }
    g->gather.hosted = false; /* the host has let it go */
    fc_gather_drop(g);
}
