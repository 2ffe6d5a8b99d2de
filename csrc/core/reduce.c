/* Gradient reduction. Owns the records of reductions in flight (a list in the comm context) with
 * their buffers. Stream rules: the pack runs on the current stream, everything after it on the
 * reduce stream; the input is kept until the current stream has waited for the collective, the
 * output lives on in the gradients' views. */
#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#include "divide.h"
#include "link.h"
#include "transfer.h"

typedef struct fc_reduction {
    fc_group *group;
    fc_param **params; /* [total], behind the struct: in the order of their rows */
    size_t count;      /* those with a gradient */
    size_t total;      /* and those that have only a partial row to all-reduce */
    fct_tensor *input;
    fct_tensor *output;
    fct_work *work;
    bool all_reducing;    /* `work` is the all-reduce */
    fct_event *scattered; /* end of the input's last use, on the reduce stream (one rank: on the
                             all-reduce stream, where there are replicas) */
    double divide_after;
    bool keep_partial; /* no all-reduce in this backward: the rows stay with the parameters */
    bool finished;     /* the gradients were handed out; only the input is still kept */
    struct fc_reduction *next;
} fc_reduction;

/* ---- the list in the comm context ---- */

static bool has_gradient(const fc_reduce_plan *plan, const fc_param *p) {
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->params[i] == p) {
            return true;
        }
    }
    return false;
}

static bool all_reduces(const fc_group *g) {
    return g->replicate.name != NULL;
}

bool fc_reduce_pending(const fc_group *g, fc_span span) {
    for (size_t i = span.first; all_reduces(g) && g->all_reduce_grads && i < span.end; i++) {
        if (g->params[i]->partial != NULL) {
            return true;
        }
    }
    return false;
}

static fc_reduction *new_reduction(fc_group *g, fc_span span) {
    const fc_reduce_plan *plan = &g->reduce_plan;
    size_t room = span.end - span.first;
    fc_reduction *r = (fc_reduction *)calloc(1, sizeof *r + room * sizeof *r->params);
    if (r == NULL) {
        return NULL;
    }
    r->group = g;
    r->params = (fc_param **)(void *)(r + 1);
    r->count = plan->count;
    r->total = plan->count;
    r->keep_partial = all_reduces(g) && !g->all_reduce_grads;
    if (plan->count > 0) {
        memcpy((void *)r->params, (const void *)plan->params, plan->count * sizeof *r->params);
    }
    if (all_reduces(g) && g->all_reduce_grads) {
        for (size_t i = span.first; i < span.end; i++) {
            if (g->params[i]->partial != NULL && !has_gradient(plan, g->params[i])) {
                r->params[r->total++] = g->params[i];
            }
        }
    }
    return r;
}

static void append(fc_comm *c, fc_reduction *r) {
    if (c->newest != NULL) {
        c->newest->next = r;
    } else {
        c->oldest = r;
    }
    c->newest = r;
    c->reductions++;
}

/* Parks what the backend may still use, releases the rest, ordered behind the streams that used it. */
static void abandon(fc_comm *c, fc_reduction *r) {
    if (c->streams_ready) {
        if (all_reduces(r->group)) {
            fc_comm_settle_streams(c, c->reduce_stream, c->all_reduce_stream);
        }
        fc_comm_settle_streams(c, fct_stream_current(c->device), c->reduce_stream);
    }
    fc_comm_put_event(c, r->scattered);
    fc_comm_park(c, r->work, r->input, r->output);
    free(r);
}

static fc_reduction *pop_oldest(fc_comm *c) {
    fc_reduction *r = c->oldest;
    c->oldest = r->next;
    if (c->oldest == NULL) {
        c->newest = NULL;
    }
    c->reductions--;
    r->next = NULL;
    return r;
}

/* Makes it the oldest again. */
static void put_back(fc_comm *c, fc_reduction *r) {
    r->next = c->oldest;
    c->oldest = r;
    if (c->newest == NULL) {
        c->newest = r;
    }
    c->reductions++;
}

