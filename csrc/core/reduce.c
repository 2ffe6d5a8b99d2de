/* Gradient reduction. Owns the records of reductions in flight (a list in the comm context) with
 * their buffers. Stream rules: the pack runs on the current stream, everything after it on the
 * reduce stream; the input is kept until the current stream has waited for the collective, the
 * output lives on in the gradients' views. */
#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#include "transfer.h"

typedef struct fc_reduction {
    fc_group *group;
    fc_param **params; /* [count], behind the struct */
    size_t count;
    fct_tensor *input;
    fct_tensor *output;
    fct_work *work;
    fct_event *scattered; /* end of the collective, on the reduce stream */
    double divide_after;
    bool finished; /* the gradients were handed out; only the input is still kept */
    struct fc_reduction *next;
} fc_reduction;

/* ---- arithmetic ---- */

static bool may_overflow(fct_dtype dtype) {
    return dtype != FCK_FLOAT32 && dtype != FCK_BFLOAT16;
}

/* Splits a division so that neither side over- or underflows: about the square root before the sum.
 */
static double divisor_before(double factor) {
    double before = 1.0;
    while (factor / before == (double)(int64_t)(factor / before) && factor / before > before) {
        before *= 2.0;
    }
    return before;
}

fc_divide fc_reduce_divide(int64_t world, fct_dtype dtype, bool has_factor, double factor,
                           bool force_sum, bool has_premul) {
    fc_divide divide = {.before = 1.0, .after = 1.0, .op = FCT_SUM, .premultiply = 1.0};
    if (world == 1) {
        divide.after = has_factor ? factor : 1.0;
        return divide;
    }
    if (!may_overflow(dtype) && !force_sum) {
        if (!has_factor || factor == (double)world) {
            divide.op = FCT_AVG;
        } else if (has_premul) {
            divide.op = FCT_PREMUL_SUM;
            divide.premultiply = 1.0 / factor;
        } else {
            divide.before = factor;
        }
        return divide;
    }
    double total = has_factor ? factor : (double)world;
    if (may_overflow(dtype)) {
        divide.before = divisor_before(total);
    }
    divide.after = total / divide.before;
    return divide;
}

/* ---- the list in the comm context ---- */

