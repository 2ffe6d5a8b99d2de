/* Reductions in flight; see reduction.h. Owns the list in the comm context and the buffers, events
 * and work of its entries.
 *
 * Streams: an input is freed only after the current stream and the stream of its memory wait for
 * `input_done`. An abandoned reduction first orders both streams after the reduce streams. */
#include "reduction.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/kernels.h"
#include "offload.h"
#include "plan.h"

fc_reduction *fc_reduction_new(fc_group_base *base, size_t total) {
    assert(base->comm != NULL);
    fc_reduction *r = (fc_reduction *)calloc(1, sizeof *r + 3 * total * sizeof *r->params);
    if (r != NULL) {
        r->base = base;
        r->align = 1;
        r->params = (fc_param **)(void *)(r + 1);
        r->sums = (fct_tensor **)(void *)(r->params + total);
        r->addends = r->sums + total;
        if (base->comm->has_streams) {
            r->input_stream = fct_stream_current(base->device);
        }
    }
    return r;
}

/* ---- the list in the comm context ---- */

void fc_reduction_append(fc_reduction *r) {
    assert(r->next == NULL && r != r->base->comm->newest);
    fc_comm_ctx *c = r->base->comm;
    if (c->newest != NULL) {
        c->newest->next = r;
    } else {
        c->oldest = r;
    }
    c->newest = r;
    c->reductions++;
}

void fc_reduction_abandon(fc_reduction *r) {
    assert(r->next == NULL && r != r->base->comm->newest);
    fc_comm_ctx *c = r->base->comm;
    if (c->streams_ready) {
        if (r->on_other_stream) {
            fc_comm_settle_streams(c, c->reduce_stream, c->all_reduce_stream);
        }
        const fct_stream current = fct_stream_current(c->device);
        fc_comm_settle_streams(c, current, c->reduce_stream);
        if (r->input_stream.id != current.id) {
            fc_comm_settle_streams(c, r->input_stream, c->reduce_stream);
        }
    }
    fc_comm_put_event(c, r->input_done);
    fc_comm_defer_release(c, r->work, r->input, r->output);
    free(r);
}

static fc_reduction *pop_oldest(fc_comm_ctx *c) {
    fc_reduction *r = c->oldest;
    c->oldest = r->next;
    if (c->oldest == NULL) {
        c->newest = NULL;
    }
    c->reductions--;
    r->next = NULL;
    return r;
}

/* Inserts `r` as the oldest reduction again. */
static void push_oldest(fc_comm_ctx *c, fc_reduction *r) {
    r->next = c->oldest;
    c->oldest = r;
    if (c->newest == NULL) {
        c->newest = r;
    }
    c->reductions++;
}

void fc_reduction_mark_settled(fc_comm_ctx *c) {
    assert((c->oldest == NULL) == (c->reductions == 0));
    if (c->oldest == NULL || !c->has_streams) {
        return;
    }
    const fct_stream current = fct_stream_current(c->device);
    for (fc_reduction *r = c->oldest; r != NULL; r = r->next) {
        if (r->input_stream.id == current.id) {
            fc_comm_put_event(c, r->input_done);
            r->input_done = NULL;
        }
    }
}

bool fc_reduction_has(const fc_comm_ctx *c, const fc_group_base *base) {
    const fc_reduction *r = c->oldest;
    while (r != NULL && r->base != base) {
        r = r->next;
    }
    return r != NULL;
}

void fc_reduction_discard(fc_comm_ctx *c, const fc_group_base *base) {
    assert((c->oldest == NULL) == (c->reductions == 0));
    fc_reduction *kept_first = NULL;
    fc_reduction *kept_last = NULL;
    size_t kept = 0;
    while (c->oldest != NULL) {
        fc_reduction *r = pop_oldest(c);
        if (base != NULL && r->base != base) {
            if (kept_last != NULL) {
                kept_last->next = r;
            } else {
                kept_first = r;
            }
            kept_last = r;
            kept++;
            continue;
        }
        fc_reduction_abandon(r);
    }
    c->oldest = kept_first;
    c->newest = kept_last;
    c->reductions = kept;
}

/* ---- finish ---- */

