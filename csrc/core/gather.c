/* All-gather of a group; see gather.h. Owns the plans, the chunks and the pending gather.
 *
 * Streams: copy-in and all-gather run on the context's gather streams, or on the current stream in
 * the direct lane. Copy-out always runs on the current stream. A buffer is reused only after the
 * gather streams wait for its copy-out. */
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

/* ---- abandon ---- */

/* Parks memory that the backend may still use and resets the pending gather. */
static void clear_flight(fc_gather *a) {
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
    fc_chunks_drop(&a->chunks); /* a work that is still running holds them */
    memset(&a->flight, 0, sizeof a->flight);
}

void fc_gather_abandon(fc_gather *a) {
    fc_members *m = a->members;
    if (a->flight.active && m->comm != NULL && m->comm->streams_ready) {
        fct_stream current = fct_stream_current(m->device);
        fc_comm_settle_streams(m->comm, current, m->comm->gather_stream);
        fc_comm_settle_streams(m->comm, m->comm->copy_in_stream, current);
    }
    clear_flight(a);
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

/* Runs the first hooks of extended parameters, on the stream of the pack. */
static fc_status run_input_hooks(fc_gather *a, const fct_stream *pack_stream) {
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
    a->plan.valid = a->plan.valid && status == FC_OK; /* some inputs may be new */
    if (pack_stream != NULL) {
        (void)fct_stream_set_current(previous);
    }
    return status;
}

/* Select the link and the plan: those of the shards, or of the smaller group's shards. */
static fc_link *select_link(const fc_gather *a, bool post_forward) {
    return post_forward ? &a->members->post_forward : &a->members->shard;
}

static fc_gather_plan *select_plan(fc_gather *a, bool post_forward) {
    return post_forward ? &a->post_forward_plan : &a->plan;
}

/* Builds the plan if it is not valid. `extended`: also if the inputs have changed. */
static fc_status update_plan(fc_gather *a, bool post_forward, int64_t world, bool extended) {
    const fc_members *m = a->members;
    fc_gather_plan *plan = select_plan(a, post_forward);
    bool fits = plan->valid &&
                ((!extended && !plan->extended) || fc_gather_plan_fits(plan, m->params, m->count));
    return fits ? FC_OK
                : fc_gather_plan_build(plan, m->params, m->count, world, post_forward, m->device,
                                       &m->comm->error);
}

/* Opens the link, runs the hooks, updates the plan and orders the streams. With one rank the hooks
 * run at copy-out instead. */
static fc_status prepare_gather(fc_gather *a, bool post_forward, const fct_stream *pack_stream,
                                fc_flight *flight) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    flight->link = select_link(a, post_forward);
    flight->plan = select_plan(a, post_forward);
    if (flight->link->world > 1) {
        FC_TRY(fc_link_open(flight->link));
    }
    FC_TRY(fc_members_open_reduction(m));
    if (flight->extended && flight->link->world > 1) {
        FC_TRY(run_input_hooks(a, pack_stream));
    }
    if (!flight->extended || flight->link->world > 1) {
        FC_TRY(update_plan(a, post_forward, flight->link->world, flight->extended));
    }
    FC_TRY(fc_comm_gather_streams_wait(m->comm, a->resharded));
    fc_gather_forget_event(a);
    fc_comm_reap(m->comm);
done:
    return status;
}

/* Creates a view of this rank's row in the gather buffer. */
static fc_status view_own_row(const fc_flight *flight, fct_tensor **row) {
    const int64_t numel = flight->plan->row_numel;
    const int64_t size[1] = {numel};
    const int64_t stride[1] = {1};
    return fct_tensor_alias(flight->buffer, 1, size, stride, flight->link->rank * numel, row) == 0
               ? FC_OK
               : FC_ERAISED;
}

/* Decides whether large parameters get their own chunks. Conditions: some are large enough, the
 * transport supports chunks, and addresses may change. The process group's allocator provides only
 * one buffer. */
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

/* Allocates the plan's chunks on the current stream. flight->buffer is the packed chunk. */
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

/* Packs offloaded shards that need a cast into a separate row before the gather buffer is
 * allocated. The staged copies and the buffer are then never allocated at the same time. */
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
    FC_TRY(view_own_row(flight, &part));
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
    FC_TRY(view_own_row(flight, &input));
    FC_TRY(
        fc_link_all_gather(flight->link, m->name, flight->buffer, input, async_op, &flight->work));
