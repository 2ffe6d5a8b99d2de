/* The gather; see gather.h. Stream rules: copy-in and gather run on the context's gather streams
 * or, in the direct lane, on the current stream; copy-out always on the current stream. */
#include "gather.h"

#include <string.h>

/* ---- life ---- */

void fc_gather_init(fc_gather *a, fc_members *members) {
    memset(a, 0, sizeof *a);
    a->members = members;
}

void fc_gather_forget_event(fc_gather *a) {
    if (a->members->comm != NULL) {
        fc_comm_put_event(a->members->comm, a->resharded);
    }
    a->resharded = NULL;
}

void fc_gather_fini(fc_gather *a) {
    fc_gather_abandon(a);
    fc_gather_forget_event(a);
    fc_gather_plan_fini(&a->plan);
    fc_gather_plan_fini(&a->post_forward_plan);
    fc_transfer_fini(&a->transfer);
    fc_chunks_fini(&a->chunks);
    memset(a, 0, sizeof *a);
}

void fc_gather_invalidate(fc_gather *a) {
    a->plan.valid = false;
    a->post_forward_plan.valid = false;
}

/* ---- giving up ---- */

/* Parks what the backend may still use, and forgets the rest. */
static void drop(fc_gather *a) {
    fc_members *m = a->members;
    if (!a->flight.active) {
        return;
    }
    if (a->flight.hosted) {
        m->host->drop_gather(m->owner);
    }
    if (m->comm != NULL) {
        fc_comm_park(m->comm, a->flight.work, a->flight.buffer, NULL);
        fc_comm_put_event(m->comm, a->flight.done);
    }
    fc_chunks_drop(&a->chunks); /* a work that goes on holds them */
    memset(&a->flight, 0, sizeof a->flight);
}

void fc_gather_abandon(fc_gather *a) {
    fc_members *m = a->members;
    if (a->flight.active && m->comm != NULL && m->comm->streams_ready) {
        fct_stream current = fct_stream_current(m->device);
        fc_comm_settle_streams(m->comm, current, m->comm->gather_stream);
        fc_comm_settle_streams(m->comm, m->comm->copy_in_stream, current);
    }
    drop(a);
}

fc_status fc_gather_can_free(const fc_gather *a) {
    return a->keep_storage ? FC_OK : fc_unsharded_can_free(a->members);
}

void fc_gather_free(fc_gather *a) {
    if (!a->keep_storage) {
        fc_unsharded_free(a->members);
    }
}

fc_status fc_gather_follow(fc_gather *a) {
    const fc_members *m = a->members;
    for (size_t i = 0; m->host->follow_shard != NULL && i < m->count; i++) {
        if (m->host->follow_shard(m->params[i]->owner) != 0) {
            return FC_ERAISED;
        }
    }
    return FC_OK;
}

/* ---- start ---- */

static bool any_extended(const fc_members *m) {
    bool any = false;
    for (size_t i = 0; !any && i < m->count; i++) {
        any = m->params[i]->extended;
    }
    return any;
}

static void drop_inputs(const fc_members *m) {
    for (size_t i = 0; i < m->count; i++) {
        fc_extension_drop_inputs(&m->params[i]->extension);
    }
}

/* Has extended parameters give their inputs, on the stream that those are packed on. */
static fc_status ask_for_inputs(fc_gather *a, const fct_stream *pack_stream) {
    const fc_members *m = a->members;
    fc_status status = FC_OK;
    fct_stream previous = {0};
    if (pack_stream != NULL) {
        previous = fct_stream_set_current(*pack_stream);
    }
    for (size_t i = 0; i < m->count; i++) {
        if (m->params[i]->extended) {
            FC_TRY(m->host->extend_inputs(m->params[i]->owner));
        }
    }
done:
    a->plan.valid = a->plan.valid && status == FC_OK; /* some may be new */
    if (pack_stream != NULL) {
        (void)fct_stream_set_current(previous);
    }
    return status;
}

/* Over which link, and how: the shards, or those of the smaller group. */
static fc_link *link_of(const fc_gather *a, bool post_forward) {
    return post_forward ? &a->members->post_forward : &a->members->shard;
}

