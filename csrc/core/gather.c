/* All-gather of a group; see gather.h. Owns the plans, the chunks and the pending gather.
 *
 * Streams: copy-in and all-gather run on the context's gather streams. They run on the current
 * stream with FC_STREAM_DIRECT, with async_op, or before the gather streams exist. Copy-out always
 * runs on the current stream. A buffer is reused only after the gather streams wait for its
 * copy-out. */
#include "gather.h"

#include <assert.h>
#include <string.h>

#include "label.h"

/* ---- init and fini ---- */

void fc_gather_init(fc_gather *a, fc_group_base *base) {
    assert(base != NULL && base->callbacks != NULL);
    memset(a, 0, sizeof *a);
    a->base = base;
}

void fc_gather_return_event(fc_gather *a) {
    assert(a->resharded == NULL || a->base->comm != NULL);
    if (a->base->comm != NULL) {
        fc_comm_put_event(a->base->comm, a->resharded);
    }
    a->resharded = NULL;
}

void fc_gather_fini(fc_gather *a) {
    assert(a->pending.active || a->pending.work == NULL);
    fc_gather_abandon(a);
    fc_gather_return_event(a);
    fc_gather_plan_fini(&a->plan);
    fc_gather_plan_fini(&a->post_forward_plan);
    fc_transfer_fini(&a->transfer);
    fc_chunks_fini(&a->chunks);
    memset(a, 0, sizeof *a);
}

void fc_gather_invalidate(fc_gather *a) {
    assert(!a->plan.valid || a->plan.count == 0 || a->plan.slots != NULL);
    a->plan.valid = false;
    a->post_forward_plan.valid = false;
}

/* ---- abandon ---- */

/* Defers the release of memory that the backend may still use, and resets the pending gather. */
static void clear_pending(fc_gather *a) {
    fc_group_base *base = a->base;
    if (!a->pending.active) {
        return;
    }
    if (a->pending.uses_fallback) {
        base->callbacks->drop_gather(base->owner);
    }
    if (a->chunks.count > 0) { /* other ranks may use the gathered shards */
        fc_gather_checksum_add_unknown(&a->pending.checksum, base, a->pending.pg);
    }
    if (base->comm != NULL) {
        fc_comm_defer_release(base->comm, a->pending.work, a->pending.buffer, NULL);
        fc_comm_put_event(base->comm, a->pending.done);
    }
    fc_chunks_drop(&a->chunks); /* a Work that is still running holds references to the chunks */
    memset(&a->pending, 0, sizeof a->pending);
}

void fc_gather_abandon(fc_gather *a) {
    assert(a->pending.active || a->pending.work == NULL);
    fc_group_base *base = a->base;
    if (a->pending.active && base->comm != NULL && base->comm->streams_ready) {
        fct_stream current = fct_stream_current(base->device);
        fc_comm_settle_streams(base->comm, current, base->comm->gather_stream);
        fc_comm_settle_streams(base->comm, base->comm->copy_in_stream, current);
    }
    clear_pending(a);
}

fc_status fc_gather_can_free(const fc_gather *a) {
    return a->keep_storage ? FC_OK : fc_unsharded_can_free(a->base);
}

void fc_gather_free(fc_gather *a) {
    assert(a->base->count == 0 || a->base->params != NULL);
    if (!a->keep_storage) {
        fc_unsharded_free(a->base);
    }
}

/* ---- start ---- */

static bool any_extended(const fc_group_base *base) {
    bool any = false;
    for (size_t i = 0; !any && i < base->count; i++) {
        any = base->params[i]->extended;
    }
    return any;
}

static void drop_inputs(const fc_group_base *base) {
    for (size_t i = 0; i < base->count; i++) {
        fc_extension_drop_inputs(&base->params[i]->extension);
    }
}

