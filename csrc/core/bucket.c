/* Buckets of a group; see bucket.h. Owns the array of buckets. Watches belong to the parameters and
 * end with the tensor that they watch, or with the group. */
#include "bucket.h"

#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* With one reduction waiting for its collective the next can be packed meanwhile. */
enum { IN_FLIGHT = 2 };

void fc_bucket_init(fc_buckets *b, fc_members *members) {
    memset(b, 0, sizeof *b);
    b->members = members;
    b->limit = FC_BUCKET_LIMIT;
}

void fc_bucket_fini(fc_buckets *b) {
    for (size_t i = 0; i < b->members->count; i++) {
        fc_param *p = b->members->params[i];
        if (p->buckets == b) {
            fct_watch_free(p->watch);
            p->watch = NULL;
            p->buckets = NULL;
        }
    }
    free(b->items);
    memset(b, 0, sizeof *b);
}

void fc_bucket_set_limit(fc_buckets *b, int64_t limit) {
    b->limit = limit;
    fc_bucket_invalidate(b);
}

void fc_bucket_invalidate(fc_buckets *b) {
    b->mode = FC_BUCKETS_STALE;
}

bool fc_bucket_several(const fc_buckets *b) {
    return b->mode != FC_BUCKETS_STALE && b->count > 1;
}

/* ---- cutting ---- */

/* Bytes of the parameter's gradient as it is sent; a frozen one has none. */
static int64_t sent_bytes(const fc_members *m, const fc_param *p) {
    fct_dtype dtype = p->reduce_dtype != FCT_NO_DTYPE ? p->reduce_dtype : fc_param_compute_dtype(p);
    return m->host->requires_grad(p->owner) ? p->layout.numel * fc_dtype_size(dtype) : 0;
}

/* Deals the parameters to the buckets, last ones first. `items` has room for one each. */
static size_t deal(const fc_members *m, int64_t limit, fc_bucket *items) {
    size_t count = 0;
    size_t end = m->count;
    int64_t bytes = 0;
    for (size_t i = m->count; i-- > 0;) {
        int64_t sent = sent_bytes(m, m->params[i]);
        if (sent == 0 && end == i + 1 && count > 0) { /* no bucket of its own for nothing */
            m->params[i]->bucket = count - 1;
            items[count - 1].span.first = end = i;
            continue;
        }
        m->params[i]->bucket = count;
        bytes += sent;
        if (bytes >= limit || i == 0) {
            items[count++].span = (fc_span){i, end};
            end = i;
            bytes = 0;
        }
    }
    return count;
}

fc_status fc_bucket_cut(fc_buckets *b) {
    if (b->mode != FC_BUCKETS_STALE || b->limit <= 0) {
        return FC_OK;
    }
    fc_bucket *items = (fc_bucket *)calloc(b->members->count + 1, sizeof *items);
    if (items == NULL) {
        return FC_ENOMEM;
    }
    free(b->items);
    b->items = items;
    b->count = deal(b->members, b->limit, items);
    b->mode = FC_BUCKETS_READY;
    return fc_link_announce(&b->members->replicate, b->count > 0 ? b->count - 1 : 0);
}

/* Early reductions of a sharded group would keep its gathered parameters for longer. */
static bool goes_early(const fc_buckets *b) {
    return fc_bucket_several(b) && b->members->shard.world == 1;
}

fc_status fc_bucket_watch(fc_buckets *b) {
    fc_status status = FC_OK;
    const fc_members *m = b->members;
    FC_TRY(fc_bucket_cut(b));
    for (size_t i = 0; goes_early(b) && i < m->count; i++) {
        fc_param *p = m->params[i];
        const fct_hook hook = {.owner = p->owner, .call = m->host->grad_arrived};
        p->buckets = b;
        if (p->watch == NULL && p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded)) {
            FC_TRY_RAISED(fct_autograd_watch(p->unsharded, &hook, &p->watch));
        }
    }
done:
    return status;
}

/* ---- backward ---- */

void fc_bucket_begin(fc_buckets *b, bool eager) {
    const fc_members *m = b->members;
    fc_bucket_end(b);
    b->next = 0;
    if (!eager || b->mode != FC_BUCKETS_READY || !goes_early(b)) {
        return;
    }
    b->mode = FC_BUCKETS_EAGER;
    for (size_t i = 0; i < b->count; i++) {
        b->items[i].awaited = 0;
    }
    for (size_t i = 0; i < m->count; i++) {
        fc_param *p = m->params[i];
        p->awaited = p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded);
        b->items[p->bucket].awaited += p->awaited ? 1 : 0;
    }
}

bool fc_bucket_arrived(fc_param *p) {
    fc_buckets *b = p->buckets;
    if (b == NULL || b->mode != FC_BUCKETS_EAGER) {
        return false;
    }
    if (!p->awaited) {
        b->mode = p->bucket < b->next ? FC_BUCKETS_LATE : b->mode;
        return false;
    }
    p->awaited = false;
    b->items[p->bucket].awaited--;
    return b->items[b->next].awaited == 0;
}

bool fc_bucket_next(fc_buckets *b, fc_span *span) {
    if (b->mode != FC_BUCKETS_EAGER || b->next == b->count || b->items[b->next].awaited > 0) {
        return false;
    }
    *span = b->items[b->next++].span;
    return true;
}

void fc_bucket_end(fc_buckets *b) {
    if (b->mode == FC_BUCKETS_EAGER) {
        b->mode = FC_BUCKETS_READY;
    }
}

size_t fc_bucket_in_flight(const fc_buckets *b) {
    size_t wanted = b->members->comm->max_reductions;
    return fc_bucket_several(b) && wanted < IN_FLIGHT ? IN_FLIGHT : wanted;
}

/* ---- what must hold ---- */

fc_status fc_bucket_check(const fc_buckets *b) {
    fc_error *error = &b->members->comm->error;
    size_t end = b->members->count;
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
        return fc_error_set(error, FC_ESTATE, "bucket %zu of %zu is next", b->next, b->count);
    }
    return FC_OK;
}