bool fc_reduce_has(const fc_comm *c, const fc_group *g) {
    const fc_reduction *r = c->oldest;
    while (r != NULL && r->group != g) {
        r = r->next;
    }
    return r != NULL;
}

void fc_reduce_discard(fc_comm *c, const fc_group *g) {
    fc_reduction *kept_first = NULL;
    fc_reduction *kept_last = NULL;
    size_t kept = 0;
    while (c->oldest != NULL) {
        fc_reduction *r = pop_oldest(c);
        if (g != NULL && r->group != g) {
            if (kept_last != NULL) {
                kept_last->next = r;
            } else {
                kept_first = r;
            }
            kept_last = r;
            kept++;
            continue;
        }
        abandon(c, r);
    }
    c->oldest = kept_first;
    c->newest = kept_last;
    c->reductions = kept;
}

/* ---- finish ---- */

/* Elements of the whole row: of the parameters with a gradient, then of the others. */
static int64_t row_numel(const fc_reduction *r) {
    int64_t numel = 0;
    for (size_t i = 0; i < r->total; i++) {
        numel += r->params[i]->layout.padded_numel;
    }
    return numel;
}

/* One parameter's padded part of the row. */
static fc_status part_of(const fct_tensor *row, int64_t offset, int64_t numel, fct_tensor **out) {
    const int64_t size[1] = {numel};
    const int64_t stride[1] = {1};
    return fct_tensor_alias(row, 1, size, stride, offset, out) == 0 ? FC_OK : FC_ERAISED;
}

/* Adds what earlier backwards left to the row's parts and takes it away from the parameters; or, in
 * a backward without all-reduce, leaves the parts with them. */
static fc_status merge_partials(fc_reduction *r) {
    fc_status status = FC_OK;
    fct_tensor *part = NULL;
    int64_t offset = 0;
    for (size_t i = 0; i < r->total; i++) {
        fc_param *p = r->params[i];
        FC_TRY(part_of(r->output, offset, p->layout.padded_numel, &part));
        if (r->keep_partial && p->partial != NULL) {
            FC_TRY_RAISED(fct_tensor_add(p->partial, part));
        } else if (r->keep_partial) {
            fc_param_set_partial(p, part);
        } else if (p->partial != NULL) {
            if (i < r->count) {
                FC_TRY_RAISED(fct_tensor_add(part, p->partial));
            } else {
                FC_TRY_RAISED(fct_tensor_copy(part, p->partial));
            }
            fc_param_set_partial(p, NULL);
        }
        fct_tensor_release(part);
        part = NULL;
        offset += p->layout.padded_numel;
    }
done:
    fct_tensor_release(part);
    return status;
}

/* The type of all the parameters; FCT_NO_DTYPE where they have several. */
static fct_dtype common_dtype(const fc_reduction *r) {
    fct_dtype dtype = r->total > 0 ? r->params[0]->orig_dtype : FCT_NO_DTYPE;
    for (size_t i = 1; i < r->total; i++) {
        if (r->params[i]->orig_dtype != dtype) {
            return FCT_NO_DTYPE;
        }
    }
    return dtype;
}

/* Hands each parameter its view of the reduced row; where they have several types, casts of it. */
static fc_status view_out(const fc_reduction *r, const fct_tensor *row, bool several) {
    fc_status status = FC_OK;
    fct_tensor *view = NULL;
    int64_t offset = 0;
    for (size_t i = 0; i < r->total; i++) {
        const fc_param *p = r->params[i];
        FC_TRY_RAISED(fct_tensor_alias(row, p->ndim, p->local_sizes, p->strides, offset, &view));
        if (several) {
            fct_tensor *cast = NULL;
            FC_TRY_RAISED(fct_tensor_cast(view, p->orig_dtype, &cast));
            fct_tensor_release(view);
            view = cast;
        }
        FC_TRY_RAISED(r->group->host->take_grad(p->owner, view));
        fct_tensor_release(view);
        view = NULL;
        offset += p->layout.padded_numel;
    }
done:
    fct_tensor_release(view);
    return status;
}