static fc_gather_plan *plan_of(fc_gather *a, bool post_forward) {
    return post_forward ? &a->post_forward_plan : &a->plan;
}

/* Builds the plan where it is not valid. `extended`: nor where the inputs are others now. */
static fc_status renew_plan(fc_gather *a, bool post_forward, int64_t world, bool extended) {
    const fc_members *m = a->members;
    fc_gather_plan *plan = plan_of(a, post_forward);
    bool fits = plan->valid &&
                ((!extended && !plan->extended) || fc_gather_plan_fits(plan, m->params, m->count));
    return fits ? FC_OK
                : fc_gather_plan_build(plan, m->params, m->count, world, post_forward, m->device,
                                       &m->comm->error);
}

/* Link, inputs, plan and order for a gather that is about to start. One rank asks for its inputs
 * when they are copied. */
static fc_status prepare_gather(fc_gather *a, bool post_forward, const fct_stream *pack_stream,
                                fc_flight *flight) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    flight->link = link_of(a, post_forward);
    flight->plan = plan_of(a, post_forward);
    if (flight->link->world > 1) {
        FC_TRY(fc_link_open(flight->link));
    }
    FC_TRY(fc_members_open_reduction(m));
    if (flight->extended && flight->link->world > 1) {
        FC_TRY(ask_for_inputs(a, pack_stream));
    }
    if (!flight->extended || flight->link->world > 1) {
        FC_TRY(renew_plan(a, post_forward, flight->link->world, flight->extended));
    }
    FC_TRY(fc_comm_gather_streams_wait(m->comm, a->resharded));
    fc_gather_forget_event(a);
    fc_comm_reap(m->comm);
done:
    return status;
}

/* This rank's row in the gather buffer, as a new view. */
static fc_status row_of_rank(const fc_flight *flight, fct_tensor **row) {
    const int64_t numel = flight->plan->row_numel;
    const int64_t size[1] = {numel};
    const int64_t stride[1] = {1};
    return fct_tensor_alias(flight->buffer, 1, size, stride, flight->link->rank * numel, row) == 0
               ? FC_OK
               : FC_ERAISED;
}

/* Whether large parameters are gathered into chunks of their own: some are large enough, the
 * transport can move them, and parameters may change their addresses. Memory of the process group
 * is only had as one buffer. */
static fc_status choose_split(const fc_gather *a, fc_flight *flight) {
    const fc_members *m = a->members;
    fc_status status = FC_OK;
    bool packed = m->device.type != FCT_DEVICE_CPU || !fc_gather_plan_can_split(flight->plan) ||
                  a->keep_storage || fck_backend_of(m->device.type) == NULL;
    flight->split = false;
    if (!packed) {
        FC_TRY(fc_members_has_memory(m, m->gather_memory, &packed));
    }
    if (!packed) {
        FC_TRY(fc_link_takes_chunks(flight->link, m->device, FC_ALL_GATHER, &flight->split));
    }
    fc_gather_plan_set_split(flight->plan, flight->split);
done:
    return status;
}

/* Allocates the plan's chunks on the current stream. flight->buffer is the packed one. */
static fc_status make_chunks(fc_gather *a, fc_flight *flight) {
    const fc_members *m = a->members;
    fc_status status = FC_OK;
    const fc_gather_plan *plan = flight->plan;
    FC_TRY(fc_chunks_begin(&a->chunks, plan->chunks.count));
    for (size_t i = 0; i < plan->chunks.count; i++) {
        const fc_chunk *chunk = &plan->chunks.chunks[i];
        const int64_t numel = plan->world * chunk->numel;
        fct_tensor *made = NULL;
        if (flight->split) {
            FC_TRY_RAISED(fct_tensor_empty(numel, plan->dtype, m->device, &made));
        } else {
            FC_TRY(fc_members_buffer(m, m->gather_memory, numel, plan->dtype, &made));
        }
        fc_chunks_add(&a->chunks, made);
        if (!chunk->owned) {
            fct_tensor_retain(made);
            flight->buffer = made;
        }
    }
done:
    return status;
}

/* Offloaded shards that are cast are packed into a row of their own before the gather buffer is
 * allocated: what they are cast from and the buffer are never allocated at once. */
