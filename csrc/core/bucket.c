/* Buckets of a group; see bucket.h. Owns the array of buckets. A gradient notification
 * (fct_grad_subscription) belongs to its parameter. The notification is freed when the parameter
 * releases the tensor that it observes, and in fc_bucket_fini. fc_bucket_subscribe frees it if it
 * is not needed, or is of another stream.
 *
 * This file uses no stream. In an eager backward its functions run in autograd's thread. */
#include "bucket.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Reductions in flight if a group has several buckets: one waits for its collective while the next
 * one is packed. */
enum { IN_FLIGHT = 2 };

void fc_bucket_init(fc_buckets *b, fc_group_base *base) {
    assert(base != NULL);
    memset(b, 0, sizeof *b);
    b->base = base;
}

/* Removes the notifications of the group's parameters. */
static void unsubscribe(fc_buckets *b) {
    for (size_t i = 0; b->subscribed && i < b->base->count; i++) {
        fc_param *p = b->base->params[i];
        if (p->buckets == b) {
            fct_grad_subscription_free(p->subscription);
            p->subscription = NULL;
        }
    }
    b->subscribed = false;
}

void fc_bucket_fini(fc_buckets *b) {
    assert(b->count == 0 || b->items != NULL);
    unsubscribe(b);
    for (size_t i = 0; i < b->base->count; i++) {
        if (b->base->params[i]->buckets == b) {
            b->base->params[i]->buckets = NULL;
        }
    }
    free(b->items);
    memset(b, 0, sizeof *b);
}

void fc_bucket_set_limit(fc_buckets *b, int64_t limit, bool sole_only) {
    assert(limit >= 0);
    b->limit = limit;
    b->sole_only = sole_only;
    fc_bucket_invalidate(b);
}

void fc_bucket_set_siblings(fc_buckets *b, bool has_siblings) {
    assert(b->base != NULL);
    if (b->has_siblings != has_siblings) {
        b->has_siblings = has_siblings;
        fc_bucket_invalidate(b);
    }
}

int64_t fc_bucket_limit(const fc_buckets *b) {
    return b->sole_only && b->has_siblings ? 0 : b->limit;
}

void fc_bucket_invalidate(fc_buckets *b) {
    assert(b->count == 0 || b->items != NULL);
    b->mode = FC_BUCKETS_STALE;
}

void fc_bucket_set_reduce_dtype(fc_buckets *b, fct_dtype dtype) {
    assert(b->base != NULL);
    if (b->base->reduce_dtype != dtype) {
        b->base->reduce_dtype = dtype;
        fc_bucket_invalidate(b);
    }
}

bool fc_bucket_has_several(const fc_buckets *b) {
    return b->mode != FC_BUCKETS_STALE && b->count > 1;
}

/* ---- cut ---- */

/* Returns the bytes of the parameter's gradient in the reduce dtype; 0 for a frozen parameter. */
static int64_t gradient_bytes(const fc_group_base *base, const fc_param *p) {
    fct_dtype dtype =
        base->reduce_dtype != FCT_NO_DTYPE ? base->reduce_dtype : fc_param_compute_dtype(p);
    return base->callbacks->requires_grad(p->owner) ? p->layout.numel * fc_dtype_size(dtype) : 0;
}

/* Assigns the parameters to buckets, from the last parameter to the first, and returns the number
 * of buckets. `items` has space for one bucket per parameter. */
static size_t assign_buckets(const fc_group_base *base, int64_t limit, fc_bucket *items) {
    size_t count = 0;
    size_t end = base->count;
    int64_t bytes = 0;
    for (size_t i = base->count; i-- > 0;) {
        int64_t grad_bytes = gradient_bytes(base, base->params[i]);
        /* frozen parameters join the previous bucket */
        if (grad_bytes == 0 && end == i + 1 && count > 0) {
            base->params[i]->bucket = count - 1;
            items[count - 1].span.first = end = i;
            continue;
        }
        base->params[i]->bucket = count;
        bytes += grad_bytes;
        if (bytes >= limit || i == 0) {
            items[count++].span = (fc_span){i, end};
            end = i;
            bytes = 0;
        }
    }
    return count;
}

fc_status fc_bucket_cut(fc_buckets *b) {
    assert(b->mode == FC_BUCKETS_STALE || b->items != NULL);
    if (b->mode != FC_BUCKETS_STALE) {
        return FC_OK;
    }
    if (fc_bucket_limit(b) <= 0) {
        b->count = 0;
        return FC_OK;
    }
    fc_bucket *items = (fc_bucket *)calloc(b->base->count + 1, sizeof *items);
    if (items == NULL) {
        return FC_ENOMEM;
    }
    free(b->items);
    b->items = items;
    b->count = assign_buckets(b->base, fc_bucket_limit(b), items);
    for (size_t i = 0; i < b->base->count; i++) {
        b->base->params[i]->buckets = b;
    }
    b->mode = FC_BUCKETS_READY;
    return FC_OK;
}

/* Registers the all-reduces of all buckets but one, which the group has registered. Each of them is
 * registered once, also if the buckets are cut again. */
