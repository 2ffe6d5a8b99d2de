/* Gradient reduction; see reduce.h. Owns the reduce plan, the packed chunks and the events of the
 * latest reduction.
 *
 * Streams: the pack runs on the current stream, the reduce-scatter on the reduce stream. With
 * replicas or a user's hook, later work runs on the all-reduce stream (continue_on_stream). The
 * input is kept until the current stream has waited for its last use. */
#include "reduce.h"

#include <assert.h>
#include <string.h>

#include "../bridge/device.h"
#include "../bridge/error.h"
#include "divide.h"
#include "reduction.h"

/* ---- init and fini ---- */

void fc_reducer_init(fc_reducer *reducer, fc_group_base *base) {
    assert(base != NULL && base->callbacks != NULL);
    memset(reducer, 0, sizeof *reducer);
    reducer->base = base;
    reducer->all_reduce_grads = true;
}

/* Returns the event to the comm context. */
static void return_event(fc_reducer *reducer, fct_event **slot) {
    if (reducer->base->comm != NULL) {
        fc_comm_put_event(reducer->base->comm, *slot);
    }
    *slot = NULL;
}

void fc_reducer_return_events(fc_reducer *reducer) {
    assert(reducer->base->comm != NULL ||
           (reducer->reduced == NULL && reducer->copied_to_host == NULL));
    return_event(reducer, &reducer->reduced);
    return_event(reducer, &reducer->copied_to_host);
}

void fc_reducer_fini(fc_reducer *reducer) {
    assert(reducer->plan.count <= reducer->plan.capacity);
    fc_group_base *base = reducer->base;
    if (base->comm != NULL) {
        fc_reduction_discard(base->comm, base);
    }
    fc_reducer_return_events(reducer);
    fc_reduce_plan_fini(&reducer->plan);
    fc_transfer_fini(&reducer->transfer);
    fc_chunks_fini(&reducer->chunks);
    memset(reducer, 0, sizeof *reducer);
}

/* ---- start ---- */

static bool has_gradient(const fc_reduce_plan *plan, const fc_param *p) {
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->params[i] == p) {
            return true;
        }
    }
    return false;
}

static bool all_reduces_now(const fc_reducer *reducer) {
    return fc_group_base_is_replicated(reducer->base) && reducer->all_reduce_grads;
}

/* Returns true if the span has partial outputs to all-reduce, even without new gradients: earlier
 * backwards only reduce-scattered them. */
static bool has_pending_partials(const fc_reducer *reducer, fc_span span) {
    for (size_t i = span.first; all_reduces_now(reducer) && i < span.end; i++) {
        if (reducer->base->params[i]->partial != NULL) {
            return true;
        }
    }
    return false;
}

/* Creates the reduction of a span. The reduction includes the gradients that were laid out, and
 * with an all-reduce the partial outputs of other parameters. Returns NULL if malloc fails. */
static fc_reduction *new_reduction(fc_reducer *reducer, fc_span span) {
    const fc_reduce_plan *plan = &reducer->plan;
    fc_param *const *params = reducer->base->params;
    fc_reduction *r = fc_reduction_new(reducer->base, span.end - span.first);
    if (r == NULL) {
        return NULL;
    }
    r->has_hook = reducer->has_hook;
    r->count = plan->count;
    r->total = plan->count;
    r->align = plan->count > 0 ? plan->align : 1;
    r->keep_partial = fc_group_base_is_replicated(reducer->base) && !reducer->all_reduce_grads;
    if (plan->count > 0) {
        memcpy((void *)r->params, (const void *)plan->params, plan->count * sizeof *r->params);
    }
    for (size_t i = span.first; all_reduces_now(reducer) && i < span.end; i++) {
        if (params[i]->partial != NULL && !has_gradient(plan, params[i])) {
            r->params[r->total++] = params[i];
        }
    }
    return r;
}

