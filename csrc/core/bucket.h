/* Buckets: the parameters of a group that only all-reduces (replicate), cut into spans of about
 * `limit` bytes of gradients, last parameters first, because backward reaches those first.
 *
 * In an eager backward a bucket is reduced when the last of its gradients has come and all buckets
 * before it are reduced, so that the order of collectives is that of the parameters on every rank,
 * whatever autograd's is. What is left goes at the end of the module's backward, as do all buckets
 * of a backward that is not eager: the user has reduced something himself, unused parameters are
 * reduced as well, or other groups are reduced in between, whose place the ranks could see
 * differently. With one bucket nothing is watched and all is as for any group.
 *
 * A gradient may come again after its bucket was reduced (a parameter used by several segments that
 * are recomputed, each in a backward of its own): it is reduced by itself at the end, and later
 * backwards are not eager. */
#ifndef FSDP_C_CORE_BUCKET_H
#define FSDP_C_CORE_BUCKET_H

#include "group.h"

typedef struct fc_bucket {
    fc_span span;
    size_t awaited; /* parameters whose gradients have not come yet */
} fc_bucket;

/* Cuts the buckets anew where they are not valid. */
FC_CHECK fc_status fc_bucket_cut(fc_group *g);
/* In forward, once the group is unsharded: cuts, and where there are several buckets has autograd
 * tell of each parameter's gradient. */
FC_CHECK fc_status fc_bucket_watch(fc_group *g);
/* A backward reaches the group. */
void fc_bucket_begin(fc_group *g);
/* The parameter's gradient has come; true where fc_bucket_reduce has something to do. */
bool fc_bucket_arrived(fc_param *p);
/* Reduces the buckets that are complete and next. */
FC_CHECK fc_status fc_bucket_reduce(fc_group *g);
/* The end of the group's backward: reduces all gradients that are there, and reshards. */
FC_CHECK fc_status fc_bucket_reduce_rest(fc_group *g, bool partial);
/* How many reductions may be in flight with the next one. */
size_t fc_bucket_in_flight(const fc_group *g);
void fc_bucket_reset(fc_group *g);
/* The group goes away: nobody is told of gradients any more. */
void fc_bucket_fini(fc_group *g);

#endif