static fc_status register_users(fc_buckets *b) {
    fc_status status = FC_OK;
    const fc_process_group *pg = &b->base->replicate;
    const size_t users = b->count > 0 ? b->count - 1 : 0;
    if (b->registered_with != pg->name) {
        b->registered_with = pg->name;
        b->registered = 0;
    }
    if (users > b->registered) {
        FC_TRY(fc_process_group_register_users(pg, users - b->registered));
        b->registered = users;
    }
done:
    return status;
}

/* Returns true if a backward can be eager. Early reductions in a sharded group would keep the
 * gathered parameters longer. */
static bool can_reduce_early(const fc_buckets *b) {
    return fc_bucket_has_several(b) && b->base->shard.world == 1;
}

/* Frees the notification of a parameter if the current stream is not that of its creation. A
 * notification keeps autograd's accumulation node alive, and autograd accumulates on the stream on
 * which the node was created. A new node accumulates on the current stream. */
static void drop_stale_subscription(fc_param *p, int64_t stream) {
    if (p->subscription != NULL && p->subscription_stream != stream) {
        fct_grad_subscription_free(p->subscription);
        p->subscription = NULL;
    }
}

fc_status fc_bucket_subscribe(fc_buckets *b) {
    assert(b->base->callbacks->grad_arrived != NULL);
    fc_status status = FC_OK;
    const fc_group_base *base = b->base;
    const int64_t stream = base->comm->has_streams ? fct_stream_current(base->device).id : 0;
    FC_TRY(fc_bucket_cut(b));
    FC_TRY(register_users(b));
    if (!can_reduce_early(b)) {
        unsubscribe(b);
        goto done;
    }
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        drop_stale_subscription(p, stream);
        const fct_hook hook = {.owner = p->owner, .call = base->callbacks->grad_arrived};
        if (p->subscription == NULL && p->unsharded != NULL &&
            fct_tensor_requires_grad(p->unsharded)) {
            FC_TRY_RAISED(fct_autograd_subscribe(p->unsharded, &hook, &p->subscription));
            p->subscription_stream = stream;
            b->subscribed = true;
        }
    }
done:
    return status;
}

/* ---- backward ---- */

void fc_bucket_begin(fc_buckets *b, bool eager) {
    assert(b->count == 0 || b->items != NULL);
    const fc_group_base *base = b->base;
    fc_bucket_end(b);
    b->next = 0;
    if (!eager || b->mode != FC_BUCKETS_READY || !can_reduce_early(b)) {
        return;
    }
    b->mode = FC_BUCKETS_EAGER;
    for (size_t i = 0; i < b->count; i++) {
        b->items[i].awaited = 0;
    }
    for (size_t i = 0; i < base->count; i++) {
        fc_param *p = base->params[i];
        p->awaited = p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded);
        b->items[p->bucket].awaited += p->awaited ? 1 : 0;
    }
}

bool fc_bucket_arrived(fc_param *p) {
    fc_buckets *b = p->buckets;
    if (b == NULL || b->mode != FC_BUCKETS_EAGER) {
        return false;
    }
    assert(p->bucket < b->count && b->next <= b->count);
    if (!p->awaited) {
        b->mode = p->bucket < b->next ? FC_BUCKETS_LATE : b->mode;
        return false;
    }
    p->awaited = false;
    b->items[p->bucket].awaited--;
    return b->items[b->next].awaited == 0;
}

bool fc_bucket_next(fc_buckets *b, fc_span *span) {
    assert(b->mode != FC_BUCKETS_EAGER || b->next <= b->count);
    if (b->mode != FC_BUCKETS_EAGER || b->next == b->count || b->items[b->next].awaited > 0) {
        return false;
    }
    *span = b->items[b->next++].span;
    return true;
}

void fc_bucket_end(fc_buckets *b) {
    assert(b->mode != FC_BUCKETS_EAGER || b->next <= b->count);
    if (b->mode == FC_BUCKETS_EAGER) {
        b->mode = FC_BUCKETS_READY;
    }
}

size_t fc_bucket_in_flight(const fc_buckets *b) {
    size_t max_in_flight = b->base->comm->max_reductions;
    return fc_bucket_has_several(b) && max_in_flight < IN_FLIGHT ? IN_FLIGHT : max_in_flight;
}

/* ---- invariants ---- */

fc_status fc_bucket_check(const fc_buckets *b) {
    fc_error *error = &b->base->comm->error;
    size_t end = b->base->count;
    if (b->mode == FC_BUCKETS_STALE) {
        return FC_OK;
    }
    for (size_t i = 0; i < b->count; i++) {
        fc_span span = b->items[i].span;
        if (span.end != end || span.first >= span.end) {
            return fc_error_set(error, FC_ESTATE,
                                "bucket %zu is [%zu, %zu); expected to end at %zu", i, span.first,
                                span.end, end);
        }
        end = span.first;
    }
    if (b->count > 0 && end != 0) {
        return fc_error_set(error, FC_ESTATE, "%zu parameters are in no bucket", end);
    }
    if (b->mode == FC_BUCKETS_EAGER && b->next > b->count) {
        return fc_error_set(error, FC_ESTATE, "the next bucket is %zu of %zu", b->next, b->count);
    }
    return FC_OK;
}