/* Returns the offset of the part after the part of `p` at `offset`. */
static int64_t next_offset(const fc_reduction *r, int64_t offset, const fc_param *p) {
    return fc_reduce_plan_next_offset(r->align, offset, p->layout.padded_numel);
}

int64_t fc_reduction_output_numel(const fc_reduction *r) {
    int64_t numel = 0;
    for (size_t i = 0; i < r->total; i++) {
        numel = next_offset(r, numel, r->params[i]);
    }
    return numel;
}

/* Creates a 1-D view of `numel` elements of the output, of the input or of partial outputs. */
static fc_status view_part(const fct_tensor *t, int64_t offset, int64_t numel, fct_tensor **out) {
    return fct_tensor_alias_1d(t, numel, offset, out) == 0 ? FC_OK : FC_ERAISED;
}

/* Consecutive parameters with partial outputs that are slices of one buffer, at the distances of
 * the output. Two views, one of the buffer and one of the output, cover all of them. */
typedef struct partial_run {
    size_t first, end;   /* parameters; without partial outputs if `partial` is NULL */
    fct_tensor *partial; /* partial output of parameter `first`; borrowed */
    int64_t offset;      /* of parameter `first` in the output */
    int64_t numel;       /* elements in the output, gaps between parameters included */
    int64_t next;        /* offset of parameter `end` in the output */
} partial_run;

/* Returns true if `partial` lies `distance` elements after `first`, in the same storage. */
static bool is_slice_after(const fct_tensor *first, const fct_tensor *partial, int64_t distance) {
    fct_facts a;
    fct_facts b;
    fct_tensor_facts(first, &a);
    fct_tensor_facts(partial, &b);
    return a.data != NULL && b.data != NULL && a.dtype == b.dtype && a.contiguous && b.contiguous &&
           a.storage_bytes == b.storage_bytes &&
           (uintptr_t)b.data - (uintptr_t)a.data == (uintptr_t)(distance * a.itemsize) &&
           b.offset_bytes - a.offset_bytes == distance * a.itemsize;
}

/* Returns the run that begins at parameter `first`, at `offset` in the output. A run has parameters
 * with a gradient, or without, but not both. */
static partial_run find_run(const fc_reduction *r, size_t first, int64_t offset) {
    partial_run run = {.first = first, .end = first, .offset = offset};
    int64_t end = offset;
    run.partial = r->params[first]->partial;
    for (size_t i = first; i < r->total; i++) {
        const fc_param *p = r->params[i];
        bool joins = i == first;
        if (!joins && (i < r->count) == (first < r->count)) {
            joins = run.partial == NULL || p->partial == NULL
                        ? run.partial == p->partial
                        : is_slice_after(run.partial, p->partial, end - offset);
        }
        if (!joins) {
            break;
        }
        run.end = i + 1;
        run.numel = end + p->layout.padded_numel - offset;
        end = next_offset(r, end, p);
    }
    run.next = end;
    return run;
}

/* Keeps the output's parts as the partial outputs of a run that has none. */
static fc_status keep_parts(const fc_reduction *r, const partial_run *run) {
    fc_status status = FC_OK;
    fct_tensor *part = NULL;
    int64_t offset = run->offset;
    for (size_t i = run->first; i < run->end; i++) {
        FC_TRY(view_part(r->output, offset, r->params[i]->layout.padded_numel, &part));
        fc_param_set_partial(r->params[i], part);
        fct_tensor_release(part);
        part = NULL;
        offset = next_offset(r, offset, r->params[i]);
    }
done:
    fct_tensor_release(part);
    return status;
}

/* Drops the partial outputs, which were merged. */
static void drop_partials(const fc_reduction *r) {
    for (size_t i = 0; i < r->total; i++) {
        fc_param_set_partial(r->params[i], NULL);
    }
}

bool fc_reduction_has_partial_output(const fc_reduction *r) {
    if (!r->base->comm->has_streams || r->input == NULL || r->total == 0) {
        return false;
    }
    const partial_run run = find_run(r, 0, 0);
    if (run.partial == NULL || run.end != r->total || r->count != r->total) {
        return false;
    }
    fct_facts partial;
    fct_facts input;
    fct_tensor_facts(run.partial, &partial);
    fct_tensor_facts(r->input, &input);
    return partial.dtype == input.dtype && partial.contiguous && partial.offset_bytes == 0 &&
           partial.storage_bytes == fc_reduction_output_numel(r) * partial.itemsize;
}

