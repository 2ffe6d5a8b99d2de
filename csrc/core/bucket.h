/* Buckets: the parameters of a group, cut into spans of about `limit` bytes of gradients, last
 * parameters first, because backward reaches those first. Which span is reduced next is decided
 * here; the group reduces it. A replicated group has small ones, so that they travel while backward
 * goes on; a sharded one has large ones, which follow one another at the end of its backward, so
 * that the largest row does not decide the peak.
 *
 *            cut                      begin, where it may be
 *   STALE ----------> READY <------------------------------> EAGER
 *     ^ invalidate      |  end                                 | a gradient comes again
 *     +-----------------+------------------- LATE <------------+
 *
 * In an eager backward a bucket is reduced when the last of its gradients has come and all buckets
 * before it are reduced, so that the order of collectives is that of the parameters on every rank,
 * whatever autograd's is. What is left goes at the end of the module's backward, as do all buckets
 * of a backward that is not eager: the group is sharded, the user has reduced something himself,
 * unused parameters are reduced as well, or other groups are reduced in between, whose place the
 * ranks could see differently. With one bucket nothing is watched and all is as for any group.
 *
 * A gradient may come again after its bucket was reduced (a parameter used by several segments that
 * are recomputed, each in a backward of its own): it is reduced by itself at the end, and later
 * backwards are not eager. */
#ifndef FSDP_C_CORE_BUCKET_H
#define FSDP_C_CORE_BUCKET_H

#include "members.h"

/* Where nobody has said otherwise: above the units that people make, below their embeddings. */
#define FC_BUCKET_LIMIT ((int64_t)1 << 30)

typedef enum fc_bucket_mode {
    FC_BUCKETS_STALE, /* to be cut from the parameters as they are now */
    FC_BUCKETS_READY,
    FC_BUCKETS_EAGER, /* in this backward buckets are reduced as soon as they are complete */
    FC_BUCKETS_LATE   /* cut, and never eager */
} fc_bucket_mode;

typedef struct fc_bucket {
    fc_span span;
    size_t awaited; /* parameters whose gradients have not come yet */
} fc_bucket;

typedef struct fc_buckets {
    fc_members *members; /* borrowed */
    int64_t limit;       /* bytes of gradients at which a bucket is full; 0: there is only one */
    fc_bucket_mode mode;
    size_t next;      /* the first bucket that this backward has not reduced */
    size_t count;     /* 0 where there is no limit */
    fc_bucket *items; /* [count] in the order of their reductions; owned */
} fc_buckets;

void fc_bucket_init(fc_buckets *b, fc_members *members);
/* To be called when the group goes away: after it nobody is told of gradients. */
void fc_bucket_fini(fc_buckets *b);
/* After either the buckets are cut anew: for another limit, or for other parameters. */
void fc_bucket_set_limit(fc_buckets *b, int64_t limit);
void fc_bucket_invalidate(fc_buckets *b);

/* Cuts the buckets where they are stale. FC_ENOMEM. */
FC_CHECK fc_status fc_bucket_cut(fc_buckets *b);
/* Whether there are several, cut from the parameters as they are. */
bool fc_bucket_several(const fc_buckets *b);
/* In forward, once the group is unsharded: cuts, and where a replicated group has several buckets
 * has autograd tell of each parameter's gradient. */
FC_CHECK fc_status fc_bucket_watch(fc_buckets *b);
/* A backward reaches the group. `eager` says that nothing outside of the buckets forbids an eager
 * one. */
void fc_bucket_begin(fc_buckets *b, bool eager);
/* The parameter's gradient has come; true where fc_bucket_next has something. */
bool fc_bucket_arrived(fc_param *p);
/* The next bucket that is complete in an eager backward; false where there is none. */
bool fc_bucket_next(fc_buckets *b, fc_span *span);
/* The group's backward ends, and with it being eager. */
void fc_bucket_end(fc_buckets *b);
/* How many reductions may be in flight with the next one. */
size_t fc_bucket_in_flight(const fc_buckets *b);

/* What must hold between transitions: FC_ESTATE with a message where it does not. */
FC_CHECK fc_status fc_bucket_check(const fc_buckets *b);

#endif
