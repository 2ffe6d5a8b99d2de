/* All-gather of a group's shards: pack, all-gather, copy-out. Owns the gather plans and the pending
 * gather, and decides when unsharded parameters get and lose their memory. The group controls when
 * a gather runs and which parameters are registered.
 *
 * Preconditions: fc_gather_init. The group has a comm context in all functions that can fail.
 * Events are passed only on devices with streams. */
#ifndef FSDP_C_CORE_GATHER_H
#define FSDP_C_CORE_GATHER_H

#include "chunks.h"
#include "gather_checksum.h"
#include "group_base.h"
#include "plan.h"
#include "transfer.h"
#include "unsharded.h"

/* Stream mode of a gather, for devices with streams. A deferred gather keeps its buffer until the
 * next group waits, so that the copy-in of the next group overlaps with this copy-out. */
typedef enum fc_stream_mode {
    FC_STREAM_DIRECT,  /* on the current stream */
    FC_STREAM_OVERLAP, /* on the context's gather streams, which wait for the copy-out at once */
    /* on the gather streams, which wait for the copy-out when the next group waits */
    FC_STREAM_DEFERRED
} fc_stream_mode;

/* A pending all-gather, from fc_gather_start to fc_gather_complete or fc_gather_abandon. */
typedef struct fc_pending_gather {
    bool active;
    bool uses_fallback; /* torch's functions perform the gather */
    /* unshard(async_op=True): no gather stream; the wait runs on the caller's stream */
    bool async_op;
    bool extended;        /* hooks of extended parameters take part */
    bool split;           /* large parameters are gathered into their own chunks */
    fc_gather_plan *plan; /* points into fc_gather */
    fc_process_group *pg; /* points into fc_group_base */
    /* The packed chunk, or the buffer of the fallback's copy_out(). NULL with one rank, or if every
     * input has its own chunk. */
    fct_tensor *buffer;
    fct_work *work;  /* NULL if the collective is complete, or if `done` is set instead */
    fct_event *done; /* end of the all-gather; only with streams and without async_op */
    fc_gather_checksum checksum;
} fc_pending_gather;

/* State of a group's gathers. Embedded in fc_group. */
typedef struct fc_gather {
    fc_group_base *base;              /* borrowed */
    fc_gather_plan plan;              /* of the shards */
    fc_gather_plan post_forward_plan; /* of the smaller group's shards */
    fc_transfer transfer;             /* scratch memory of both plans */
    /* tensors of the pending gather; owned chunks become parameter memory at copy-out */
    fc_chunks chunks;
    fct_event *resharded; /* end of the copy to post_forward_data; only with streams */
    bool prefetching;     /* a later pass waits for the gather that is started next */
    bool keep_storage;    /* unsharded memory is never freed, so its addresses are stable */
    fc_pending_gather pending;
} fc_gather;

/* Borrows `base`, which must outlive the gather. */
void fc_gather_init(fc_gather *a, fc_group_base *base);
/* Abandons a pending gather and releases everything. */
void fc_gather_fini(fc_gather *a);
/* Returns the event `resharded` to the comm context. Call it before the group changes its
 * context. */
void fc_gather_return_event(fc_gather *a);
/* Marks the plans as invalid after a shard or dtype was replaced. The next start builds them
 * again. */
void fc_gather_invalidate(fc_gather *a);

/* Packs this rank's shard and issues the collective. `post_forward`: gathers the smaller group's
 * shards. On failure nothing is pending. */
FC_CHECK fc_status fc_gather_start(fc_gather *a, bool post_forward, bool async_op,
                                   fc_stream_mode mode);
/* Returns true if the gather would be CPU-bound (fc_process_group_is_cpu_bound), so that
 * prefetching has no benefit. */
bool fc_gather_is_cpu_bound(const fc_gather *a, bool post_forward);
/* Makes the gathered shards visible to the current stream; on the CPU, to the caller. */
FC_CHECK fc_status fc_gather_await(fc_gather *a);
/* Performs all steps of the unshard that can fail before the swap: memory, contents, parameter
 * objects. On failure no unsharded parameter holds memory, unless keep_storage is set. A gather of
 * extended parameters or of the fallback is then discarded: their hooks and the callback copy_out()
 * run once per gather. */
FC_CHECK fc_status fc_gather_copy_out(fc_gather *a);
/* Orders the next use of the buffer after the copy-out. This is the last step of a gather that can
 * fail; the swap of the parameters may still fail. *copied is set if the mode leaves the wait to
 * the next group. */
FC_CHECK fc_status fc_gather_end_copy_out(fc_gather *a, fc_stream_mode mode, fct_event **copied);
/* Frees the unsharded memory after a failure of fc_gather_end_copy_out or of a later step. The
 * gathered shards stay if they can be copied out again. Takes `copied`. */
void fc_gather_undo_copy_out(fc_gather *a, fct_event *copied);
/* Ends the gather. Frees its buffer, or keeps the buffer until the event `copied` if `copied` is
 * not NULL. Takes `copied`. */
void fc_gather_complete(fc_gather *a, fct_event *copied);
/* Discards the pending gather without a wait. With streams, the stream that allocated the buffer
 * waits for the work that uses it. */
void fc_gather_abandon(fc_gather *a);

/* can_free: see fc_unsharded_can_free(). free frees the memory of the unsharded parameters, unless
 * keep_storage is set. */
FC_CHECK fc_status fc_gather_can_free(const fc_gather *a);
void fc_gather_free(fc_gather *a);

/* Copies this rank's part for the smaller group of each parameter. The callbacks create parameters
 * over these copies. After a failure some parameters may exist: call
 * fc_unsharded_drop_post_forward. */
FC_CHECK fc_status fc_gather_keep_post_forward(fc_gather *a);

/* Checks the invariants that hold between transitions. Returns FC_ESTATE with a message if one is
 * violated. `unsharded`: the modules hold the unsharded parameters. */
FC_CHECK fc_status fc_gather_check(const fc_gather *a, bool unsharded);

#endif