fc_status fc_reduction_use_input(fc_reduction *r) {
    assert(r->output == NULL && r->count <= r->total);
    fc_status status = FC_OK;
    fct_tensor *part = NULL;
    fct_tensor *partial = NULL;
    if (!fc_reduction_has_partial_output(r)) {
        r->output = r->input;
        fct_tensor_retain(r->output);
        return FC_OK;
    }
    const partial_run run = find_run(r, 0, 0);
    FC_TRY(view_part(run.partial, 0, fc_reduction_output_numel(r), &r->output));
    FC_TRY(view_part(run.partial, 0, run.numel, &partial));
    FC_TRY(view_part(r->input, 0, run.numel, &part));
    FC_TRY_RAISED(fct_tensor_add(partial, part));
    drop_partials(r);
done:
    fct_tensor_release(part);
    fct_tensor_release(partial);
    return status;
}

/* Appends one addition for the run to `sums` and `addends`. With keep_partial the partial outputs
 * are the sum, and the part of the output is added to them. Otherwise the part of the output is the
 * sum, and the partial outputs are added to it. If that part contains no gradients, copies the
 * partial outputs to it and appends nothing. */
static fc_status merge_run(const fc_reduction *r, const partial_run *run, size_t *count) {
    fc_status status = FC_OK;
    fct_tensor *part = NULL;
    fct_tensor *partial = NULL;
    fct_facts facts;
    FC_TRY(view_part(r->output, run->offset, run->numel, &part));
    if (run->end - run->first == 1) {
        partial = run->partial;
        fct_tensor_retain(partial);
    } else {
        fct_tensor_facts(run->partial, &facts);
        FC_TRY(view_part(run->partial, facts.offset_bytes / facts.itemsize, run->numel, &partial));
    }
    if (!r->keep_partial && run->first >= r->count) {
        FC_TRY_RAISED(fct_tensor_copy(part, partial));
        goto done;
    }
    r->sums[*count] = r->keep_partial ? partial : part;
    r->addends[(*count)++] = r->keep_partial ? part : partial;
    return FC_OK;
done:
    fct_tensor_release(part);
    fct_tensor_release(partial);
    return status;
}

static fc_status add_all(const fc_reduction *r, size_t count) {
    fc_status status = FC_OK;
    if (count == 1) {
        FC_TRY_RAISED(fct_tensor_add(r->sums[0], r->addends[0]));
    } else if (count > 1) {
        FC_TRY_RAISED(fct_foreach_add(r->sums, r->addends, count));
    }
done:
    return status;
}

fc_status fc_reduction_merge_partials(fc_reduction *r) {
    assert(r->output != NULL && r->count <= r->total);
    fc_status status = FC_OK;
    partial_run run = {.end = 0};
    size_t count = 0;
    while (run.end < r->total) {
        run = find_run(r, run.end, run.next);
        if (run.partial != NULL) {
            FC_TRY(merge_run(r, &run, &count));
        } else if (r->keep_partial) {
            FC_TRY(keep_parts(r, &run));
        }
    }
    FC_TRY(add_all(r, count));
    if (!r->keep_partial) {
        drop_partials(r);
    }
done:
    for (size_t i = 0; i < count; i++) {
        fct_tensor_release(r->sums[i]);
        fct_tensor_release(r->addends[i]);
    }
    return status;
}

/* Returns the common dtype of the sharded gradients. FCT_NO_DTYPE: they have several dtypes, or
 * that of the reduction. */
static fct_dtype common_dtype(const fc_reduction *r) {
    fct_dtype dtype = r->total > 0 ? fc_param_sharded_grad_dtype(r->params[0]) : FCT_NO_DTYPE;
    for (size_t i = 1; i < r->total; i++) {
        if (fc_param_sharded_grad_dtype(r->params[i]) != dtype) {
            return FCT_NO_DTYPE;
        }
    }
    return dtype;
}

