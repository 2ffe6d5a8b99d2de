/* Communication context; see comm_ctx.h for the lifetime rule of buffers. Owns the event pool, the
 * kept buffers and the deferred collectives. The context also holds the list of reductions in
 * flight, which reduction.c owns.
 *
 * Streams: gathers copy in on copy_in_stream and communicate on gather_stream. Reductions run on
 * reduce_stream. A user's hook, all-reduces and the work after them run on all_reduce_stream.
 * Computation runs on the caller's current stream. */
#include "comm_ctx.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/error.h"
#include "../bridge/tensor.h"
#include "recorder.h"

/* Outputs of reductions that every context may keep. */
enum { OUTPUTS_MIN = 2 };

void fc_comm_init(fc_comm_ctx *c, fct_device device) {
    assert(device.type >= 0 && device.index >= -1);
    memset(c, 0, sizeof *c);
    c->device = device;
    c->has_streams = fct_device_has_streams(device);
    c->max_reductions = 1;
}

fc_status fc_comm_init_streams(fc_comm_ctx *c) {
    assert(c->has_streams || !c->streams_ready);
    fc_status status = FC_OK;
    if (c->streams_ready || !c->has_streams) {
        return FC_OK;
    }
    FC_TRY_RAISED(fct_stream_new(c->device, true, &c->copy_in_stream));
    FC_TRY_RAISED(fct_stream_new(c->device, true, &c->gather_stream));
    FC_TRY_RAISED(fct_stream_new(c->device, true, &c->reduce_stream));
    FC_TRY_RAISED(fct_stream_new(c->device, false, &c->all_reduce_stream));
    c->streams_ready = true;
done:
    return status;
}

/* Releases the buffer and returns its event to the pool. */
static void release_kept(fc_comm_ctx *c, fc_kept_buffer *kept) {
    fct_tensor_release(kept->buffer);
    fc_comm_put_event(c, kept->copied);
    *kept = (fc_kept_buffer){NULL, NULL};
}

void fc_comm_fini(fc_comm_ctx *c) {
    assert(c->oldest == NULL); /* the owner has called fc_reduction_discard */
    release_kept(c, &c->kept_gather);
    fc_comm_put_event(c, c->last_reduced);
    fc_comm_put_event(c, c->last_all_reduced);
    for (size_t i = 0; i < c->kept_output_count; i++) {
        release_kept(c, &c->kept_outputs[i]);
    }
    free(c->kept_outputs);
    fc_device_checksums_free(c->device_checksums);
    assert(c->events_out == 0); /* every group has returned its events */
    while (c->deferred != NULL) {
        fc_deferred_release *next = c->deferred->next;
        fct_work_release(c->deferred->work);
        fct_tensor_release(c->deferred->buffers[0]);
        fct_tensor_release(c->deferred->buffers[1]);
        free(c->deferred);
        c->deferred = next;
    }
    for (size_t i = 0; i < c->free_event_count; i++) {
        fct_event_free(c->free_events[i]);
    }
    free(c->free_events);
    fc_order_fini(&c->order);
    memset(c, 0, sizeof *c);
}

fc_status fc_comm_get_event(fc_comm_ctx *c, fct_event **out) {
    assert(c->has_streams);
    if (c->free_event_count > 0) {
        *out = c->free_events[--c->free_event_count];
    } else if (fct_event_new(c->device, out) != 0) {
        return FC_ERAISED;
    }
    c->events_out++;
    return FC_OK;
}

void fc_comm_put_event(fc_comm_ctx *c, fct_event *e) {
    if (e == NULL) {
        return;
    }
    assert(c->events_out > 0);
    c->events_out--;
    if (fct_event_unshare(e)) {
        return;
    }
    if (c->free_event_count == c->free_event_capacity) {
        size_t capacity = c->free_event_capacity == 0 ? 16 : 2 * c->free_event_capacity;
        fct_event **grown = (fct_event **)realloc(c->free_events, capacity * sizeof *grown);
        if (grown == NULL) {
            fct_event_free(e);
            return;
        }
        c->free_events = grown;
        c->free_event_capacity = capacity;
    }
    c->free_events[c->free_event_count++] = e;
}