static fc_status pack_offloaded(fc_gather *a, const fc_gather_plan *plan, fct_tensor **row) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    FC_TRY_RAISED(fct_tensor_empty(plan->row_numel, plan->dtype, m->device, row));
    FC_TRY(fc_transfer_pack(&a->transfer, plan, m->params, row, 0, &m->comm->error));
done:
    return status;
}

/* Allocates the chunks and packs this rank's parts, on the current stream. */
static fc_status pack(fc_gather *a, fc_flight *flight) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    fct_tensor *row = NULL;
    fct_tensor *part = NULL;
    const fc_gather_plan *plan = flight->plan;
    const int64_t rank = flight->link->rank;
    if (!plan->from_host || !plan->casts) {
        FC_TRY(make_chunks(a, flight));
        FC_TRY(fc_transfer_pack(&a->transfer, plan, m->params, a->chunks.tensors, rank,
                                &m->comm->error));
        return FC_OK;
    }
    FC_TRY(pack_offloaded(a, plan, &row));
    FC_TRY(make_chunks(a, flight));
    FC_TRY(row_of_rank(flight, &part));
    FC_TRY_RAISED(fct_tensor_copy(part, row));
done:
    fct_tensor_release(part);
    fct_tensor_release(row);
    return status;
}

/* Issues the collective over the chunks. */
static fc_status all_gather(fc_gather *a, fc_flight *flight, bool async_op) {
    const fc_members *m = a->members;
    fc_status status = FC_OK;
    fct_tensor *input = NULL;
    const fct_chunk_layout layout = fc_chunk_list_layout(&flight->plan->chunks);
    if (flight->split) {
        return fc_link_gather_chunks(flight->link, m->name, a->chunks.tensors, a->chunks.count,
                                     &layout, &flight->work);
    }
    FC_TRY(row_of_rank(flight, &input));
    FC_TRY(
        fc_link_all_gather(flight->link, m->name, flight->buffer, input, async_op, &flight->work));
done:
    fct_tensor_release(input);
    return status;
}

/* Packs on the current stream and issues the collective on `gather_stream` (NULL: the current
 * one). */
static fc_status issue_gather(fc_gather *a, bool async_op, const fct_stream *gather_stream,
                              fc_flight *flight) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    FC_TRY(pack(a, flight));
    if (gather_stream != NULL) {
        FC_TRY(fc_comm_order_streams(m->comm, *gather_stream, fct_stream_current(m->device)));
        (void)fct_stream_set_current(*gather_stream);
    }
    FC_TRY(all_gather(a, flight, async_op || flight->split));
    if (gather_stream != NULL) {
        FC_TRY(fc_link_wait(flight->link, m->name, FC_ALL_GATHER, &flight->work));
    }
    if (m->comm->has_streams && !async_op) {
        FC_TRY(fc_comm_record(m->comm, fct_stream_current(m->device), &flight->done));
    }
done:
    return status;
}

/* The host gathers with torch's functions. The plan is built all the same: fc_gather_is_copied()
 * must give the same answer on every rank, also where the host moves only this rank's data. */
static fc_status host_gather(fc_gather *a, bool post_forward, bool async_op, fc_lane lane) {
    const fc_members *m = a->members;
    const fc_link *link = link_of(a, post_forward);
    if (link->world > 1 && !any_extended(m)) {
        (void)!renew_plan(a, post_forward, link->world, false);
    }
    return m->host->gather(m->owner, async_op, lane != FC_LANE_DIRECT) == 0 ? FC_OK : FC_ERAISED;
}

bool fc_gather_is_copied(const fc_gather *a, bool post_forward) {
    fc_link *link = link_of(a, post_forward);
    const fc_gather_plan *plan = post_forward ? &a->post_forward_plan : &a->plan;
    /* A link may have other devices, too. */
    const bool by_processors = a->members->device.type == FCT_DEVICE_CPU;
    return by_processors && link->world > 1 && plan->valid && !plan->extended &&
           fc_link_is_copied(link, plan->row_bytes);
}