/* Replaces the gradient by a copy in host memory if the parameter is offloaded. */
static fc_status copy_to_host(fc_reduction *r, const fc_param *p, fct_tensor **view) {
    fc_status status = FC_OK;
    fct_tensor *local = NULL;
    bool queued = false;
    if (!p->offloaded || !r->base->comm->has_streams) {
        return FC_OK;
    }
    FC_TRY(fc_offload_copy_gradient(p, r->base->callbacks, *view, &local, &queued));
    r->copies_to_host = r->copies_to_host || queued;
    fct_tensor_release(*view);
    *view = local;
done:
    return status;
}

/* Passes each parameter its view of the reduced gradients. `cast_views`: `output` has the dtype of
 * the reduction, so each view is cast to the dtype of its gradient. */
static fc_status distribute_gradients(fc_reduction *r, const fct_tensor *output, bool cast_views) {
    fc_status status = FC_OK;
    fct_tensor *view = NULL;
    int64_t offset = 0;
    for (size_t i = 0; i < r->total; i++) {
        const fc_param *p = r->params[i];
        FC_TRY_RAISED(fct_tensor_alias(output, p->ndim, p->local_sizes, p->strides, offset, &view));
        if (cast_views && fc_param_sharded_grad_dtype(p) != FCT_NO_DTYPE) {
            fct_tensor *cast = NULL;
            FC_TRY_RAISED(fct_tensor_cast(view, fc_param_sharded_grad_dtype(p), &cast));
            fct_tensor_release(view);
            view = cast;
        }
        FC_TRY(copy_to_host(r, p, &view));
        FC_TRY_RAISED(r->base->callbacks->set_sharded_grad(p->owner, view));
        fct_tensor_release(view);
        view = NULL;
        offset = next_offset(r, offset, p);
    }
done:
    fct_tensor_release(view);
    return status;
}

void fc_reduction_set_label(const fc_reduction *r, size_t count, const fc_divide *divide,
                            fct_op_label *label) {
    const fc_label_params params = {r->base->params, r->base->count, r->params, count};
    fc_label_set_reduction(label, r->base->comm, params, fc_reduction_output_numel(r), divide);
}

fc_status fc_reduction_wait(fc_reduction *r) {
    assert(!r->all_reducing || fc_group_base_is_replicated(r->base));
    fc_group_base *base = r->base;
    fc_process_group *pg = r->all_reducing ? &base->replicate : fc_group_base_scatter_group(base);
    return fc_process_group_wait(pg, base->name,
                                 r->all_reducing ? FC_ALL_REDUCE : FC_REDUCE_SCATTER, &r->work);
}

/* Adds the checksum of the output, which is equal on all replicas. On devices with streams, the
 * current stream reads the output. */
static fc_status add_checksum(const fc_reduction *r) {
    fc_status status = FC_OK;
    fc_comm_ctx *c = r->base->comm;
    fct_facts facts;
    if (!c->checksums) {
        return FC_OK;
    }
    fct_tensor_facts(r->output, &facts);
    const fck_backend *kernels = fck_backend_of(facts.device.type);
    const int64_t bytes = facts.numel * facts.itemsize;
    const bool is_readable = facts.data != NULL && fct_facts_has_bytes(&facts, bytes);
    if (c->has_streams) {
        const fck_range range = {.data = facts.data, .bytes = bytes, .factor = 1};
        fc_device_sum sum = {0};
        if (is_readable && (uintptr_t)facts.data % sizeof(uint64_t) == 0) {
            FC_TRY(fc_device_checksums_take(&c->device_checksums, c->device, &sum));
            FC_TRY(fc_device_checksums_add(c->device_checksums, &sum, &range, 1, &c->error));
        }
        fc_group_base_add_device_sum(r->base, &r->base->replicate, FC_ALL_REDUCE, &sum);
    } else {
        const bool reads = is_readable && kernels != NULL && kernels->checksum != NULL;
        const uint64_t sum = reads ? kernels->checksum(facts.data, (size_t)bytes) : 0;
        fc_group_base_add_checksum(r->base, &r->base->replicate, FC_ALL_REDUCE,
                                   reads && sum == 0 ? 1 : sum);
    }
done:
    return status;
}