/* Issues the reduce-scatter into `output`, from the chunks or from the single buffer r->input. */
static fc_status reduce_scatter(fc_reducer *reducer, fc_reduction *r, const fc_divide *divide,
                                fct_tensor *output) {
    const fc_group_base *base = reducer->base;
    fc_process_group *pg = fc_group_base_scatter_group(reducer->base);
    const fct_chunk_layout layout = fc_chunk_list_layout(&reducer->plan.chunks);
    fc_reduction_set_label(r, r->count, divide, &pg->label);
    return reducer->plan.chunks.split
               ? fc_process_group_reduce_chunks(pg, base->name, output, reducer->chunks.tensors,
                                                reducer->chunks.count, &layout, divide->op,
                                                &r->work)
               : fc_process_group_reduce_scatter(pg, base->name, output, r->input, divide->op,
                                                 divide->premultiply, !base->comm->has_streams,
                                                 &r->work);
}

/* Divides and issues the reduce-scatter on the current stream. Sets r->output. */
static fc_status issue_reduce_scatter(fc_reducer *reducer, fc_reduction *r,
                                      const fc_divide *divide) {
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    const fc_reduce_plan *plan = &reducer->plan;
    fct_tensor *part = NULL;
    int64_t total = fc_reduction_output_numel(r);
    if (divide->before != 1.0 && r->input != NULL && plan->rank_numel > 0) {
        FC_TRY_RAISED(fct_tensor_div(r->input, divide->before));
    }
    /* If parameters keep the output, the output must be memory of the reduce stream. */
    const bool needs_own_output =
        r->keep_partial && base->comm->has_streams && !fc_reduction_has_partial_output(r);
    if ((base->shard.world == 1 || plan->rank_numel == 0) && total == plan->rank_numel &&
        !needs_own_output) {
        FC_TRY(fc_reduction_use_input(r));
        goto done;
    }
    FC_TRY(fc_group_base_buffer(base, base->reduce_memory, fc_group_base_scatter_group(base), total,
                                plan->dtype, &r->output));
    if (plan->rank_numel == 0) {
        goto done;
    }
    if (total == plan->rank_numel) {
        part = r->output;
        fct_tensor_retain(part);
    } else {
        FC_TRY_RAISED(fct_tensor_alias_1d(r->output, plan->rank_numel, 0, &part));
    }
    if (base->shard.world == 1) {
        FC_TRY_RAISED(fct_tensor_copy(part, r->input));
    } else {
        FC_TRY(reduce_scatter(reducer, r, divide, part));
    }
done:
    fc_chunks_drop(&reducer->chunks); /* the Work holds references to the chunks */
    fct_tensor_release(part);
    return status;
}

/* Issues the all-reduce. On the CPU the first one waits until the models of all replicas are
 * compared, because their sizes must be equal. Precondition: the reduce-scatter is complete or
 * ordered, and partial outputs are merged. */
static fc_status issue_all_reduce(fc_reduction *r, const fc_divide *divide) {
    fc_group_base *base = r->base;
    fc_status status = FC_OK;
    if (base->replicate.world > 1) {
        r->all_reducing = true;
        FC_TRY(fc_group_base_compare_plan(base, &base->replicate, true));
        fc_reduction_set_label(r, r->total, divide, &base->replicate.label);
        FC_TRY(fc_process_group_all_reduce(&base->replicate, base->name, r->output,
                                           divide->all_reduce_op, !base->comm->has_streams,
                                           &r->work));
    }
done:
    return status;
}

/* Queues the work after the reduce-scatter. With replicas or a user's hook this work runs on the
 * all-reduce stream, as in torch. The next reduce-scatter then does not wait for this work. */
static fc_status continue_on_stream(fc_reduction *r, const fc_divide *divide, fct_stream *stream) {
    fc_group_base *base = r->base;
    fc_status status = FC_OK;
    fc_comm_ctx *c = base->comm;
    if (fc_group_base_is_replicated(base) && !r->keep_partial) {
        /* on the reduce stream, which owns the partial outputs that are left */
        FC_TRY(fc_reduction_merge_partials(r));
    }
    if (r->on_other_stream) {
        FC_TRY(fc_comm_order_streams(c, c->all_reduce_stream, *stream));
        *stream = c->all_reduce_stream;
        (void)fct_stream_set_current(*stream);
    }
    if (fc_group_base_is_replicated(base) && !r->keep_partial) {
        FC_TRY(issue_all_reduce(r, divide));
    }
    FC_TRY(fc_reduction_finish(r));
done:
    return status;
}