static fc_status start_gather(fc_gather *a, bool post_forward, bool async_op, fc_lane lane) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    fc_flight flight = {.active = true, .async_op = async_op};
    void *range = NULL;
    const bool overlaps = m->comm->streams_ready && !async_op && lane != FC_LANE_DIRECT;
    if (fc_members_host_moves(m, FC_MOVE_GATHER)) {
        range = fc_members_enter_range(m, "all_gather");
        FC_TRY(host_gather(a, post_forward, async_op, lane));
        flight.hosted = true;
        a->flight = flight;
        goto done;
    }
    flight.extended = any_extended(m);
    if (flight.extended && m->shard.world > 1) { /* the hooks are part of it */
        range = fc_members_enter_range(m, "all_gather");
    }
    FC_TRY(prepare_gather(a, post_forward, overlaps ? &m->comm->copy_in_stream : NULL, &flight));
    if (flight.link->world == 1 || flight.plan->row_bytes == 0) {
        a->flight = flight; /* nothing to send: wait copies straight from the shards */
        goto done;
    }
    FC_TRY(choose_split(a, &flight));
    if (range == NULL) {
        range = fc_members_enter_range(m, "all_gather");
    }
    if (overlaps) {
        fct_stream previous = fct_stream_set_current(m->comm->copy_in_stream);
        status = issue_gather(a, async_op, &m->comm->gather_stream, &flight);
        (void)fct_stream_set_current(previous);
    } else {
        status = issue_gather(a, async_op, NULL, &flight);
    }
    a->flight = flight;
    if (status != FC_OK) {
        fc_gather_abandon(a);
    }
done:
    if (flight.extended) {
        drop_inputs(m);
    }
    fct_profile_exit(range);
    return status;
}

/* Under functorch's transforms nothing here is to be wrapped. */
fc_status fc_gather_start(fc_gather *a, bool post_forward, bool async_op, fc_lane lane) {
    void *pause = fct_functorch_pause();
    fc_status status = start_gather(a, post_forward, async_op, lane);
    fct_functorch_resume(pause);
    return status;
}

/* ---- wait and copy out ---- */

fc_status fc_gather_await(fc_gather *a) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    if (a->flight.done != NULL) {
        FC_TRY_RAISED(fct_event_wait(a->flight.done, fct_stream_current(m->device)));
    }
    FC_TRY(fc_link_wait(a->flight.link, m->name, FC_ALL_GATHER, &a->flight.work));
    if (!a->flight.active) { /* by a signal's handler */
        return fc_error_set(&m->comm->error, FC_ESTATE,
                            "the group was reset while its all-gather was waited for");
    }
done:
    return status;
}

static fc_status move_data(fc_gather *a) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    fc_gather_plan *plan = a->flight.plan;
    if (a->flight.hosted) {
        fct_tensor *rows = NULL;
        FC_TRY_RAISED(m->host->copy_out(m->owner, &rows));
        fct_tensor_release(a->flight.buffer);
        a->flight.buffer = rows;
        return FC_OK;
    }
    const bool post_forward = plan == &a->post_forward_plan;
    const bool extended = a->flight.extended;
    const int64_t world = a->flight.link->world;
    if (extended && world == 1) {
        FC_TRY(ask_for_inputs(a, NULL));
    } else if (world == 1 && !post_forward) {
        bool aliased = false;
        FC_TRY(fc_unsharded_alias(m, &aliased));
        if (aliased) {
            return FC_OK;
        }
    }
    FC_TRY(renew_plan(a, post_forward, world, extended));
    if (a->flight.split && fc_gather_plan_can_split(plan)) {
        fc_gather_plan_set_split(plan, true); /* it may have been built anew */
    }
    if (world > 1 && plan->row_bytes > 0 &&
        (a->flight.split != plan->chunks.split || a->chunks.count != plan->chunks.count)) {
        return fc_error_set(&m->comm->error, FC_EASSERT,
                            "parameters were changed while they were gathered");
    }
    FC_TRY(fc_unsharded_alloc(m, plan, &a->chunks));
    if (world == 1) {
        FC_TRY(fc_transfer_fill(&a->transfer, plan, m->params, m->device, &m->comm->error));
        drop_inputs(m);
    } else if (a->flight.buffer != NULL) {
        FC_TRY(fc_transfer_unpack(&a->transfer, plan, m->params, plan->chunks.count - 1,
                                  a->flight.buffer, &m->comm->error));
    }
