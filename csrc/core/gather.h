/* The gather of a group's shards: pack, all-gather, copy out. Owns its plans and what is in flight,
 * and says when the unsharded parameters get their memory and lose it. What the modules see is the
 * group's business, and so is when any of this happens. */
#ifndef FSDP_C_CORE_GATHER_H
#define FSDP_C_CORE_GATHER_H

#include "chunks.h"
#include "members.h"
#include "plan.h"
#include "transfer.h"
#include "unsharded.h"

/* Where a gather runs on a device with streams. */
typedef enum fc_lane {
    FC_LANE_DIRECT,  /* on the current stream */
    FC_LANE_OVERLAP, /* on the context's gather streams, which wait for the copy-out at once */
    FC_LANE_DEFERRED /* likewise, but they wait only when the next group waits: until then copy-in
                        overlaps, and the buffer is kept */
} fc_lane;

/* An all-gather between start and retire. */
typedef struct fc_flight {
    bool active;
    bool hosted;          /* the host has it */
    bool async_op;        /* the caller asked for a work to wait for, on its own stream */
    bool extended;        /* hooks of extended parameters take part */
    bool split;           /* large parameters are gathered into chunks of their own */
    fc_gather_plan *plan; /* in the gather */
    fc_link *link;        /* in the members */
    fct_tensor *buffer;   /* the packed chunk; NULL in a group of one rank, and without one */
    fct_work *work;       /* NULL where the backend was done at once or an event stands for it */
    fct_event *done;      /* on devices with streams, unless async_op */
} fc_flight;

typedef struct fc_gather {
    fc_members *members;              /* borrowed */
    fc_gather_plan plan;              /* of the shards */
    fc_gather_plan post_forward_plan; /* of the smaller group's shards, while forward left those */
    fc_transfer transfer;             /* of both */
    fc_chunks chunks;     /* in flight; owned ones become the parameters' memory at copy-out */
    fct_event *resharded; /* post_forward_data was copied; only with streams */
    bool keep_storage;    /* unsharded memory is never freed: its addresses stay */
    fc_flight flight;
} fc_gather;

void fc_gather_init(fc_gather *a, fc_members *members);
/* Abandons what is in flight, releases all. */
void fc_gather_fini(fc_gather *a);
/* Gives its event back to the context, which is to change. */
void fc_gather_forget_event(fc_gather *a);
/* A shard or dtype was replaced: plans are built anew at the next start. */
void fc_gather_invalidate(fc_gather *a);

/* Takes the shards that users have replaced; before each unshard. */
FC_CHECK fc_status fc_gather_follow(fc_gather *a);
/* Packs this rank's row and issues the collective; on failure nothing is in flight.
 * `post_forward`: from the smaller group's shards. */
FC_CHECK fc_status fc_gather_start(fc_gather *a, bool post_forward, bool async_op, fc_lane lane);
/* Whether processors that compute would copy its rows, so that to gather ahead gains nothing. */
bool fc_gather_is_copied(const fc_gather *a, bool post_forward);
/* Makes the current stream (or the host) see the gathered rows. */
FC_CHECK fc_status fc_gather_await(fc_gather *a);
/* Everything of the unshard that can fail: memory, contents and the parameter objects. On failure
 * no unsharded parameter holds memory, and where hooks take part the gather is given up: they are
 * called once for each. */
FC_CHECK fc_status fc_gather_copy_out(fc_gather *a);
/* The last that can fail: orders whoever reuses the buffer after the copy-out. *copied is set where
 * the lane leaves that to the next group's wait. */
FC_CHECK fc_status fc_gather_end_copy_out(fc_gather *a, fc_lane lane, fct_event **copied);
/* After a failure of the latter, or of what comes behind it: frees the unsharded memory. The rows
 * stay where they can be copied out again. Takes `copied`. */
void fc_gather_undo_copy_out(fc_gather *a, fct_event *copied);
/* The gather is over: its buffer is kept (until `copied`, which is taken) or freed. */
void fc_gather_retire(fc_gather *a, fct_event *copied);
/* Gives up on the gather in flight without waiting. On a device with streams, whichever stream the
 * buffer was allocated on waits first for the work that is queued on it. */
void fc_gather_abandon(fc_gather *a);

/* Frees the memory of the unsharded parameters, unless that is to be kept. Whether it can:
 * fc_unsharded_can_free(). */
FC_CHECK fc_status fc_gather_can_free(const fc_gather *a);
void fc_gather_free(fc_gather *a);

/* Copies this rank's rows of the smaller group, and has the host make parameters of them. After a
 * failure some may have been made: drop them. */
FC_CHECK fc_status fc_gather_keep_post_forward(fc_gather *a);
void fc_gather_drop_post_forward(fc_gather *a);

/* What must hold between transitions; FC_ESTATE with a message where it does not. `unsharded`: the
 * group's face now. */
FC_CHECK fc_status fc_gather_check(const fc_gather *a, bool unsharded);

#endif
