/* Buckets: spans of a group's parameters with about `limit` bytes of gradients each. Cutting
 * divides the parameters into buckets. Bucket 0 has the last parameters, because backward reaches
 * these first. This module selects the next bucket, and the group reduces its gradients. If the
 * only group of a root is replicated, it has small buckets, so that reductions overlap backward.
 * Any other group has one bucket, as in torch, unless the user sets a limit. Its buckets are then
 * reduced one after the other at the end of its backward, which limits the peak of a reduction.
 *
 *            cut                      begin(eager)
 *   STALE ----------> READY <------------------------------> EAGER
 *     ^ invalidate      |  end                                 | gradient of a reduced bucket
 *     +-----------------+------------------- LATE <------------+
 *
 * In an eager backward a bucket is reduced when all of its gradients have arrived and all earlier
 * buckets are reduced. The order of collectives is therefore the same on every rank, independent of
 * autograd's order. The remaining buckets are reduced at the end of the module's backward.
 *
 * A backward is not eager if
 *   - the group is sharded or has only one bucket,
 *   - a hook or patched function of the user performs the reduction,
 *   - unused parameters are reduced as well, or
 *   - other groups are reduced in the same backward, so that ranks could order collectives
 *     differently.
 *
 * A gradient can arrive again after its bucket was reduced, if several recomputed segments share
 * the parameter and each runs its own backward. That gradient is reduced by itself at the end, and
 * later backwards are not eager.
 *
 * Precondition of all functions: fc_bucket_init was called. `items` is NULL only if the buckets are
 * stale or there is no limit. */
#ifndef FSDP_C_CORE_BUCKET_H
#define FSDP_C_CORE_BUCKET_H

#include "group_base.h"

typedef enum fc_bucket_mode {
    FC_BUCKETS_STALE, /* must be cut again from the current parameters */
    FC_BUCKETS_READY, /* cut; no eager backward is running */
    FC_BUCKETS_EAGER, /* complete buckets are reduced during this backward */
    /* cut; a gradient arrived after its bucket was reduced, so no backward is eager */
    FC_BUCKETS_LATE
} fc_bucket_mode;

typedef struct fc_bucket {
    fc_span span;
    size_t awaited; /* parameters without a gradient so far */
} fc_bucket;

typedef struct fc_buckets {
    fc_group_base *base; /* borrowed */
    int64_t limit;       /* bytes of gradients at which a bucket is full; 0: one bucket */
    bool sole_only;      /* the limit applies only if no other group has the same root */
    bool has_siblings;   /* another group has the same root */
    fc_bucket_mode mode;
    size_t next;      /* first bucket that this backward has not reduced */
    size_t count;     /* 0 if there is no limit */
    bool subscribed;  /* parameters have notifications */
    fc_bucket *items; /* [count] in the order of their reductions; owned */
    /* The process group of the all-reduces, and the users that were registered with it. */
    const char *registered_with; /* borrowed, only compared */
    size_t registered;
} fc_buckets;

/* Initializes buckets without a limit. Borrows `base`, which must outlive them. */
void fc_bucket_init(fc_buckets *b, fc_group_base *base);
/* Removes all gradient notifications and frees the buckets. Call it before the group is freed. */
void fc_bucket_fini(fc_buckets *b);
/* Mark the buckets as stale. set_limit changes the limit; `sole_only` is as in the struct.
 * set_siblings sets whether another group has the same root. Call invalidate after a change of the
 * group's parameters. */
void fc_bucket_set_limit(fc_buckets *b, int64_t limit, bool sole_only);
void fc_bucket_set_siblings(fc_buckets *b, bool has_siblings);
void fc_bucket_invalidate(fc_buckets *b);
/* Sets the dtype of the group's reductions. Marks the buckets as stale, because their sizes depend
 * on it. */
void fc_bucket_set_reduce_dtype(fc_buckets *b, fct_dtype dtype);

/* Returns the limit that applies; 0: one bucket. */
int64_t fc_bucket_limit(const fc_buckets *b);
/* Cuts the buckets if they are stale. Returns FC_ENOMEM on failure. */
FC_CHECK fc_status fc_bucket_cut(fc_buckets *b);
/* Returns true if there are several buckets and they are not stale. */
bool fc_bucket_has_several(const fc_buckets *b);
/* Cuts the buckets. In a replicated group with several buckets, also registers one autograd
 * notification per parameter. Call it in forward, after the group was unsharded. */
FC_CHECK fc_status fc_bucket_subscribe(fc_buckets *b);
/* Starts the group's backward. `eager` is true if no condition outside of this module prevents an
 * eager backward. */
void fc_bucket_begin(fc_buckets *b, bool eager);
/* Records that the gradient of `p` has arrived. Returns true if fc_bucket_next has a bucket. Runs
 * in the thread of autograd that accumulated the gradient. */
bool fc_bucket_arrived(fc_param *p);
/* Takes the next complete bucket of an eager backward. Returns false if there is none. */
bool fc_bucket_next(fc_buckets *b, fc_span *span);
/* Ends the group's backward and its eager mode. */
void fc_bucket_end(fc_buckets *b);
/* Returns the number of reductions that may be in flight at one time, with the one that starts. */
size_t fc_bucket_in_flight(const fc_buckets *b);

/* Checks the invariants that hold between transitions. Returns FC_ESTATE with a message if one is
 * violated. */
FC_CHECK fc_status fc_bucket_check(const fc_buckets *b);

#endif