static fc_reduction *new_reduction(fc_group *g) {
    size_t count = g->reduce_plan.count;
    fc_reduction *r = (fc_reduction *)calloc(1, sizeof *r + count * sizeof *r->params);
    if (r == NULL) {
        return NULL;
    }
    r->group = g;
    r->params = (fc_param **)(void *)(r + 1);
    r->count = count;
    memcpy((void *)r->params, (const void *)g->reduce_plan.params, count * sizeof *r->params);
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

/* Parks what the backend may still use, releases the rest, ordered behind the reduce stream. */
static void abandon(fc_comm *c, fc_reduction *r) {
    if (c->streams_ready) {
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

/* Hands each parameter its view of the reduced row. */
static fc_status view_out(const fc_reduction *r, const fct_tensor *row) {
    fc_status status = FC_OK;
    fct_tensor *view = NULL;
    int64_t offset = 0;
    for (size_t i = 0; i < r->count; i++) {
        const fc_param *p = r->params[i];
        FC_TRY_RAISED(fct_tensor_alias(row, p->ndim, p->local_sizes, p->strides, offset, &view));
        FC_TRY_RAISED(r->group->host->take_grad(p->owner, view));
        fct_tensor_release(view);
        view = NULL;
        offset += p->layout.padded_numel;
    }
done:
    fct_tensor_release(view);
    return status;
}

/* Waits for the collective, scales, casts and hands out. On the CPU the wait is the host's. */
static fc_status finish(fc_reduction *r) {
    fc_status status = FC_OK;
    fct_tensor *row = NULL;
    fct_dtype wanted = r->group->orig_dtype;
    if (r->work != NULL) {
        FC_TRY_RAISED(fct_work_wait(r->work));
        fct_work_release(r->work);
        r->work = NULL;
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
    fct_tensor_release(r->output);
    r->output = NULL;
    FC_TRY(view_out(r, row));
    r->finished = true;
done:
    fct_tensor_release(row);
    return status;
}

fc_status fc_reduce_recycle(fc_comm *c, size_t keep) {
    fc_status status = FC_OK;
    while (c->reductions > keep) {
        fc_reduction *r = c->oldest;
        if (!r->finished && (status = finish(r)) != FC_OK) {
            abandon(c, pop_oldest(c)); /* it cannot be finished twice: its gradients are lost */
            goto done;
        }
        if (r->scattered != NULL) {
            FC_TRY_RAISED(fct_event_wait(r->scattered, fct_stream_current(c->device)));
            fc_comm_put_event(c, r->scattered);
            r->scattered = NULL;
        }
        (void)pop_oldest(c);
        fct_tensor_release(r->input);
        free(r);
    }
done:
    return status;
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

static bool wanted_now(const fc_reduction *r) {
    for (size_t i = 0; i < r->count; i++) {
        if (r->group->host->wants_grad_now(r->params[i]->owner)) {
            return true;
        }
    }
    return false;
}

/* Divides and issues the collective on the current stream. */
static fc_status scatter(fc_group *g, fc_reduction *r) {
    fc_status status = FC_OK;
    const fc_reduce_plan *plan = &g->reduce_plan;
    bool has_premul = g->has_divide_factor && g->pg != NULL && fct_pg_has_premul(g->pg, g->device);
    fc_divide divide = fc_reduce_divide(g->world, plan->dtype, g->has_divide_factor,
                                        g->divide_factor, g->force_sum, has_premul);
    r->divide_after = divide.after;
    if (divide.before != 1.0) {
        FC_TRY_RAISED(fct_tensor_div(r->input, divide.before));
    }
    if (g->world == 1 || plan->row_numel == 0) {
        r->output = r->input; /* one rank: the row is the result */
        r->input = NULL;
        return FC_OK;
    }
    FC_TRY_RAISED(fct_tensor_empty(plan->row_numel, plan->dtype, g->device, &r->output));
    FC_TRY_RAISED(fct_reduce_scatter(g->pg, r->output, r->input, divide.op, divide.premultiply,
                                     !g->comm->has_streams, &r->work));
done:
    return status;
}

/* scatter and finish on the reduce stream. */
static fc_status scatter_on_stream(fc_group *g, fc_reduction *r) {
    fc_status status = FC_OK;
    fc_comm *c = g->comm;
    fct_event *reduced = NULL;
    fct_stream compute = fct_stream_current(g->device);
    fct_stream stream = c->streams_ready ? c->reduce_stream : compute;
    FC_TRY(fc_comm_order_streams(c, stream, compute));
    (void)fct_stream_set_current(stream);
    FC_TRY(scatter(g, r));
    if (r->work != NULL) {
        FC_TRY_RAISED(fct_work_wait(r->work));
        fct_work_release(r->work);
        r->work = NULL;
    }
    FC_TRY(fc_comm_record(c, stream, &r->scattered));
    FC_TRY(finish(r));
    FC_TRY(fc_comm_record(c, stream, &reduced));
    fc_comm_put_event(c, g->reduced);
    g->reduced = reduced;
    reduced = NULL;
    FC_TRY(fc_comm_record(c, stream, &reduced));
    fc_comm_put_event(c, c->last_reduced);
    c->last_reduced = reduced;
done:
    (void)fct_stream_set_current(compute);
    return status;
}

fc_status fc_reduce_start(fc_group *g, bool order_compute) {
    fc_status status = FC_OK;
    fc_comm *c = g->comm;
    fc_reduce_plan *plan = &g->reduce_plan;
    fc_reduction *r = new_reduction(g);
    if (r == NULL) {
        fc_reduce_plan_drop_grads(plan);
        return FC_ENOMEM;
    }
    if (g->reduced != NULL) {
        FC_TRY_RAISED(fct_event_wait(g->reduced, fct_stream_current(g->device)));
        fc_comm_put_event(c, g->reduced);
        g->reduced = NULL;
    }
    if (g->pg == NULL && g->world > 1) {
        FC_TRY_RAISED(fct_pg_resolve(g->pg_name, &g->pg));
    }
    FC_TRY(fc_reduce_plan_lay_out(plan, g->reduce_dtype, &g->comm->error));
    FC_TRY_RAISED(fct_tensor_empty(g->world * plan->row_numel, plan->dtype, g->device, &r->input));
    FC_TRY(fc_transfer_pack_gradients(plan, g->world, r->input, &g->comm->error));
    fc_reduce_plan_drop_grads(plan);
    if (c->has_streams) {
        FC_TRY(scatter_on_stream(g, r));
        if (order_compute) {
            FC_TRY_RAISED(fct_event_wait(g->reduced, fct_stream_current(g->device)));
        }
    } else {
        FC_TRY(scatter(g, r));
    }
    append(c, r);
    return !c->has_streams && wanted_now(r) ? fc_reduce_recycle(c, 0) : fc_reduce_poll(c);
done:
    fc_reduce_plan_drop_grads(plan);
    abandon(c, r);
    return status;
}