/* Runs fsdp_pre_all_gather of extended parameters, on the stream of the pack. */
static fc_status run_input_hooks(fc_gather *a, const fct_stream *pack_stream) {
    const fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fct_stream previous = {0};
    if (pack_stream != NULL) {
        previous = fct_stream_set_current(*pack_stream);
    }
    for (size_t i = 0; i < base->count; i++) {
        if (base->params[i]->extended) {
            FC_TRY(base->callbacks->extend_inputs(base->params[i]->owner));
        }
    }
done:
    a->plan.valid = a->plan.valid && status == FC_OK; /* a failed hook may leave new inputs */
    if (pack_stream != NULL) {
        (void)fct_stream_set_current(previous);
    }
    return status;
}

/* Return the process group and the plan of the shards. `post_forward`: those of the post-forward
 * process group (reshard_after_forward as an int). */
static fc_process_group *select_process_group(const fc_gather *a, bool post_forward) {
    return post_forward ? &a->base->post_forward : &a->base->shard;
}

static fc_gather_plan *select_plan(fc_gather *a, bool post_forward) {
    return post_forward ? &a->post_forward_plan : &a->plan;
}

/* Builds the plan if the plan is not valid. `extended`: also if the inputs have changed. */
static fc_status update_plan(fc_gather *a, bool post_forward, int64_t world, bool extended) {
    const fc_group_base *base = a->base;
    fc_gather_plan *plan = select_plan(a, post_forward);
    bool fits = plan->valid && ((!extended && !plan->extended) ||
                                fc_gather_plan_fits(plan, base->params, base->count));
    return fits ? FC_OK
                : fc_gather_plan_build(plan, base->params, base->count, world, post_forward,
                                       base->device, &base->comm->error);
}

/* Orders the streams of all-gathers after the copies of fc_gather_keep_post_forward(). */
static fc_status wait_for_post_forward_shards(fc_gather *a) {
    fc_status status = fc_comm_gather_streams_wait(a->base->comm, a->resharded);
    if (status == FC_OK) {
        fc_gather_return_event(a);
    }
    return status;
}

/* Opens the process group, compares the plan, runs fsdp_pre_all_gather, updates the plan and orders
 * the streams. With one rank fsdp_pre_all_gather runs at copy-out instead. */
static fc_status prepare_gather(fc_gather *a, bool post_forward, const fct_stream *pack_stream,
                                fc_pending_gather *pending) {
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    pending->pg = select_process_group(a, post_forward);
    pending->plan = select_plan(a, post_forward);
    if (pending->pg->world > 1) {
        FC_TRY(fc_process_group_open(pending->pg));
        const bool waits = !pending->async_op && !a->prefetching;
        FC_TRY(fc_group_base_compare_plan(base, pending->pg, waits));
    }
    FC_TRY(fc_group_base_open_reduction(base));
    if (pending->extended && pending->pg->world > 1) {
        FC_TRY(run_input_hooks(a, pack_stream));
    }
    if (!pending->extended || pending->pg->world > 1) {
        FC_TRY(update_plan(a, post_forward, pending->pg->world, pending->extended));
    }
    FC_TRY(wait_for_post_forward_shards(a));
    fc_comm_collect(base->comm);
done:
    return status;
}

/* Creates a view of this rank's shard in the gather buffer. */
static fc_status view_input(const fc_pending_gather *pending, fct_tensor **input) {
    const int64_t numel = pending->plan->rank_numel;
    return fct_tensor_alias_1d(pending->buffer, numel, pending->pg->rank * numel, input) == 0
               ? FC_OK
               : FC_ERAISED;
}

/* Decides whether large parameters get their own chunks. Conditions: at least one parameter is
 * large enough, the device has kernels, the process group takes chunks, and keep_storage is not
 * set. Devices with streams, and the process group's allocator, use one buffer. */
static fc_status choose_split(const fc_gather *a, fc_pending_gather *pending) {
    const fc_group_base *base = a->base;
    fc_status status = FC_OK;
    bool packed = base->comm->has_streams || !fc_chunk_list_can_split(&pending->plan->chunks) ||
                  a->keep_storage || fck_backend_of(base->device.type) == NULL;
    pending->split = false;
    if (!packed) {
        FC_TRY(fc_group_base_has_memory(base, base->gather_memory, &packed));
    }
    if (!packed) {
        FC_TRY(fc_process_group_takes_chunks(pending->pg, base->device, FC_ALL_GATHER,
                                             &pending->split));
    }
    fc_gather_plan_set_split(pending->plan, pending->split);
done:
    return status;
}