static fc_link *scatter_link(fc_group *g) {
    return g->scatter.name != NULL ? &g->scatter : &g->shard;
}

static fc_status settle_work(fc_reduction *r) {
    const fc_link *link = r->all_reducing ? &r->group->replicate : scatter_link(r->group);
    return fc_link_wait(link, r->group->name, r->all_reducing ? FC_ALL_REDUCE : FC_REDUCE_SCATTER,
                        &r->work);
}

/* Waits for the collective, scales, casts and hands out. On the CPU the wait is the host's. The row
 * stays in r->output where another stream than its own uses it or a cast of it, or of a part, was
 * queued: gradients that are added to others let their views go at once. */
static fc_status finish(fc_reduction *r) {
    fc_status status = FC_OK;
    fct_tensor *row = NULL;
    fct_dtype wanted = common_dtype(r);
    FC_TRY(settle_work(r));
    if (r->keep_partial) {
        FC_TRY(merge_partials(r));
        r->finished = true;
        return FC_OK;
    }
    if (r->group->has_hook) {
        FC_TRY_RAISED(r->group->host->reduce_hook(r->group->owner, r->output));
    }
    if (r->divide_after != 1.0) {
        FC_TRY_RAISED(fct_tensor_div(r->output, r->divide_after));
    }
    if (wanted != FCT_NO_DTYPE) {
        FC_TRY_RAISED(fct_tensor_cast(r->output, wanted, &row));
    } else {
        row = r->output;
        fct_tensor_retain(row);
    }
    if (!r->group->comm->has_streams ||
        (row == r->output && wanted != FCT_NO_DTYPE && !all_reduces(r->group))) {
        fct_tensor_release(r->output);
        r->output = NULL;
    }
    FC_TRY(view_out(r, row, wanted == FCT_NO_DTYPE));
    r->finished = true;
done:
    fct_tensor_release(row);
    return status;
}

/* Users' hooks run while a reduction is finished, and may give up on all of them (a reset) or come
 * here again (a backward): so it is taken out of the list first. */
fc_status fc_reduce_recycle(fc_comm *c, size_t keep) {
    while (c->reductions > keep) {
        fc_reduction *r = pop_oldest(c);
        fc_status status = r->finished ? FC_OK : finish(r);
        if (status != FC_OK) {
            abandon(c, r); /* it cannot be finished twice: its gradients are lost */
            return status;
        }
        if (r->scattered != NULL) {
            if (fct_event_wait(r->scattered, fct_stream_current(c->device)) != 0) {
                put_back(c, r);
                return FC_ERAISED;
            }
            fc_comm_put_event(c, r->scattered);
        }
        fct_tensor_release(r->input);
        fct_tensor_release(r->output);
        free(r);
    }
    return FC_OK;
}

fc_status fc_reduce_poll(fc_comm *c) {
    fc_status status = FC_OK;
    while (!c->has_streams && c->oldest != NULL &&
           (c->oldest->work == NULL || fct_work_done(c->oldest->work))) {
        FC_TRY(fc_reduce_recycle(c, c->reductions - 1));
    }
done:
    return status;
}

/* ---- start ---- */

/* Whether user code is to see the result before backward goes on. A hook may issue collectives, so it
 * must run at the same place on all ranks, not when a poll happens to find the reduction done. */
static bool wanted_now(const fc_reduction *r) {
    if (r->group->has_hook && !r->keep_partial) {
        return true;
    }
    for (size_t i = 0; i < r->total; i++) {
        if (r->group->host->wants_grad_now(r->params[i]->owner)) {
            return true;
        }
    }
    return false;
}