/* Records the event of queued copies to host memory after a failure, so that the next wait includes
 * these copies. */
static void record_copies_to_host(fc_reducer *reducer, fct_stream stream) {
    void *error = fct_error_set_aside();
    FC_IGNORE(fc_comm_record_into(reducer->base->comm, stream, &reducer->copied_to_host));
    fct_error_put_back(error);
}

/* Queues the whole reduction, except for the pack. All later waits share the event at the end of
 * the reduction. */
static fc_status reduce_on_streams(fc_reducer *reducer, fc_reduction *r, const fc_divide *divide) {
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    fc_comm_ctx *c = base->comm;
    const fct_stream compute = r->input_stream;
    fct_stream stream = c->streams_ready ? c->reduce_stream : compute;
    r->on_other_stream =
        c->streams_ready && !r->keep_partial && (r->has_hook || fc_group_base_is_replicated(base));
    FC_TRY(fc_comm_order_streams(c, stream, compute));
    (void)fct_stream_set_current(stream);
    FC_TRY(issue_reduce_scatter(reducer, r, divide));
    FC_TRY(fc_reduction_wait(r));
    /* work after the reduce-scatter uses the input's memory */
    bool in_place = r->output == r->input;
    if (!in_place) {
        FC_TRY(fc_comm_record(c, stream, &r->input_done));
    }
    FC_TRY(continue_on_stream(r, divide, &stream));
    FC_TRY(fc_comm_record_into(c, stream, &reducer->reduced));
    if (in_place) {
        fc_comm_share_event(c, reducer->reduced, &r->input_done);
    }
    fc_comm_share_event(c, reducer->reduced,
                        r->on_other_stream ? &c->last_all_reduced : &c->last_reduced);
    if (r->copies_to_host) {
        fc_comm_share_event(c, reducer->reduced, &reducer->copied_to_host);
    }
    if (r->output != NULL && r->on_other_stream) {
        fct_event *cast = NULL;
        fc_comm_share_event(c, reducer->reduced, &cast);
        FC_TRY(fc_comm_keep_output(c, r->output, cast));
        r->output = NULL;
    }
done:
    if (status != FC_OK && r->copies_to_host) {
        record_copies_to_host(reducer, stream);
    }
    (void)fct_stream_set_current(compute);
    return status;
}

/* Completes an earlier reduction of the group whose partial outputs are not in fc_param.partial
 * yet. */
static fc_status complete_partial_reduction(fc_reducer *reducer) {
    fc_group_base *base = reducer->base;
    for (const fc_reduction *r = base->comm->oldest; r != NULL; r = r->next) {
        if (r->base == base && r->keep_partial && !r->finished) {
            return fc_reduction_recycle(base->comm, 0);
        }
    }
    return FC_OK;
}

static fc_divide compute_divide(fc_reducer *reducer, fct_dtype dtype) {
    fc_group_base *base = reducer->base;
    const fc_process_group *pg = fc_group_base_scatter_group(base);
    const fc_divide_rule rule = {
        .world = base->shard.world,
        .replicas = fc_group_base_is_replicated(base) ? base->replicate.world : 0,
        .dtype = dtype,
        .has_factor = reducer->has_divide_factor,
        .factor = reducer->divide_factor,
        .force_sum = reducer->force_sum || !fct_device_has_average(base->device),
        .has_premul = reducer->has_divide_factor && pg->handle != NULL &&
                      fct_pg_has_premul(pg->handle, base->device),
    };
    return fc_divide_split(&rule);
}

/* Decides whether large gradients get their own chunks. Conditions: at least one gradient is large
 * enough, the kernels cast all of them, and the process group takes chunks. The operation must not
 * be FCT_PREMUL_SUM. Devices with streams, and the process group's allocator, use one buffer. */