void fc_comm_transfer_event(fc_comm_ctx *from, fc_comm_ctx *to) {
    assert(from != to && from->events_out > 0);
    from->events_out--;
    to->events_out++;
}

fc_status fc_comm_record(fc_comm_ctx *c, fct_stream s, fct_event **out) {
    assert(c->has_streams);
    fc_status status = FC_OK;
    fct_event *e = NULL;
    FC_TRY(fc_comm_get_event(c, &e));
    FC_TRY_RAISED(fct_event_record(e, s));
    *out = e;
    e = NULL;
done:
    fc_comm_put_event(c, e);
    return status;
}

fc_status fc_comm_record_into(fc_comm_ctx *c, fct_stream s, fct_event **slot) {
    assert(c->has_streams);
    fct_event *event = NULL;
    fc_status status = fc_comm_record(c, s, &event);
    if (status == FC_OK) {
        fc_comm_put_event(c, *slot);
        *slot = event;
    }
    return status;
}

void fc_comm_share_event(fc_comm_ctx *c, fct_event *e, fct_event **slot) {
    assert(e != NULL && c->events_out > 0);
    fct_event *previous = *slot;
    fct_event_share(e);
    c->events_out++;
    *slot = e;
    fc_comm_put_event(c, previous);
}

fc_status fc_comm_wait_and_put(fc_comm_ctx *c, fct_event **slot) {
    assert(*slot == NULL || c->events_out > 0);
    if (*slot == NULL) {
        return FC_OK;
    }
    if (fct_event_wait(*slot, fct_stream_current(c->device)) != 0) {
        return FC_ERAISED;
    }
    fc_comm_put_event(c, *slot);
    *slot = NULL;
    return FC_OK;
}

fc_status fc_comm_order_streams(fc_comm_ctx *c, fct_stream waiter, fct_stream other) {
    assert(c->has_streams);
    fc_status status = FC_OK;
    fct_event *e = NULL;
    FC_TRY(fc_comm_record(c, other, &e));
    FC_TRY_RAISED(fct_event_wait(e, waiter));
done:
    fc_comm_put_event(c, e);
    return status;
}

void fc_comm_settle_streams(fc_comm_ctx *c, fct_stream waiter, fct_stream other) {
    assert(c->has_streams);
    void *error = fct_error_set_aside();
    FC_IGNORE(fc_comm_order_streams(c, waiter, other));
    fct_error_put_back(error);
}

fc_status fc_comm_quiesce(fc_comm_ctx *c) {
    assert(c->has_streams || !c->streams_ready);
    fc_status status = FC_OK;
    if (!c->streams_ready) {
        return FC_OK;
    }
    const fct_stream all[] = {c->copy_in_stream, c->gather_stream, c->reduce_stream,
                              c->all_reduce_stream};
    fct_stream current = fct_stream_current(c->device);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        FC_TRY(fc_comm_order_streams(c, current, all[i]));
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        FC_TRY(fc_comm_order_streams(c, all[i], current));
    }
done:
    return status;
}

fc_status fc_comm_gather_streams_wait(fc_comm_ctx *c, fct_event *e) {
    assert(e == NULL || c->has_streams);
    if (!c->streams_ready || e == NULL) {
        return FC_OK;
    }
    return fct_event_wait(e, c->copy_in_stream) == 0 ? FC_OK : FC_ERAISED;
}

/* If another thread has kept a buffer since the last release, this function releases that buffer
 * first. */
void fc_comm_keep_gather(fc_comm_ctx *c, fct_tensor *buffer, fct_event *copied) {
    assert(copied != NULL && c->has_streams);
    void *error = fct_error_set_aside();
    if (fc_comm_release_gather(c) != FC_OK) {
        release_kept(c, &c->kept_gather);
    }
    fct_error_put_back(error);
    c->kept_gather.buffer = buffer;
    c->kept_gather.copied = copied;
}

fc_status fc_comm_release_gather(fc_comm_ctx *c) {
    assert(c->kept_gather.buffer == NULL || c->kept_gather.copied != NULL);
    fc_status status = FC_OK;
    if (c->kept_gather.buffer == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_comm_gather_streams_wait(c, c->kept_gather.copied));
    release_kept(c, &c->kept_gather);
done:
    return status;
}