fc_status fc_reduction_finish(fc_reduction *r) {
    assert(!r->finished && r->count <= r->total);
    fc_status status = FC_OK;
    fct_tensor *result = NULL;
    fct_dtype grad_dtype = common_dtype(r);
    FC_TRY(fc_reduction_wait(r));
    if (r->all_reducing) {
        FC_TRY(add_checksum(r));
    }
    if (r->keep_partial) {
        FC_TRY(fc_reduction_merge_partials(r));
        fct_tensor_release(r->output); /* the parameters' parts keep their memory */
        r->output = NULL;
        r->finished = true;
        return FC_OK;
    }
    if (r->has_hook) {
        fc_comm_leave_gil_scope(r->base->comm);
        FC_TRY_RAISED(r->base->callbacks->reduce_hook(r->base->owner, r->output));
    }
    fc_comm_enter_gil_scope(r->base->comm);
    if (r->divide_after != 1.0) {
        FC_TRY_RAISED(fct_tensor_div(r->output, r->divide_after));
    }
    if (grad_dtype != FCT_NO_DTYPE) {
        FC_TRY_RAISED(fct_tensor_cast(r->output, grad_dtype, &result));
    } else {
        result = r->output;
        fct_tensor_retain(result);
    }
    if (!r->base->comm->has_streams ||
        (result == r->output && grad_dtype != FCT_NO_DTYPE && !r->on_other_stream)) {
        fct_tensor_release(r->output);
        r->output = NULL;
    }
    fc_comm_leave_gil_scope(r->base->comm);
    FC_TRY(distribute_gradients(r, result, grad_dtype == FCT_NO_DTYPE));
    r->finished = true;
done:
    fc_comm_leave_gil_scope(r->base->comm);
    fct_tensor_release(result);
    return status;
}

/* Makes the current stream and the stream of the input's memory wait for the input's last use. */
static fc_status order_input_release(fc_comm_ctx *c, fc_reduction *r) {
    fc_status status = FC_OK;
    if (r->input_done == NULL) {
        return FC_OK;
    }
    const fct_stream current = fct_stream_current(c->device);
    if (r->input_stream.id != current.id) {
        FC_TRY_RAISED(fct_event_wait(r->input_done, r->input_stream));
    }
    FC_TRY_RAISED(fct_event_wait(r->input_done, current));
    fc_comm_put_event(c, r->input_done);
    r->input_done = NULL;
done:
    return status;
}

/* Removes each reduction from the list before fc_reduction_finish. A user hook that runs in
 * fc_reduction_finish may discard all reductions (reset) or call this function again (another
 * backward). */
fc_status fc_reduction_recycle(fc_comm_ctx *c, size_t keep) {
    assert((c->oldest == NULL) == (c->reductions == 0));
    while (c->reductions > keep) {
        fc_reduction *r = pop_oldest(c);
        fc_status status = r->finished ? FC_OK : fc_reduction_finish(r);
        if (status != FC_OK) {
            /* the gradients are lost, because a second attempt is not possible */
            fc_reduction_abandon(r);
            return status;
        }
        status = order_input_release(c, r);
        if (status != FC_OK) {
            push_oldest(c, r);
            return status;
        }
        fct_tensor_release(r->input);
        fct_tensor_release(r->output);
        free(r);
    }
    return FC_OK;
}

fc_status fc_reduction_poll(fc_comm_ctx *c) {
    assert((c->oldest == NULL) == (c->reductions == 0));
    fc_status status = FC_OK;
    while (!c->has_streams && c->oldest != NULL &&
           (c->oldest->work == NULL || fct_work_done(c->oldest->work))) {
        FC_TRY(fc_reduction_recycle(c, c->reductions - 1));
    }
done:
    return status;
}

bool fc_reduction_must_finish_now(const fc_reduction *r) {
    if (r->has_hook && !r->keep_partial) {
        return true;
    }
    for (size_t i = 0; i < r->total; i++) {
        if (r->base->callbacks->needs_grad_now(r->params[i]->owner)) {
            return true;
        }
    }
    return false;
}

fc_status fc_reduction_check(fc_comm_ctx *c) {
    size_t count = 0;
    const fc_reduction *last = NULL;
    for (const fc_reduction *r = c->oldest; r != NULL; r = r->next) {
        count++;
        last = r;
    }
    if (count != c->reductions || last != c->newest) {
        return fc_error_set(&c->error, FC_ESTATE, "%zu reductions are in flight; %zu were counted",
                            count, c->reductions);
    }
    return FC_OK;
}