static fc_status choose_split(fc_reducer *reducer, const fc_divide *divide) {
    const fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &reducer->plan;
    bool split = false;
    bool packed = !fc_chunk_list_can_split(&plan->chunks) || base->comm->has_streams ||
                  !plan->native || divide->op == FCT_PREMUL_SUM ||
                  fck_backend_of(base->device.type) == NULL;
    if (!packed) {
        FC_TRY(fc_group_base_has_memory(base, base->reduce_memory, &packed));
    }
    if (!packed) {
        FC_TRY(fc_process_group_takes_chunks(fc_group_base_scatter_group(reducer->base),
                                             base->device, FC_REDUCE_SCATTER, &split));
    }
    if (split) {
        fc_reduce_plan_set_split(plan, true);
    }
done:
    return status;
}

/* Returns true if the gradient's own memory can be sent: the gradient has the layout and dtype of
 * its chunk, has no other owner, and is not divided first. */
static bool can_send_in_place(const fc_reduce_plan *plan, size_t i, const fc_divide *divide) {
    const fc_layout *layout = &plan->params[i]->layout;
    fct_facts facts;
    fct_tensor_facts(plan->grads[i], &facts);
    return facts.dtype == plan->dtype && facts.strided && facts.contiguous &&
           layout->numel == layout->padded_numel * layout->world && divide->before == 1.0 &&
           fct_tensor_is_sole(plan->grads[i]);
}

/* Creates a 1-D view of the gradient's memory as its chunk. */
static fc_status alias_gradient(const fc_reduce_plan *plan, size_t i, fct_tensor **chunk) {
    fct_facts facts;
    fct_tensor_facts(plan->grads[i], &facts);
    return fct_tensor_alias_1d(plan->grads[i], plan->params[i]->layout.numel,
                               facts.offset_bytes / facts.itemsize, chunk) == 0
               ? FC_OK
               : FC_ERAISED;
}

/* Creates the chunk of one gradient: a view of the gradient, or a packed copy. Drops the
 * gradient. */
static fc_status make_owned_chunk(fc_reducer *reducer, size_t i, const fc_divide *divide,
                                  fct_tensor **chunk) {
    const fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &reducer->plan;
    const fc_layout *layout = &plan->params[i]->layout;
    fct_tensor *tensor = NULL;
    if (can_send_in_place(plan, i, divide)) {
        FC_TRY(alias_gradient(plan, i, &tensor));
    } else {
        FC_TRY_RAISED(fct_tensor_empty(layout->world * layout->padded_numel, plan->dtype,
                                       base->device, &tensor));
        FC_TRY(fc_transfer_pack_gradients(&reducer->transfer, plan, plan->slots[i].chunk,
                                          layout->world, tensor, &base->comm->error));
        if (divide->before != 1.0) {
            FC_TRY_RAISED(fct_tensor_div(tensor, divide->before));
        }
    }
    fct_tensor_release(plan->grads[i]);
    plan->grads[i] = NULL;
    *chunk = tensor;
    return FC_OK;
done:
    fct_tensor_release(tensor);
    return status;
}

/* Packs the gradients that share a chunk into r->input. */
static fc_status make_packed_chunk(fc_reducer *reducer, fc_reduction *r, size_t chunk) {
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    const fc_reduce_plan *plan = &reducer->plan;
    const int64_t world = base->shard.world;
    const int64_t numel = world * plan->chunks.chunks[chunk].numel;
    if (plan->chunks.split) {
        FC_TRY_RAISED(fct_tensor_empty(numel, plan->dtype, base->device, &r->input));
    } else {
        FC_TRY(fc_group_base_buffer(base, base->reduce_memory, fc_group_base_scatter_group(base),
                                    numel, plan->dtype, &r->input));
    }
    FC_TRY(fc_transfer_pack_gradients(&reducer->transfer, plan, chunk, world, r->input,
                                      &base->comm->error));
done:
    return status;
}

/* Packs the laid-out gradients into the plan's chunks, on the current stream. The packed chunk
 * comes first: each large gradient is then freed as soon as its own chunk exists. */