/* Allocates the plan's chunks on the current stream. pending->buffer is the packed chunk. */
static fc_status make_chunks(fc_gather *a, fc_pending_gather *pending) {
    const fc_group_base *base = a->base;
    fc_status status = FC_OK;
    const fc_gather_plan *plan = pending->plan;
    FC_TRY(fc_chunks_begin(&a->chunks, plan->chunks.count));
    for (size_t i = 0; i < plan->chunks.count; i++) {
        const fc_chunk *chunk = &plan->chunks.chunks[i];
        const int64_t numel = plan->world * chunk->numel;
        fct_tensor *tensor = NULL;
        if (pending->split) {
            FC_TRY_RAISED(fct_tensor_empty(numel, plan->dtype, base->device, &tensor));
        } else {
            FC_TRY(fc_group_base_buffer(base, base->gather_memory, pending->pg, numel, plan->dtype,
                                        &tensor));
        }
        fc_chunks_add(&a->chunks, tensor);
        if (!chunk->owned) {
            fct_tensor_retain(tensor);
            pending->buffer = tensor;
        }
    }
done:
    return status;
}

/* Packs offloaded shards that need a cast into a separate tensor before the gather buffer is
 * allocated. The staged copies and the buffer are then never allocated at the same time. */
static fc_status pack_offloaded(fc_gather *a, const fc_gather_plan *plan, fct_tensor **packed) {
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    FC_TRY_RAISED(fct_tensor_empty(plan->rank_numel, plan->dtype, base->device, packed));
    FC_TRY(fc_transfer_pack(&a->transfer, plan, base->params, packed, 0, NULL, &base->comm->error));
done:
    return status;
}

/* Allocates the chunks and packs this rank's parts, on the current stream. */
static fc_status pack(fc_gather *a, fc_pending_gather *pending) {
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fct_tensor *packed = NULL;
    fct_tensor *input = NULL;
    const fc_gather_plan *plan = pending->plan;
    const int64_t rank = pending->pg->rank;
    if (plan->from_host && plan->casts) {
        FC_TRY(pack_offloaded(a, plan, &packed));
        FC_TRY(make_chunks(a, pending));
        FC_TRY(view_input(pending, &input));
        FC_TRY_RAISED(fct_tensor_copy(input, packed));
    } else {
        FC_TRY(make_chunks(a, pending));
        FC_TRY(fc_transfer_pack(&a->transfer, plan, base->params, a->chunks.tensors, rank,
                                fc_gather_checksum_of_pack(&pending->checksum, base),
                                &base->comm->error));
    }
    FC_TRY(fc_gather_checksum_read_packed(&pending->checksum, base, plan, rank, pending->buffer));
done:
    fct_tensor_release(input);
    fct_tensor_release(packed);
    return status;
}

/* Issues the collective over the chunks. */
static fc_status all_gather(fc_gather *a, fc_pending_gather *pending, bool async_op) {
    const fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fct_tensor *input = NULL;
    if (pending->split) {
        fct_chunk_layout layout = fc_chunk_list_layout(&pending->plan->chunks);
        layout.checksums = fc_gather_checksum_needs_chunks(base);
        return fc_process_group_gather_chunks(pending->pg, base->name, a->chunks.tensors,
                                              a->chunks.count, &layout, &pending->work);
    }
    FC_TRY(view_input(pending, &input));
    FC_TRY(fc_process_group_all_gather(pending->pg, base->name, pending->buffer, input, async_op,
                                       &pending->work));
done:
    fct_tensor_release(input);
    return status;
}

/* Packs on the current stream and issues the collective on `gather_stream` (NULL: the current
 * stream). */