/* Divides and issues the reduce-scatter on the current stream; r->output is the row. */
static fc_status scatter(fc_group *g, fc_reduction *r, const fc_divide *divide) {
    fc_status status = FC_OK;
    const fc_reduce_plan *plan = &g->reduce_plan;
    fct_tensor *part = NULL;
    int64_t total = row_numel(r);
    if (divide->before != 1.0 && plan->row_numel > 0) {
        FC_TRY_RAISED(fct_tensor_div(r->input, divide->before));
    }
    /* A row that stays with the parameters has to be the reduce stream's memory. */
    bool stays = r->keep_partial && g->comm->has_streams;
    if ((g->shard.world == 1 || plan->row_numel == 0) && total == plan->row_numel && !stays) {
        r->output = r->input; /* one rank: the row is the result */
        fct_tensor_retain(r->output);
        return FC_OK;
    }
    FC_TRY_RAISED(fct_tensor_empty(total, plan->dtype, g->device, &r->output));
    if (plan->row_numel == 0) {
        return FC_OK;
    }
    if (total == plan->row_numel) {
        part = r->output;
        fct_tensor_retain(part);
    } else {
        FC_TRY(part_of(r->output, 0, plan->row_numel, &part));
    }
    if (g->shard.world == 1) {
        FC_TRY_RAISED(fct_tensor_copy(part, r->input));
    } else {
        FC_TRY(fc_link_reduce_scatter(scatter_link(g), g->name, part, r->input, divide->op,
                                      divide->premultiply, !g->comm->has_streams, &r->work));
    }
done:
    fct_tensor_release(part);
    return status;
}

/* Issues the all-reduce, after the reduce-scatter is done or ordered and partial rows are merged. */
static fc_status all_reduce(fc_group *g, fc_reduction *r, const fc_divide *divide) {
    fc_status status = FC_OK;
    if (g->replicate.world > 1) {
        r->all_reducing = true;
        FC_TRY(fc_link_all_reduce(&g->replicate, g->name, r->output, divide->all_reduce_op,
                                  !g->comm->has_streams, &r->work));
    }
done:
    return status;
}

static fc_status replace_event(fc_comm *c, fct_stream stream, fct_event **slot) {
    fct_event *event = NULL;
    fc_status status = fc_comm_record(c, stream, &event);
    if (status == FC_OK) {
        fc_comm_put_event(c, *slot);
        *slot = event;
    }
    return status;
}

/* All of the reduction on the reduce stream and, from the all-reduce on, the all-reduce stream. */
static fc_status reduce_on_streams(fc_group *g, fc_reduction *r, const fc_divide *divide) {
    fc_status status = FC_OK;
    fc_comm *c = g->comm;
    fct_event *cast = NULL;
    fct_stream compute = fct_stream_current(g->device);
    fct_stream stream = c->streams_ready ? c->reduce_stream : compute;
    bool replicas = all_reduces(g) && !r->keep_partial;
    FC_TRY(fc_comm_order_streams(c, stream, compute));
    (void)fct_stream_set_current(stream);
    FC_TRY(scatter(g, r, divide));
    FC_TRY(settle_work(r));
    bool alone = r->output == r->input; /* what follows uses the current stream's memory */
    if (!alone) {
        FC_TRY(fc_comm_record(c, stream, &r->scattered));
    }
    if (replicas) {
        FC_TRY(merge_partials(r)); /* on this stream: partial rows are its memory */
        fct_stream after = c->streams_ready ? c->all_reduce_stream : compute;
        FC_TRY(fc_comm_order_streams(c, after, stream));
        stream = after;
        (void)fct_stream_set_current(stream);
        FC_TRY(all_reduce(g, r, divide));
    }
    FC_TRY(finish(r));
    if (alone) {
        FC_TRY(fc_comm_record(c, stream, &r->scattered));
    }
    FC_TRY(replace_event(c, stream, &g->reduced));
    FC_TRY(replace_event(c, stream, replicas ? &c->last_all_reduced : &c->last_reduced));
    if (r->output != NULL && replicas && c->streams_ready) {
        FC_TRY(fc_comm_record(c, stream, &cast));
        FC_TRY(fc_comm_keep_row(c, r->output, cast));
        r->output = NULL;
    }
done:
    (void)fct_stream_set_current(compute);
    return status;
}