static fc_status pack(fc_reducer *reducer, fc_reduction *r, const fc_divide *divide) {
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &reducer->plan;
    FC_TRY(choose_split(reducer, divide));
    const size_t last = plan->chunks.count - 1;
    FC_TRY(fc_chunks_begin(&reducer->chunks, plan->chunks.count));
    if (!plan->chunks.chunks[last].owned) {
        FC_TRY(make_packed_chunk(reducer, r, last));
    }
    for (size_t i = 0; plan->chunks.split && i < plan->count; i++) {
        fct_tensor *chunk = NULL;
        if (plan->slots[i].owns_chunk) {
            FC_TRY(make_owned_chunk(reducer, i, divide, &chunk));
            fc_chunks_add(&reducer->chunks, chunk);
        }
    }
    if (r->input != NULL) {
        fct_tensor_retain(r->input);
        fc_chunks_add(&reducer->chunks, r->input);
    }
done:
    if (status != FC_OK) {
        fc_chunks_drop(&reducer->chunks);
    }
    fc_reduce_plan_drop_grads(plan);
    return status;
}

/* Returns the dtype of the reduction. A reduction of partial outputs only has the dtype of these
 * outputs. */
static fct_dtype reduction_dtype(const fc_reducer *reducer, const fc_reduction *r) {
    if (reducer->plan.count > 0) {
        return reducer->plan.dtype;
    }
    fct_facts facts;
    fct_tensor_facts(r->params[0]->partial, &facts);
    return facts.dtype;
}

/* Issues the collectives. With streams, also queues the steps that finish the reduction. */
static fc_status issue_collectives(fc_reducer *reducer, fc_reduction *r, bool order_compute) {
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    if (base->shard.world > 1) {
        FC_TRY(fc_process_group_open(fc_group_base_scatter_group(base)));
    }
    reducer->plan.dtype = reduction_dtype(reducer, r);
    const fc_divide divide = compute_divide(reducer, reducer->plan.dtype);
    fc_comm_enter_gil_scope(base->comm);
    FC_TRY(pack(reducer, r, &divide));
    r->divide_after = divide.after;
    if (base->comm->has_streams) {
        FC_TRY(reduce_on_streams(reducer, r, &divide));
        if (order_compute) {
            FC_TRY_RAISED(fct_event_wait(reducer->reduced, fct_stream_current(base->device)));
        }
    } else {
        FC_TRY(issue_reduce_scatter(reducer, r, &divide));
        if (fc_group_base_is_replicated(base) && !r->keep_partial) {
            FC_TRY(fc_reduction_wait(r));
            FC_TRY(fc_reduction_merge_partials(r));
            FC_TRY(issue_all_reduce(r, &divide));
        }
    }
done:
    fc_comm_leave_gil_scope(base->comm);
    if (status != FC_OK) {
        fc_chunks_drop(&reducer->chunks);
    }
    return status;
}

/* Returns true if the reduction must complete before backward continues. */
static bool must_complete_now(const fc_reducer *reducer, const fc_reduction *r) {
    if (reducer->overlap == FC_OVERLAP_NEVER) {
        return true;
    }
    if (reducer->overlap == FC_OVERLAP_UNLESS_CPU_BOUND && r->work != NULL &&
        fct_work_is_cpu_bound(r->work)) {
        return true;
    }
    return !reducer->base->comm->has_streams && fc_reduction_must_finish_now(r);
}

/* Starts the reduction of a span. A reduction that could not be started is discarded. */
static fc_status start_reduction(fc_reducer *reducer, fc_span span, bool order_compute) {
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    fc_comm_ctx *c = base->comm;
    fc_reduction *r = NULL;
    FC_TRY(complete_partial_reduction(reducer));
    /* Only the first bucket of a backward waits for the group's previous reduction. */
    if (span.end == base->count) {
        FC_TRY(fc_comm_wait_and_put(c, &reducer->reduced));
    }
    r = new_reduction(reducer, span);
    if (r == NULL) {
        status = FC_ENOMEM;
        goto done;
    }
    FC_TRY(issue_collectives(reducer, r, order_compute));
    fc_reduction_append(r);
    return must_complete_now(reducer, r) ? fc_reduction_recycle(c, 0) : fc_reduction_poll(c);
done:
    if (r != NULL) {
        fc_reduction_abandon(r);
    }
    return status;
}