done:
    fct_tensor_release(input);
    return status;
}

/* Packs on the current stream and issues the collective on `gather_stream` (NULL: the current
 * stream). */
static fc_status issue_gather(fc_gather *a, bool async_op, const fct_stream *gather_stream,
                              fc_flight *flight) {
    fc_members *m = a->members;
    fc_status status = FC_OK;
    FC_TRY(pack(a, flight));
    if (gather_stream != NULL) {
        FC_TRY(fc_comm_order_streams(m->comm, *gather_stream, fct_stream_current(m->device)));
        (void)fct_stream_set_current(*gather_stream);
    }
    FC_TRY(all_gather(a, flight, async_op));
    if (gather_stream != NULL) {
        FC_TRY(fc_link_wait(flight->link, m->name, FC_ALL_GATHER, &flight->work));
    }
    if (m->comm->has_streams && !async_op) {
        FC_TRY(fc_comm_record(m->comm, fct_stream_current(m->device), &flight->done));
    }
done:
    return status;
}

/* Lets the host gather with torch's functions. The plan is still built: fc_gather_is_copied() must
 * return the same value on every rank, even if the host moves only this rank's data. */
static fc_status host_gather(fc_gather *a, bool post_forward, bool async_op, fc_lane lane) {
    const fc_members *m = a->members;
    const fc_link *link = select_link(a, post_forward);
    if (link->world > 1 && !any_extended(m)) {
        (void)!update_plan(a, post_forward, link->world, false);
    }
    return m->host->gather(m->owner, async_op, lane != FC_LANE_DIRECT) == 0 ? FC_OK : FC_ERAISED;
}

bool fc_gather_is_copied(const fc_gather *a, bool post_forward) {
    fc_link *link = select_link(a, post_forward);
    const fc_gather_plan *plan = post_forward ? &a->post_forward_plan : &a->plan;
    /* The link's process group may serve other device types as well. */
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
    if (fc_group_base_uses_fallback(m, FC_FALLBACK_GATHER)) {
        range = fc_members_enter_range(m, "all_gather");
        FC_TRY(host_gather(a, post_forward, async_op, lane));
        flight.hosted = true;
        a->flight = flight;
        goto done;
    }
    flight.extended = any_extended(m);
    if (flight.extended && m->shard.world > 1) { /* hooks are part of the range, as in torch */
        range = fc_members_enter_range(m, "all_gather");
    }
    FC_TRY(prepare_gather(a, post_forward, overlaps ? &m->comm->copy_in_stream : NULL, &flight));
    if (flight.link->world == 1 || flight.plan->row_bytes == 0) {
        a->flight = flight; /* nothing to send: the copy-out reads the shards */
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

/* Tensors that are created here must not be wrapped by functorch's transforms. */
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
    if (!a->flight.active) { /* a signal handler has reset the group */
        return fc_error_set(&m->comm->error, FC_ESTATE,
                            "the group was reset while its all-gather was waited for");
    }
done:
    return status;
}

static fc_status fill_unsharded(fc_gather *a) {
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
        FC_TRY(run_input_hooks(a, NULL));
    } else if (world == 1 && !post_forward) {
        bool aliased = false;
        FC_TRY(fc_unsharded_alias(m, &aliased));
        if (aliased) {
            return FC_OK;
        }
    }
    FC_TRY(update_plan(a, post_forward, world, extended));
    if (a->flight.split && fc_gather_plan_can_split(plan)) {
        fc_gather_plan_set_split(plan, true); /* update_plan may have built it again, packed */
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

/* Undoes a failed copy-out: frees the unsharded memory and keeps the gathered rows for another
 * attempt. With hooks the gather is discarded, because they run once per gather. */
static void undo_copy_out(fc_gather *a) {
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
    FC_TRY(fill_unsharded(a));
    FC_TRY(fc_unsharded_make(a->members, a->flight.extended));
done:
    if (status != FC_OK) {
        undo_copy_out(a);
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
    a->flight.hosted = false; /* the host has released it in copy_out() */
    clear_flight(a);
}

void fc_gather_undo_copy_out(fc_gather *a, fct_event *copied) {
    fc_comm_put_event(a->members->comm, copied);
    undo_copy_out(a);
    if (a->flight.hosted) {
        fc_gather_abandon(a); /* the host's copy_out() runs once per gather */
    }
}

/* ---- shards of the smaller group ---- */

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

/* ---- invariants ---- */

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
