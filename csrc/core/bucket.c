/* Buckets of a group; see bucket.h. Owns the array of buckets. Watches belong to the parameters and
 * end with the tensor that they watch, or with the group. */
#include "bucket.h"

#include <stdlib.h>
#include <string.h>

/* With one reduction waiting for its collective the next can be packed meanwhile. */
enum { IN_FLIGHT = 2 };

static bool is_bucketed(const fc_group *g) {
    return g->buckets.valid && g->buckets.count > 1;
}

/* ---- cutting ---- */

/* Bytes of the parameter's gradient as it is sent; a frozen one has none. */
static int64_t sent_bytes(const fc_group *g, const fc_param *p) {
    fct_dtype dtype = p->reduce_dtype != FCT_NO_DTYPE ? p->reduce_dtype : fc_param_compute_dtype(p);
    return g->host->requires_grad(p->owner) ? p->layout.numel * fc_dtype_size(dtype) : 0;
}

fc_status fc_bucket_cut(fc_group *g) {
    fc_buckets *b = &g->buckets;
    size_t end = g->count;
    int64_t bytes = 0;
    if (b->valid || b->limit <= 0) {
        return FC_OK;
    }
    fc_bucket *items = (fc_bucket *)calloc(g->count + 1, sizeof *items);
    if (items == NULL) {
        return FC_ENOMEM;
    }
    free(b->items);
    b->items = items;
    b->count = 0;
    for (size_t i = g->count; i-- > 0;) {
        int64_t sent = sent_bytes(g, g->params[i]);
        if (sent == 0 && end == i + 1 && b->count > 0) { /* no bucket of its own for nothing */
            g->params[i]->bucket = b->count - 1;
            items[b->count - 1].span.first = end = i;
            continue;
        }
        g->params[i]->bucket = b->count;
        bytes += sent;
        if (bytes >= b->limit || i == 0) {
            items[b->count++].span = (fc_span){i, end};
            end = i;
            bytes = 0;
        }
    }
    b->valid = true;
    b->eager = false;
    return FC_OK;
}

fc_status fc_bucket_watch(fc_group *g) {
    fc_status status = FC_OK;
    FC_TRY(fc_bucket_cut(g));
    for (size_t i = 0; is_bucketed(g) && i < g->count; i++) {
        fc_param *p = g->params[i];
        const fct_hook hook = {.owner = p->owner, .call = g->host->grad_arrived};
        p->group = g;
        if (p->watch == NULL && p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded)) {
            FC_TRY_RAISED(fct_autograd_watch(p->unsharded, &hook, &p->watch));
        }
    }
done:
    return status;
}

/* ---- backward ---- */

static bool host_moves(const fc_group *g, fc_move move) {
    return g->host->moves != NULL && g->host->moves(g->owner, move);
}

static bool may_be_eager(const fc_group *g) {
    return is_bucketed(g) && g->buckets.alone && !g->doubled && !g->buckets.late &&
           g->reduce_grads && !g->reduce_unused && !g->has_hook && !host_moves(g, FC_MOVE_EARLY);
}

void fc_bucket_begin(fc_group *g) {
    fc_buckets *b = &g->buckets;
    b->next = 0;
    b->eager = may_be_eager(g);
    if (!b->eager) {
        return;
    }
    for (size_t i = 0; i < b->count; i++) {
        b->items[i].awaited = 0;
    }
    for (size_t i = 0; i < g->count; i++) {
        fc_param *p = g->params[i];
        p->awaited = p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded);
        b->items[p->bucket].awaited += p->awaited ? 1 : 0;
    }
}

bool fc_bucket_arrived(fc_param *p) {
    fc_group *g = p->group;
    if (g == NULL || !g->buckets.eager || g->training_state != FC_PRE_BACKWARD) {
        return false;
    }
    fc_buckets *b = &g->buckets;
    if (!p->awaited) {
        b->late = b->late || p->bucket < b->next;
        b->eager = !b->late;
        return false;
    }
    p->awaited = false;
    b->items[p->bucket].awaited--;
    return b->items[b->next].awaited == 0;
}

fc_status fc_bucket_reduce(fc_group *g) {
    fc_status status = FC_OK;
    fc_buckets *b = &g->buckets;
    while (b->eager && b->next < b->count && b->items[b->next].awaited == 0) {
        FC_TRY(fc_group_reduce(g, b->items[b->next++].span, false, false));
    }
done:
    return status;
}

/* Whoever reduces in our place, or sees the rows, sees them as if there were no buckets. */
static bool rest_is_whole(const fc_group *g) {
    return !is_bucketed(g) || g->has_hook || host_moves(g, FC_MOVE_REDUCE);
}

fc_status fc_bucket_reduce_rest(fc_group *g, bool partial) {
    fc_status status = FC_OK;
    g->buckets.eager = false;
    if (rest_is_whole(g)) {
        return fc_group_reduce(g, (fc_span){0, g->count}, true, partial);
    }
    for (size_t i = 0; i < g->buckets.count; i++) {
        FC_TRY(fc_group_reduce(g, g->buckets.items[i].span, i + 1 == g->buckets.count, partial));
    }
done:
    return status;
}

size_t fc_bucket_in_flight(const fc_group *g) {
    size_t wanted = g->comm->max_reductions;
    return is_bucketed(g) && wanted < IN_FLIGHT ? IN_FLIGHT : wanted;
}

void fc_bucket_reset(fc_group *g) {
    g->buckets.eager = false;
    g->buckets.next = 0;
}

void fc_bucket_fini(fc_group *g) {
    for (size_t i = 0; i < g->count; i++) {
        if (g->params[i]->group == g) {
            fct_watch_free(g->params[i]->watch);
            g->params[i]->watch = NULL;
            g->params[i]->group = NULL;
        }
    }
    free(g->buckets.items);
    memset(&g->buckets, 0, sizeof g->buckets);
}