fc_status fc_reduce_run(fc_reducer *reducer, fc_span span, bool order_compute) {
    assert(span.first <= span.end && span.end <= reducer->base->count);
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    fc_reduce_plan *plan = &reducer->plan;
    void *range = NULL;
    if (plan->count == 0 && !has_pending_partials(reducer, span)) {
        return FC_OK;
    }
    range = fc_group_base_enter_range(base, "post_backward_reduce");
    bool uses_fallback = fc_group_base_uses_fallback(base, FC_FALLBACK_REDUCE);
    if (!uses_fallback) {
        FC_TRY(
            fc_reduce_plan_lay_out(plan, base->reduce_dtype, &uses_fallback, &base->comm->error));
    }
    if (uses_fallback) {
        if (all_reduces_now(reducer)) {
            fc_group_base_add_checksum(base, &base->replicate, FC_ALL_REDUCE, 0);
        }
        reducer->used_fallback = true;
        FC_TRY_RAISED(base->callbacks->reduce(base->owner, plan->params, plan->grads, plan->count,
                                              order_compute));
    } else {
        FC_TRY(start_reduction(reducer, span, order_compute));
    }
done:
    fc_reduce_plan_drop_grads(plan);
    fct_profile_exit(range);
    return status;
}

/* ---- end of a backward ---- */

/* Blocks until gradients in host memory are complete, and waits for the work of the fallback. */
static fc_status wait_on_host(fc_reducer *reducer) {
    const fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    if (reducer->copied_to_host != NULL) {
        FC_TRY_RAISED(fct_event_synchronize(reducer->copied_to_host));
        return_event(reducer, &reducer->copied_to_host);
    }
    if (reducer->used_fallback && base->callbacks->finalize != NULL) {
        FC_TRY_RAISED(base->callbacks->finalize(base->owner));
    }
done:
    return status;
}

fc_status fc_reduce_order_compute(fc_reducer *reducer) {
    assert(reducer->reduced == NULL || reducer->base->comm->has_streams);
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    if (reducer->reduced != NULL) {
        FC_TRY_RAISED(fct_event_wait(reducer->reduced, fct_stream_current(base->device)));
    }
    FC_TRY(wait_on_host(reducer));
done:
    return status;
}

fc_status fc_reduce_settle(fc_reducer *reducer) {
    assert(reducer->reduced == NULL || reducer->base->comm->has_streams);
    fc_group_base *base = reducer->base;
    fc_status status = FC_OK;
    FC_TRY(fc_comm_wait_and_put(base->comm, &base->comm->last_reduced));
    FC_TRY(fc_comm_wait_and_put(base->comm, &base->comm->last_all_reduced));
    fc_reduction_mark_settled(base->comm);
    FC_TRY(wait_on_host(reducer));
    return_event(reducer, &reducer->reduced);
done:
    return status;
}

void fc_reduce_reset(fc_reducer *reducer) {
    assert(reducer->reduced == NULL || reducer->base->comm->has_streams);
    fc_group_base *base = reducer->base;
    fc_reduction_discard(base->comm, base);
    fc_reduce_plan_drop_grads(&reducer->plan);
    if (reducer->used_fallback && base->callbacks->drop_reduce != NULL) {
        base->callbacks->drop_reduce(base->owner);
    }
    /* `copied_to_host` stays: the next end of a backward waits for that event */
    return_event(reducer, &reducer->reduced);
}

/* ---- invariants ---- */

fc_status fc_reduce_check(const fc_reducer *reducer) {
    fc_comm_ctx *c = reducer->base->comm;
    if (reducer->plan.count > 0) {
        return fc_error_set(&c->error, FC_ESTATE, "%zu gradients were collected and not reduced",
                            reducer->plan.count);
    }
    if (reducer->chunks.count > 0) {
        return fc_error_set(&c->error, FC_ESTATE, "a reducer holds %zu chunks after its reduction",
                            reducer->chunks.count);
    }
    if (reducer->reduced != NULL && !c->has_streams) {
        return fc_error_set(&c->error, FC_ESTATE,
                            "a reduction has an event on a device without streams");
    }
    return FC_OK;
}