/* Makes the reduce stream wait for the cast of the oldest output, then releases the output. */
static fc_status release_oldest_output(fc_comm_ctx *c) {
    if (fct_event_wait(c->kept_outputs[0].copied, c->reduce_stream) != 0) {
        return FC_ERAISED;
    }
    release_kept(c, &c->kept_outputs[0]);
    c->kept_output_count--;
    memmove(c->kept_outputs, c->kept_outputs + 1, c->kept_output_count * sizeof *c->kept_outputs);
    return FC_OK;
}

/* Allocates space for one more output. */
static fc_status grow_kept_outputs(fc_comm_ctx *c) {
    size_t capacity = c->kept_output_capacity == 0 ? OUTPUTS_MIN : 2 * c->kept_output_capacity;
    fc_kept_buffer *grown =
        (fc_kept_buffer *)realloc(c->kept_outputs, capacity * sizeof *c->kept_outputs);
    if (grown == NULL) {
        return FC_ENOMEM;
    }
    c->kept_outputs = grown;
    c->kept_output_capacity = capacity;
    return FC_OK;
}

fc_status fc_comm_keep_output(fc_comm_ctx *c, fct_tensor *output, fct_event *done) {
    assert(output != NULL && done != NULL && c->streams_ready);
    fc_status status = FC_OK;
    size_t limit = c->max_reductions > OUTPUTS_MIN ? c->max_reductions : OUTPUTS_MIN;
    while (c->kept_output_count >= limit) {
        FC_TRY(release_oldest_output(c));
    }
    if (c->kept_output_count == c->kept_output_capacity) {
        FC_TRY(grow_kept_outputs(c));
    }
    c->kept_outputs[c->kept_output_count++] = (fc_kept_buffer){.buffer = output, .copied = done};
    done = NULL;
done:
    fc_comm_put_event(c, done);
    return status;
}

fc_status fc_comm_release_outputs(fc_comm_ctx *c) {
    assert(c->streams_ready || c->kept_output_count == 0);
    fc_status status = FC_OK;
    while (c->kept_output_count > 0) {
        FC_TRY(release_oldest_output(c));
    }
done:
    return status;
}

fc_status fc_comm_check(fc_comm_ctx *c) {
    if ((c->kept_gather.buffer == NULL) != (c->kept_gather.copied == NULL)) {
        return fc_error_set(
            &c->error, FC_ESTATE,
            "a gather buffer is kept without its event, or an event without its buffer");
    }
    if (c->events_out > 0 && !c->has_streams) {
        return fc_error_set(&c->error, FC_ESTATE,
                            "%zu events are in use on a device without streams", c->events_out);
    }
    return FC_OK;
}

void fc_comm_defer_release(fc_comm_ctx *c, fct_work *work, fct_tensor *first, fct_tensor *second) {
    assert(c->max_reductions > 0);
    fc_deferred_release *record = NULL;
    if (work != NULL) {
        fc_recorder_end(fc_recorder_wait(work), FC_RECORD_ABANDONED);
    }
    if (work != NULL && !fct_work_done(work)) {
        record = (fc_deferred_release *)malloc(sizeof *record);
    }
    if (record == NULL) {
        fct_work_release(work);
        fct_tensor_release(first);
        fct_tensor_release(second);
        return;
    }
    record->work = work;
    record->buffers[0] = first;
    record->buffers[1] = second;
    record->next = c->deferred;
    c->deferred = record;
}

void fc_comm_collect(fc_comm_ctx *c) {
    assert(c->max_reductions > 0);
    fc_deferred_release **slot = &c->deferred;
    while (*slot != NULL) {
        fc_deferred_release *record = *slot;
        if (!fct_work_done(record->work)) {
            slot = &record->next;
            continue;
        }
        *slot = record->next;
        fct_work_release(record->work);
        fct_tensor_release(record->buffers[0]);
        fct_tensor_release(record->buffers[1]);
        free(record);
    }
}