static fc_status issue_gather(fc_gather *a, bool async_op, const fct_stream *gather_stream,
                              fc_pending_gather *pending) {
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fc_comm_enter_gil_scope(base->comm);
    FC_TRY(pack(a, pending));
    if (gather_stream != NULL) {
        FC_TRY(fc_comm_order_streams(base->comm, *gather_stream, fct_stream_current(base->device)));
        (void)fct_stream_set_current(*gather_stream);
    }
    FC_TRY(all_gather(a, pending, async_op));
    if (gather_stream != NULL) {
        FC_TRY(fc_process_group_wait(pending->pg, base->name, FC_ALL_GATHER, &pending->work));
    }
    if (base->comm->has_streams && !async_op) {
        FC_TRY(fc_comm_record(base->comm, fct_stream_current(base->device), &pending->done));
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    return status;
}

/* Runs the callback gather(), which uses torch's functions. Also builds the plan, because
 * fc_gather_is_cpu_bound() must return the same value on every rank, even if only this rank uses
 * the fallback. */
static fc_status callback_gather(fc_gather *a, bool post_forward, bool async_op,
                                 fc_stream_mode mode) {
    const fc_group_base *base = a->base;
    const fc_process_group *pg = select_process_group(a, post_forward);
    if (pg->world > 1 && !any_extended(base)) {
        FC_IGNORE(update_plan(a, post_forward, pg->world, false));
    }
    return base->callbacks->gather(base->owner, async_op, mode != FC_STREAM_DIRECT) == 0
               ? FC_OK
               : FC_ERAISED;
}

bool fc_gather_is_cpu_bound(const fc_gather *a, bool post_forward) {
    fc_process_group *pg = select_process_group(a, post_forward);
    const fc_gather_plan *plan = post_forward ? &a->post_forward_plan : &a->plan;
    /* On devices with streams the device copies the data, even if the process group also has a CPU
     * backend. */
    return !a->base->comm->has_streams && pg->world > 1 && plan->valid && !plan->extended &&
           fc_process_group_is_cpu_bound(pg, plan->rank_bytes);
}

static fct_op_pass pass_of_mode(fc_stream_mode mode) {
    return mode == FC_STREAM_DEFERRED  ? FCT_PASS_FORWARD
           : mode == FC_STREAM_OVERLAP ? FCT_PASS_BACKWARD
                                       : FCT_PASS_OTHER;
}

fc_status fc_gather_start(fc_gather *a, bool post_forward, bool async_op, fc_stream_mode mode) {
    assert(!a->pending.active && mode <= FC_STREAM_DEFERRED);
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fc_pending_gather pending = {.active = true, .async_op = async_op};
    void *range = NULL;
    void *pause = fct_functorch_pause(); /* transforms must not wrap the new tensors */
    const bool overlaps = base->comm->streams_ready && !async_op && mode != FC_STREAM_DIRECT;
    if (fc_group_base_uses_fallback(base, FC_FALLBACK_GATHER)) {
        range = fc_group_base_enter_range(base, "all_gather");
        pending.pg = select_process_group(a, post_forward);
        FC_TRY(fc_process_group_number_root(pending.pg, base->device));
        FC_TRY(wait_for_post_forward_shards(a));
        FC_TRY(callback_gather(a, post_forward, async_op, mode));
        pending.uses_fallback = true;
        a->pending = pending;
        goto done;
    }
    pending.extended = any_extended(base);
    if (pending.extended && base->shard.world > 1) { /* as in torch, the range includes the hooks */
        range = fc_group_base_enter_range(base, "all_gather");
    }
    FC_TRY(
        prepare_gather(a, post_forward, overlaps ? &base->comm->copy_in_stream : NULL, &pending));
    if (pending.pg->world == 1 || pending.plan->rank_bytes == 0) {
        a->pending = pending; /* nothing to send: the copy-out reads the shards */
        goto done;
    }
    FC_TRY(choose_split(a, &pending));
    fc_label_set_gather(&pending.pg->label, base->comm, pass_of_mode(mode),
                        pending.plan->rank_bytes);
    if (range == NULL) {
        range = fc_group_base_enter_range(base, "all_gather");
    }
    fct_stream previous = {0};
    if (overlaps) {
        previous = fct_stream_set_current(base->comm->copy_in_stream);
    }
    status = issue_gather(a, async_op, overlaps ? &base->comm->gather_stream : NULL, &pending);
    if (overlaps) {
        (void)fct_stream_set_current(previous);
    }
    a->pending = pending;
    if (status != FC_OK) {
        fc_gather_abandon(a);
    }
done:
    if (pending.extended) {
        drop_inputs(base);
    }
    fct_profile_exit(range);
    fct_functorch_resume(pause);
    return status;
}

/* ---- wait and copy out ---- */

fc_status fc_gather_await(fc_gather *a) {
    assert(a->pending.active);
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    if (a->pending.work != NULL) {
        FC_TRY(fc_group_base_compare_plan(base, a->pending.pg, true));
    }
    if (a->pending.done != NULL) {
        FC_TRY_RAISED(fct_event_wait(a->pending.done, fct_stream_current(base->device)));
    }
    const fct_work *work = a->pending.work;
    FC_TRY(fc_process_group_complete(a->pending.pg, base->name, FC_ALL_GATHER, a->pending.work));
    if (!a->pending.active || a->pending.work != work) { /* a signal handler has reset the group */
        return fc_error_set(&base->comm->error, FC_ESTATE,
                            "the group was reset while its all-gather was waited for");
    }
    if (a->pending.split && a->pending.work != NULL) { /* NULL: a second call */
        fc_gather_checksum_take_owned(&a->pending.checksum, base, a->pending.plan,
                                      a->pending.pg->rank, a->pending.work);
    }
    fct_work_release(a->pending.work);
    a->pending.work = NULL;
done:
    return status;
}

static fc_status fill_unsharded(fc_gather *a) {
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fc_gather_plan *plan = a->pending.plan;
    if (a->pending.uses_fallback) {
        fct_tensor *buffer = NULL;
        FC_TRY_RAISED(base->callbacks->copy_out(base->owner, &buffer));
        fc_unsharded_record_versions(base); /* aliases of an earlier gather may still be in use */
        fct_tensor_release(a->pending.buffer);
        a->pending.buffer = buffer;
        fc_gather_checksum_add_unknown(&a->pending.checksum, base, a->pending.pg);
        return FC_OK;
    }
    const bool post_forward = plan == &a->post_forward_plan;
    const bool extended = a->pending.extended;
    const int64_t world = a->pending.pg->world;
    if (extended && world == 1) {
        FC_TRY(run_input_hooks(a, NULL));
    } else if (world == 1 && !post_forward) {
        bool aliased = false;
        FC_TRY(fc_unsharded_alias(base, &aliased));
        if (aliased) {
            return FC_OK;
        }
    }
    FC_TRY(update_plan(a, post_forward, world, extended));
    if (a->pending.split && fc_chunk_list_can_split(&plan->chunks)) {
        /* update_plan may have built the plan again, packed */
        fc_gather_plan_set_split(plan, true);
    }
    if (world > 1 && plan->rank_bytes > 0 &&
        (a->pending.split != plan->chunks.split || a->chunks.count != plan->chunks.count)) {
        return fc_error_set(&base->comm->error, FC_EASSERT,
                            "parameters were changed while they were gathered");
    }
    const bool has_data = a->chunks.count > 0;
    fc_checksum *checksum =
        has_data ? fc_gather_checksum_of_copy_out(&a->pending.checksum, base) : NULL;
    fc_comm_enter_gil_scope(base->comm);
    FC_TRY(fc_unsharded_alloc(base, plan, &a->chunks));
    if (world == 1) {
        FC_TRY(
            fc_transfer_fill(&a->transfer, plan, base->params, base->device, &base->comm->error));
        drop_inputs(base);
    } else if (a->pending.buffer != NULL) {
        FC_TRY(fc_transfer_unpack(&a->transfer, plan, base->params, plan->chunks.count - 1,
                                  a->pending.buffer, a->pending.pg->rank, checksum,
                                  &base->comm->error));
    }
    if (has_data) {
        FC_TRY(fc_gather_checksum_add(&a->pending.checksum, base, a->pending.pg, plan,
                                      a->pending.buffer));
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    return status;
}

/* Undoes a failed copy-out: frees the unsharded memory and keeps the gathered shards for another
 * attempt. A gather of extended parameters or of the fallback is discarded: the hooks of extended
 * parameters and the callback copy_out() run once per gather. */
static void undo_copy_out(fc_gather *a) {
    if (a->pending.split) {
        fc_unsharded_return_chunks(a->base, a->pending.plan, &a->chunks);
    }
    fc_gather_free(a);
    if (a->pending.extended) {
        drop_inputs(a->base);
    }
    if (a->pending.extended || a->pending.uses_fallback) {
        fc_gather_abandon(a);
    }
}

fc_status fc_gather_copy_out(fc_gather *a) {
    assert(a->pending.active && a->pending.work == NULL);
    fc_status status = FC_OK;
    void *pause = fct_functorch_pause();
    FC_TRY(fill_unsharded(a));
    FC_TRY(fc_unsharded_make(a->base, a->pending.extended));
done:
    if (status != FC_OK) {
        undo_copy_out(a);
    }
    fct_functorch_resume(pause);
    return status;
}

fc_status fc_gather_end_copy_out(fc_gather *a, fc_stream_mode mode, fct_event **copied) {
    assert(mode <= FC_STREAM_DEFERRED && *copied == NULL);
    fc_group_base *base = a->base;
    fc_status status = FC_OK;
    fct_event *end = NULL;
    if (!base->comm->has_streams || a->pending.buffer == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_comm_record(base->comm, fct_stream_current(base->device), &end));
    if (!a->pending.async_op && mode == FC_STREAM_DEFERRED) {
        *copied = end;
        end = NULL;
    } else {
        FC_TRY(fc_comm_gather_streams_wait(base->comm, end));
    }
done:
    fc_comm_put_event(base->comm, end);
    return status;
}

void fc_gather_complete(fc_gather *a, fct_event *copied) {
    assert(copied == NULL || a->base->comm->has_streams);
    if (copied != NULL) {
        fc_comm_keep_gather(a->base->comm, a->pending.buffer, copied);
        a->pending.buffer = NULL;
    }
    a->pending.uses_fallback = false; /* copy_out() has released the fallback's gather */
    clear_pending(a);
}

void fc_gather_undo_copy_out(fc_gather *a, fct_event *copied) {
    assert(copied == NULL || a->base->comm->has_streams);
    fc_comm_put_event(a->base->comm, copied);
    undo_copy_out(a);
}

/* ---- shards of the post-forward process group ---- */

fc_status fc_gather_keep_post_forward(fc_gather *a) {
    assert(a->base->post_forward.name != NULL);
    fc_status status = FC_OK;
    fc_group_base *base = a->base;
    fc_comm_enter_gil_scope(base->comm);
    for (size_t i = 0; i < base->count; i++) {
        FC_TRY(fc_param_keep_post_forward(base->params[i], base->device, &base->comm->error));
    }
    fc_comm_leave_gil_scope(base->comm);
    for (size_t i = 0; i < base->count; i++) {
        const fc_param *p = base->params[i];
        FC_TRY_RAISED(base->callbacks->make_post_forward(p->owner, p->post_forward_data));
    }
    if (base->comm->has_streams) {
        FC_TRY(fc_comm_record_into(base->comm, fct_stream_current(base->device), &a->resharded));
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    return status;
}

/* ---- invariants ---- */

fc_status fc_gather_check(const fc_gather *a, bool unsharded) {
    fc_status status = FC_OK;
    const fc_pending_gather *pending = &a->pending;
    fc_error *error = &a->base->comm->error;
    if (pending->active && unsharded) {
        return fc_error_set(error, FC_ESTATE, "a gather is in flight while the group is unsharded");
    }
    if (!pending->active && (pending->buffer != NULL || pending->work != NULL ||
                             pending->done != NULL || a->chunks.count > 0)) {
        return fc_error_set(error, FC_ESTATE,
                            "an inactive gather holds a buffer, chunks, work or event");
    }
    FC_TRY(fc_gather_plan_check(&a->plan, a->base->params, a->base->count, error));
    FC_TRY(fc_gather_plan_check(&a->post_forward_plan, a->base->params, a->base->count, error));
    FC_TRY(fc_unsharded_check(a->base, unsharded, a->keep_storage));
done:
    return status;
}