done:
    return status;
}

/* What a failed unshard leaves: no memory, and rows that can be copied out again, unless hooks or
 * the host, who hands its rows out once, would have to do their part again. */
static void give_back(fc_gather *a) {
    if (a->flight.split) {
        fc_unsharded_return(a->members, a->flight.plan, &a->chunks);
    }
    fc_gather_free(a);
    if (a->flight.extended) {
        drop_inputs(a->members);
        fc_gather_abandon(a);
    }
}

fc_status fc_gather_copy_out(fc_gather *a) {
    fc_status status = FC_OK;
    void *pause = fct_functorch_pause();
    FC_TRY(move_data(a));
    FC_TRY(fc_unsharded_make(a->members, a->flight.extended));
done:
    if (status != FC_OK) {
        give_back(a);
    }
    fct_functorch_resume(pause);
    return status;
}

fc_status fc_gather_end_copy_out(fc_gather *a, fc_lane lane, fct_event **copied) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    fct_event *end = NULL;
    if (!m->comm->has_streams || a->flight.buffer == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_comm_record(m->comm, fct_stream_current(m->device), &end));
    if (!a->flight.async_op && lane == FC_LANE_DEFERRED) {
        *copied = end;
        end = NULL;
    } else {
        FC_TRY(fc_comm_gather_streams_wait(m->comm, end));
    }
done:
    fc_comm_put_event(m->comm, end);
    return status;
}

void fc_gather_retire(fc_gather *a, fct_event *copied) {
    if (copied != NULL) {
        fc_comm_keep_gather(a->members->comm, a->flight.buffer, copied);
        a->flight.buffer = NULL;
    }
    a->flight.hosted = false; /* the host has let it go */
    drop(a);
}

void fc_gather_undo_copy_out(fc_gather *a, fct_event *copied) {
    fc_comm_put_event(a->members->comm, copied);
    give_back(a);
    if (a->flight.hosted) {
        fc_gather_abandon(a); /* the host hands its rows out once */
    }
}

/* ---- the smaller group's shards ---- */

fc_status fc_gather_keep_post_forward(fc_gather *a) {
    fc_status status = FC_OK;
    fc_members *m = a->members;
    for (size_t i = 0; i < m->count; i++) {
        fc_param *p = m->params[i];
        FC_TRY(fc_param_keep_post_forward(p, m->device, &m->comm->error));
        FC_TRY_RAISED(m->host->make_post_forward(p->owner, p->post_forward_data));
    }
    if (m->comm->has_streams) {
        FC_TRY(fc_comm_record_into(m->comm, fct_stream_current(m->device), &a->resharded));
    }
done:
    return status;
}

void fc_gather_drop_post_forward(fc_gather *a) {
    const fc_members *m = a->members;
    for (size_t i = 0; i < m->count; i++) {
        (void)m->host->make_post_forward(m->params[i]->owner, NULL);
        fc_param_drop_post_forward(m->params[i]);
    }
}

/* ---- what must hold ---- */

fc_status fc_gather_check(const fc_gather *a, bool unsharded) {
    fc_status status = FC_OK;
    const fc_flight *f = &a->flight;
    fc_error *error = &a->members->comm->error;
    if (f->active && unsharded) {
        return fc_error_set(error, FC_ESTATE, "a gather is in flight while the group is unsharded");
    }
    if (!f->active &&
        (f->buffer != NULL || f->work != NULL || f->done != NULL || a->chunks.count > 0)) {
        return fc_error_set(error, FC_ESTATE,
                            "an inactive gather holds a buffer, chunks, work or event");
    }
    FC_TRY(fc_gather_plan_check(&a->plan, a->members->params, a->members->count, error));
    FC_TRY(
        fc_gather_plan_check(&a->post_forward_plan, a->members->params, a->members->count, error));
    FC_TRY(fc_unsharded_check(a->members, unsharded, a->keep_storage));
done:
    return status;
}