/* Partial rows of the group that an earlier reduction has not left with the parameters yet. */
static fc_status settle_earlier(fc_group *g) {
    for (const fc_reduction *r = g->comm->oldest; r != NULL; r = r->next) {
        if (r->group == g && r->keep_partial && !r->finished) {
            return fc_reduce_recycle(g->comm, 0);
        }
    }
    return FC_OK;
}

static fc_divide divide_of(fc_group *g, fct_dtype dtype) {
    const fc_link *link = scatter_link(g);
    const fc_divide_rule rule = {
        .world = g->shard.world,
        .replicas = all_reduces(g) ? g->replicate.world : 0,
        .dtype = dtype,
        .has_factor = g->has_divide_factor,
        .factor = g->divide_factor,
        .force_sum = g->force_sum,
        .has_premul =
            g->has_divide_factor && link->pg != NULL && fct_pg_has_premul(link->pg, g->device),
    };
    return fc_divide_split(&rule);
}

/* Packs the gradients, which are laid out, into r->input, on the current stream. */
static fc_status pack(fc_group *g, fc_reduction *r) {
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &g->reduce_plan;
    if (plan->count == 0) { /* only partial rows, in their own type */
        fct_facts facts;
        fct_tensor_facts(r->params[0]->partial, &facts);
        plan->dtype = facts.dtype;
    }
    FC_TRY_RAISED(
        fct_tensor_empty(g->shard.world * plan->row_numel, plan->dtype, g->device, &r->input));
    FC_TRY(fc_transfer_pack_gradients(plan, g->shard.world, r->input, &g->comm->error));
done:
    fc_reduce_plan_drop_grads(plan);
    return status;
}

/* Issues the collectives and leaves r to be finished, or finishes it. */
static fc_status run(fc_group *g, fc_reduction *r, bool order_compute) {
    fc_status status = FC_OK;
    if (g->shard.world > 1) {
        FC_TRY(fc_link_open(scatter_link(g)));
    }
    FC_TRY(pack(g, r));
    const fc_divide divide = divide_of(g, g->reduce_plan.dtype);
    r->divide_after = divide.after;
    if (g->comm->has_streams) {
        FC_TRY(reduce_on_streams(g, r, &divide));
        if (order_compute) {
            FC_TRY_RAISED(fct_event_wait(g->reduced, fct_stream_current(g->device)));
        }
    } else {
        FC_TRY(scatter(g, r, &divide));
        if (all_reduces(g) && !r->keep_partial) {
            FC_TRY(settle_work(r));
            FC_TRY(merge_partials(r));
            FC_TRY(all_reduce(g, r, &divide));
        }
    }
done:
    return status;
}

fc_status fc_reduce_start(fc_group *g, fc_span span, bool order_compute) {
    fc_status status = FC_OK;
    fc_comm *c = g->comm;
    fc_reduction *r = NULL;
    FC_TRY(settle_earlier(g));
    /* Later buckets of a backward need not wait for earlier ones. */
    if (g->reduced != NULL && span.end == g->count) {
        FC_TRY_RAISED(fct_event_wait(g->reduced, fct_stream_current(g->device)));
        fc_comm_put_event(c, g->reduced);
        g->reduced = NULL;
    }
    r = new_reduction(g, span);
    if (r == NULL) {
        status = FC_ENOMEM;
        goto done;
    }
    FC_TRY(run(g, r, order_compute));
    append(c, r);
    return !c->has_streams && wanted_now(r) ? fc_reduce_recycle(c, 0) : fc_reduce_poll(c);
done:
    fc_reduce_plan_drop_grads(&g->reduce_plan);
    if (r != NULL) {
        abandon(c, r);
    }
    return status;
}
