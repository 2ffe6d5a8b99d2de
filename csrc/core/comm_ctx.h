/* Communication context that the groups of one root share: streams, events, pending work and the
 * post-forward order.
 *
 * Lifetime rule of buffers. A buffer is released only
 *   - after its collective is complete (devices without streams), or
 *   - after the stream that reuses its memory waits for an event that was recorded after the last
 *     use (devices with streams).
 * If a wait is abandoned (signal, exception, reset), the context keeps the Work and its buffers.
 * fc_comm_collect releases both after the backend has completed the Work. */
#ifndef FSDP_C_CORE_COMM_CTX_H
#define FSDP_C_CORE_COMM_CTX_H

#include "../bridge/collective.h"
#include "../bridge/gil.h"
#include "../bridge/stream.h"
#include "device_checksums.h"
#include "order.h"
#include "status.h"

struct fc_reduction;

/* A collective whose wait was abandoned, and the memory that it still uses. */
typedef struct fc_deferred_release {
    fct_work *work;
    fct_tensor *buffers[2];
    struct fc_deferred_release *next;
} fc_deferred_release;

/* A buffer whose last use is queued. The buffer is kept until the stream that reuses its memory
 * waits for `copied`. */
typedef struct fc_kept_buffer {
    fct_tensor *buffer;
    fct_event *copied;
} fc_kept_buffer;

typedef struct fc_comm_ctx {
    fct_device device;
    bool has_streams;
    bool streams_ready; /* fc_comm_init_streams has run: the four streams below are valid */
    fct_stream copy_in_stream;
    fct_stream gather_stream;
    fct_stream reduce_stream;
    fct_stream all_reduce_stream;
    fc_kept_buffer kept_gather; /* buffer of the latest FC_STREAM_DEFERRED gather */
    /* Reductions in flight, oldest first. reduction.c owns the list. */
    struct fc_reduction *oldest;
    struct fc_reduction *newest;
    size_t reductions;
    /* reductions that may be in flight at one time, with the one that starts; at least 1 */
    size_t max_reductions;
    fct_event *last_reduced;     /* end of the latest reduction on reduce_stream */
    fct_event *last_all_reduced; /* end of the latest reduction on all_reduce_stream */
    /* Outputs of reductions whose cast runs on another stream, until reduce_stream waits for the
     * cast. Oldest first; owned. */
    fc_kept_buffer *kept_outputs;
    size_t kept_output_count;
    size_t kept_output_capacity;
    fc_order order;
    uint32_t step;  /* iterations of the roots of this context so far, for messages */
    bool checksums; /* ranks compare checksums of the data of collectives; see checksum.h */
    fc_device_checksums *device_checksums; /* owned; NULL: none yet */
    fc_deferred_release *deferred;         /* list; owned */
    fct_event **free_events;
    size_t free_event_count;
    size_t events_out; /* events taken from the pool and not returned */
    size_t free_event_capacity;
    fc_error error;
} fc_comm_ctx;

void fc_comm_init(fc_comm_ctx *c, fct_device device);
/* Takes the streams from torch's pool. Idempotent. Does nothing on devices without streams. */
FC_CHECK fc_status fc_comm_init_streams(fc_comm_ctx *c);
/* Precondition: no reduction is in flight (fc_reduction_discard). */
void fc_comm_fini(fc_comm_ctx *c);

/* On devices with streams: opens and ends a scope of bridge/gil.h. Scopes contain no callback. */
static inline void fc_comm_enter_gil_scope(const fc_comm_ctx *c) {
    if (c->has_streams) {
        fct_gil_enter();
    }
}

static inline void fc_comm_leave_gil_scope(const fc_comm_ctx *c) {
    if (c->has_streams) {
        fct_gil_leave();
    }
}

/* Event pool, for devices with streams. get: the caller owns *out until it calls put. put: takes
 * the event; NULL is allowed. */
FC_CHECK fc_status fc_comm_get_event(fc_comm_ctx *c, fct_event **out);
void fc_comm_put_event(fc_comm_ctx *c, fct_event *e);
/* Moves one event between the counts events_out: the event was taken from `from` and will be
 * returned to `to`. Both contexts have the same device. */
void fc_comm_transfer_event(fc_comm_ctx *from, fc_comm_ctx *to);
/* Takes an event from the pool and records it on `s`. */
FC_CHECK fc_status fc_comm_record(fc_comm_ctx *c, fct_stream s, fct_event **out);
/* Like fc_comm_record, and stores the event in the slot. The slot's previous event (or NULL)
 * returns to the pool. */
FC_CHECK fc_status fc_comm_record_into(fc_comm_ctx *c, fct_stream s, fct_event **slot);
/* Stores the event in a second slot for another waiter. The slot's previous event (or NULL) returns
 * to the pool. */
void fc_comm_share_event(fc_comm_ctx *c, fct_event *e, fct_event **slot);
/* Makes the current stream wait for the slot's event, returns the event to the pool and clears the
 * slot. Does nothing if the slot is NULL. */
FC_CHECK fc_status fc_comm_wait_and_put(fc_comm_ctx *c, fct_event **slot);
/* Makes `waiter` wait for all work queued on `other` so far. */
FC_CHECK fc_status fc_comm_order_streams(fc_comm_ctx *c, fct_stream waiter, fct_stream other);
/* Like fc_comm_order_streams, for cleanup: ignores failures and preserves a pending exception. */
void fc_comm_settle_streams(fc_comm_ctx *c, fct_stream waiter, fct_stream other);
/* Makes the current stream wait for all streams of the context. Then makes all streams of the
 * context wait for the current stream. Call it before freeing memory whose users are unknown. */
FC_CHECK fc_status fc_comm_quiesce(fc_comm_ctx *c);
/* Makes later work on the gather streams wait for `e`. Only the copy-in stream waits, because the
 * buffers are its memory and each gather follows its copy-in. Does nothing before the streams are
 * ready, and if `e` is NULL. */
FC_CHECK fc_status fc_comm_gather_streams_wait(fc_comm_ctx *c, fct_event *e);

/* Keeps a gather buffer whose copy-out is queued, until fc_comm_release_gather. Takes both
 * arguments. */
void fc_comm_keep_gather(fc_comm_ctx *c, fct_tensor *buffer, fct_event *copied);
/* Makes the gather streams wait for the copy-out, then releases the kept gather buffer. */
FC_CHECK fc_status fc_comm_release_gather(fc_comm_ctx *c);

/* Keeps the output of a reduction whose cast runs on another stream than the output's, so that a
 * reduce-scatter does not wait for an all-reduce. Keeps at most max_reductions outputs, or two if
 * that is more; one more call releases the oldest output. Takes both arguments; on failure the
 * caller keeps the output. */
FC_CHECK fc_status fc_comm_keep_output(fc_comm_ctx *c, fct_tensor *output, fct_event *done);
/* Makes the reduce stream wait for the casts, then releases all kept outputs. */
FC_CHECK fc_status fc_comm_release_outputs(fc_comm_ctx *c);

/* Checks the invariants that hold between transitions. Returns FC_ESTATE with a message if one is
 * violated. */
FC_CHECK fc_status fc_comm_check(fc_comm_ctx *c);

/* Keeps the work and the buffers until the backend has completed the work. Takes all arguments;
 * NULL is allowed. Never fails: if the record cannot be allocated, only the backend's own
 * references keep the buffers. */
void fc_comm_defer_release(fc_comm_ctx *c, fct_work *work, fct_tensor *first, fct_tensor *second);
void fc_comm_collect(fc_comm_ctx *c); /* Releases deferred collectives that are complete. */

#endif
