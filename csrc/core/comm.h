/* The communication context that the groups of one root share: streams, events, what is in flight,
 * post-forward order.
 *
 * The lifetime rule, stated once: a buffer is released only
 *   - after its collective is done (devices without streams), or
 *   - after the stream that will reuse its memory has been made to wait for an event recorded after
 * the last use (devices with streams). Where a wait is abandoned (signal, exception, reset), Work
 * and buffers are parked here and reaped once the backend is done with them. */
#ifndef FSDP_C_CORE_COMM_H
#define FSDP_C_CORE_COMM_H

#include "../torch/torch_abi.h"
#include "order.h"
#include "status.h"

struct fc_reduction;

/* A collective that nobody waits for any more, and the memory it still uses. */
typedef struct fc_parked {
    fct_work *work;
    fct_tensor *buffers[2];
    struct fc_parked *next;
} fc_parked;

/* A gather buffer whose copy-out was queued: kept until the gather streams have waited for
 * `copied`. */
typedef struct fc_kept_gather {
    fct_tensor *buffer;
    fct_event *copied;
} fc_kept_gather;

typedef struct fc_comm {
    fct_device device;
    bool has_streams;
    bool streams_ready; /* fc_comm_init_streams was called: the four streams below are valid */
    fct_stream copy_in_stream;
    fct_stream gather_stream;
    fct_stream reduce_stream;
    fct_stream all_reduce_stream;
    fc_kept_gather kept;
    /* Reductions in flight, oldest first; reduction.c owns the list's contents. */
    struct fc_reduction *oldest;
    struct fc_reduction *newest;
    size_t reductions;
    size_t max_reductions;   /* how many may stay in flight when the next one starts; at least 1 */
    fct_event *last_reduced; /* end of the latest reduction on reduce_stream */
    fct_event *last_all_reduced; /* the same on all_reduce_stream */
    /* Rows that another stream works on, until reduce_stream has waited for their cast. */
    fc_kept_gather kept_rows[2];
    fc_order order;
    fc_parked *parked;
    fct_event **free_events;
    size_t free_event_count;
    size_t events_out; /* got and not put back yet */
    size_t free_event_capacity;
    fc_error error;
} fc_comm;

void fc_comm_init(fc_comm *c, fct_device device);
/* Takes the streams from torch's pool; idempotent, nothing on devices without streams. */
FC_CHECK fc_status fc_comm_init_streams(fc_comm *c);
/* No reduction may be in flight any more (fc_reduction_discard). */
void fc_comm_fini(fc_comm *c);

/* Pooled events; only on devices with streams. get: *out is the caller's until put back. put: NULL
 * is fine. */
FC_CHECK fc_status fc_comm_get_event(fc_comm *c, fct_event **out);
void fc_comm_put_event(fc_comm *c, fct_event *e);
/* An event that was got from one context will be put back into another of the same device. */
void fc_comm_hand_event(fc_comm *from, fc_comm *to);
/* An event from the pool recorded on s. */
FC_CHECK fc_status fc_comm_record(fc_comm *c, fct_stream s, fct_event **out);
/* The same into a slot, whose event so far (or NULL) is put back. */
FC_CHECK fc_status fc_comm_record_into(fc_comm *c, fct_stream s, fct_event **slot);
/* The event into another slot as well, whose event so far (or NULL) is put back: for whoever waits
 * for the same point. */
void fc_comm_share_event(fc_comm *c, fct_event *e, fct_event **slot);
/* Makes the current stream wait for the slot's event, which is put back; nothing where it is
 * NULL. */
FC_CHECK fc_status fc_comm_wait_and_put(fc_comm *c, fct_event **slot);
/* Makes `waiter` wait for all work queued on `other` so far. */
FC_CHECK fc_status fc_comm_order_streams(fc_comm *c, fct_stream waiter, fct_stream other);
/* The same for clean-up: as well as it can be done; a pending exception stays. */
void fc_comm_settle_streams(fc_comm *c, fct_stream waiter, fct_stream other);
/* Before memory is let go whose users are not known: the current stream waits for all of the
 * context's streams, and they for it. */
FC_CHECK fc_status fc_comm_quiesce(fc_comm *c);
/* What the gather streams do from now on waits for e: the copy-in stream waits, whose memory the
 * buffers are, and every gather comes to the gather stream behind its copy-in. Does nothing before
 * the streams are ready. */
FC_CHECK fc_status fc_comm_gather_streams_wait(fc_comm *c, fct_event *e);

/* Keeps a gather buffer whose copy-out was queued (takes both), until it is released: */
void fc_comm_keep_gather(fc_comm *c, fct_tensor *buffer, fct_event *copied);
/* Releases the kept gather buffer after ordering the gather streams behind its copy-out. */
FC_CHECK fc_status fc_comm_release_kept(fc_comm *c);

/* Keeps a row whose cast was queued on another stream than the row's (takes both, but not the row
 * where it fails), and lets the one before the last go: two stay, so that a reduce-scatter needs
 * not wait for an all-reduce. */
FC_CHECK fc_status fc_comm_keep_row(fc_comm *c, fct_tensor *row, fct_event *done);
/* Lets both go, once the reduce stream waits for their casts. */
FC_CHECK fc_status fc_comm_release_rows(fc_comm *c);

/* What must hold between transitions: FC_ESTATE with a message where it does not. */
FC_CHECK fc_status fc_comm_check(fc_comm *c);

/* Keeps work and buffers (all taken, NULL is fine) until the backend is done with them. Never
 * fails: where there is no memory for the record, the backend's own references are relied on. */
void fc_comm_park(fc_comm *c, fct_work *work, fct_tensor *first, fct_tensor *second);
void fc_comm_reap(fc_comm *c); /* releases what is done by now */

#endif
