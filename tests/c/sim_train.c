/* One training step of a simulated model: the calls that csrc/python's hooks and autograd make to
 * the core, in their order.
 *
 * A forward records a tape: post-backward nodes, computations of layers, and outputs with
 * pre-backward hooks. A backward walks the tape from its end. A failure ends the step immediately,
 * like an exception. */
#include "sim_model.h"

#include <stdlib.h>

#include "sim_internal.h"

static void record(sim_model *m, sim_tape_kind kind, sim_layer *layer, sim_group *group) {
    if (m->tape_length == SIM_TAPE_MAX) {
        fail_msg("the tape is full");
    }
    m->tape[m->tape_length].kind = kind;
    m->tape[m->tape_length].layer = layer;
    m->tape[m->tape_length].group = group;
    m->tape_length++;
}

/* ---- computing ---- */

/* Reads the parameters as a layer does. Records a failure if a parameter is not unsharded or does
 * not have the expected values. */
static void use_params(sim_layer *layer) {
    for (size_t k = 0; k < layer->group_count; k++) {
        sim_group *g = &layer->groups[k];
        for (size_t i = 0; i < g->count; i++) {
            sim_param *p = &g->params[i];
            if (g->core.sharded_state != FC_UNSHARDED || p->registered[0] != FC_UNSHARDED ||
                p->core.unsharded == NULL || p->core.unsharded != p->unsharded) {
                sim_fail("a layer computes while %s is not unsharded", p->name);
                continue;
            }
            double *values = (double *)sim_scratch((size_t)(p->numel + 1) * sizeof *values);
            for (int64_t e = 0; e < p->numel; e++) {
                values[e] = sim_round(sim_compute_dtype(p), p->full[e]);
            }
            sim_tensor_expect(p->core.unsharded, values, p->name);
            sim_scratch_free(values);
        }
    }
}

/* Returns an element of the gradient of the `use`-th use of the parameter on rank 0: -2 .. 2. */
static double gradient_of(const sim_param *p, size_t use, int64_t element) {
    return (double)(((uint64_t)element * 3 + p->seed + use * 5) % 5) - 2.0;
}

static fc_status accumulate_gradient(const sim_model *m, sim_param *p) {
    double *values = (double *)sim_scratch((size_t)(p->numel + 1) * sizeof *values);
    fct_dtype dtype = sim_compute_dtype(p);
    fct_tensor *grad = NULL;
    for (int64_t e = 0; e < p->numel; e++) {
        double base = gradient_of(p, p->contributions, e);
        p->gradient[e] += base;
        values[e] = base * sim_gradient_weight(&m->scenario);
    }
    if (p->shape.transposed && p->shape.ndim == 2) {
        const int64_t sizes[2] = {p->shape.sizes[1], p->shape.sizes[0]};
        const int64_t strides[2] = {1, p->shape.sizes[0]};
        fct_tensor *transposed = sim_tensor_new(dtype, 2, sizes, values);
        grad = sim_tensor_view(transposed, 2, p->shape.sizes, strides);
        sim_tensor_write(grad, values, "a transposed gradient");
        fct_tensor_release(transposed);
    } else {
        grad = sim_tensor_new(dtype, p->shape.ndim, p->shape.sizes, values);
    }
    sim_grad_accumulate(p->core.unsharded, grad);
    p->contributions++;
    sim_scratch_free(values);
    return (fc_status)sim_subscriptions_run(p->core.unsharded);
}

static fc_status accumulate_gradients(sim_model *m, sim_layer *layer) {
    fc_status status = FC_OK;
    for (size_t k = 0; k < layer->group_count; k++) {
        sim_group *g = &layer->groups[k];
        for (size_t i = 0; i < g->count; i++) {
            sim_param *p = &g->params[m->scenario.last_first ? g->count - 1 - i : i];
            if (p->core.unsharded != NULL && !p->shape.unused &&
                !(p->shape.early && m->backwards > 0) &&
                fct_tensor_requires_grad(p->core.unsharded)) {
                FC_TRY(accumulate_gradient(m, p));
            }
        }
    }
done:
    return status;
}

/* The user's code raises where m->raises_in is due. */
static fc_status raise_if_due(sim_model *m) {
    if (m->raises_in == 0 || --m->raises_in > 0) {
        return FC_OK;
    }
    (void)sim_raise();
    return FC_ERAISED;
}

/* ---- forward ---- */

static fc_status lazy_init(sim_model *m) {
    fc_status status = FC_OK;
    if (!m->ready) {
        FC_TRY(fc_comm_init_streams(&m->comm));
        m->ready = true;
    }
done:
    return status;
}

static fc_status pre_forward(sim_model *m, sim_layer *layer, bool grad) {
    fc_status status = FC_OK;
    fc_state *state = &layer->core;
    if (state->training_state == FC_PRE_BACKWARD) {
        return SIM_HOOK(fc_state_visit_groups(state, sim_hook_refresh), fc_state_recompute(state));
    }
    bool first = state->training_state != FC_FORWARD;
    if (first) {
        FC_TRY(lazy_init(m));
        FC_TRY(fc_state_begin_iteration(state, true));
    }
    state->training_state = FC_FORWARD;
    for (size_t k = 0; k < layer->group_count; k++) {
        bool entering = false;
        fc_group *g = &layer->groups[k].core;
        FC_TRY(SIM_HOOK(sim_hook_refresh(g), fc_group_pre_forward(g, &entering)));
        /* The root's input does not require grad, so it has no node. */
        if (entering && grad && (layer != &m->layers[0] || m->scenario.outputs_without_hooks)) {
            record(m, SIM_NODE, layer, &layer->groups[k]);
        }
    }
    if (first && state->forward_prefetch_count > 0) {
        FC_TRY(SIM_HOOK(fc_state_visit_forward_prefetch(state, sim_hook_refresh),
                        fc_state_forward_prefetch(state)));
    }
done:
    return status;
}

static fc_status post_forward(sim_model *m, sim_layer *layer, bool grad) {
    fc_status status = FC_OK;
    if (layer->core.training_state == FC_PRE_BACKWARD) {
        return FC_OK;
    }
    for (size_t k = 0; k < layer->group_count; k++) {
        fc_group *g = &layer->groups[k].core;
        FC_TRY(SIM_HOOK(sim_hook_refresh(g), fc_group_post_forward(g)));
    }
    if (grad && !m->scenario.outputs_without_hooks) {
        record(m, SIM_OUTPUT, layer, NULL);
    }
    FC_TRY(fc_state_end_forward(&layer->core));
done:
    return status;
}

static fc_status compute(sim_model *m, sim_layer *layer, bool grad) {
    use_params(layer);
    if (grad) {
        record(m, SIM_COMPUTE, layer, NULL);
    }
    return raise_if_due(m);
}

static size_t layer_at(const sim_model *m, size_t position) {
    const bool swaps = m->scenario.swaps_layers && m->layer_count > 2 && position <= 2;
    return swaps ? 3 - position : position;
}

fc_status sim_model_forward(sim_model *m, bool grad) {
    fc_status status = FC_OK;
    sim_layer *root = &m->layers[0];
    FC_TRY(pre_forward(m, root, grad));
    FC_TRY(compute(m, root, grad));
    for (size_t i = 1; i + (m->scenario.skips_layer ? 1 : 0) < m->layer_count; i++) {
        sim_layer *layer = &m->layers[layer_at(m, i)];
        FC_TRY(pre_forward(m, layer, grad));
        FC_TRY(compute(m, layer, grad));
        FC_TRY(post_forward(m, layer, grad));
    }
    FC_TRY(post_forward(m, root, grad));
done:
    return status;
}

/* ---- backward ---- */

static int call_at_end(void *owner) {
    sim_model *m = (sim_model *)owner;
    fc_status status = SIM_HOOK(fc_iteration_visit_groups(&m->iteration, sim_hook_refresh),
                                fc_iteration_end_backward(&m->iteration, &m->comm));
    const fc_comm_ctx *c = &m->comm;
    bool is_last = m->iteration.is_last_backward && !m->iteration.manual;
    if (status == FC_OK && is_last && c->kept_output_count > 0) {
        fail_msg("outputs are kept after the backward that reduced them");
    }
    return status;
}

/* The retain and release functions of hooks: a model outlives its hooks. */
static void ignore_owner(void *owner) {
    (void)owner;
}

static fc_status backward_compute(sim_model *m, sim_layer *layer, bool with_gradients) {
    fc_status status = FC_OK;
    if (m->scenario.recompute && layer != &m->layers[0]) {
        FC_TRY(pre_forward(m, layer, true));
        use_params(layer);
        FC_TRY(post_forward(m, layer, true));
    }
    use_params(layer);
    FC_TRY(raise_if_due(m));
    if (with_gradients) {
        FC_TRY(accumulate_gradients(m, layer));
    }
    if (with_gradients && m->scenario.split_gradients) {
        FC_TRY(accumulate_gradients(m, layer));
    }
done:
    return status;
}

/* Runs backward through the forward's graph. `with_gradients`: gradients are accumulated into the
 * parameters. */
static fc_status backward(sim_model *m, bool with_gradients) {
    fc_status status = FC_OK;
    const fct_hook at_end = {m, call_at_end, ignore_owner, ignore_owner};
    for (size_t i = m->tape_length; i-- > 0;) {
        sim_layer *layer = m->tape[i].layer;
        sim_group *group = m->tape[i].group;
        switch (m->tape[i].kind) {
        case SIM_OUTPUT:
            FC_TRY(SIM_HOOK(fc_state_visit_pre_backward(&layer->core, sim_hook_refresh),
                            fc_state_pre_backward(&layer->core, &at_end)));
            break;
        case SIM_COMPUTE:
            FC_TRY(backward_compute(m, layer, with_gradients));
            break;
        case SIM_NODE:
            FC_TRY(SIM_HOOK(sim_hook_refresh(&group->core), fc_group_leave_backward(&group->core)));
            FC_TRY(fc_state_post_backward(&layer->core, &group->core));
            sim_log("post:%s", group->name);
            break;
        }
    }
    status = (fc_status)sim_run_at_end();
done:
    return status;
}

/* Runs backward through the graph that a recording backward created, from the gradients at the
 * layers' nodes to the gradients of the outputs. The root has no node, so no hook runs for it. */
static fc_status double_backward(sim_model *m) {
    fc_status status = FC_OK;
    const fct_hook at_end = {m, call_at_end, ignore_owner, ignore_owner};
    for (size_t i = 0; i < m->tape_length; i++) {
        if (m->tape[i].kind == SIM_NODE) {
            fc_state *state = &m->tape[i].layer->core;
            FC_TRY(SIM_HOOK(fc_state_visit_groups(state, sim_hook_refresh),
                            fc_state_pre_double_backward(state, &at_end)));
        } else if (m->tape[i].kind == SIM_COMPUTE) {
            use_params(m->tape[i].layer);
            FC_TRY(accumulate_gradients(m, m->tape[i].layer));
        }
    }
done:
    return status;
}

static fc_status run_backwards(sim_model *m) {
    fc_status status = FC_OK;
    if (m->scenario.two_graphs) {
        size_t recorded = m->tape_length;
        sim_set_recording(true);
        status = backward(m, false);
        sim_set_recording(false);
        m->tape_length = recorded; /* entries that a recomputation adds are not used */
        FC_TRY(status);
        FC_TRY(double_backward(m));
    }
    FC_TRY(backward(m, true));
done:
    return status;
}

fc_status sim_model_backward(sim_model *m) {
    sim_set_in_backward(true);
    fc_status status = run_backwards(m);
    sim_set_in_backward(false);
    m->tape_length = 0;
    return status;
}

/* ---- steps ---- */

void sim_model_set_sync(sim_model *m, sim_sync sync) {
    bool reduce = sync != SIM_NO_SYNC;
    m->iteration.is_last_backward = reduce;
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            fc_group *g = &m->layers[i].groups[k].core;
            g->settings.reduce_grads = reduce;
            g->reducer.all_reduce_grads = sync == SIM_SYNC;
            g->settings.reshard_after_backward = reduce || !m->scenario.no_reshard_while_unsynced;
        }
    }
}

static fc_status run_microbatch(sim_model *m, sim_sync sync) {
    fc_status status = FC_OK;
    size_t forwards = m->scenario.forwards > 0 ? m->scenario.forwards : 1;
    sim_model_set_sync(m, sync);
    for (size_t f = 0; f < forwards; f++) {
        FC_TRY(sim_model_forward(m, true));
    }
    FC_TRY(sim_model_backward(m));
    m->backwards++;
done:
    return status;
}

fc_status sim_model_step(sim_model *m) {
    fc_status status = FC_OK;
    size_t repeats = m->scenario.repeats > 0 ? m->scenario.repeats : 1;
    m->backwards = 0;
    for (size_t i = 0; i < repeats; i++) {
        for (size_t b = 0; b < m->scenario.unsynced; b++) {
            FC_TRY(run_microbatch(m, SIM_NO_SYNC));
        }
        for (size_t b = 0; b < m->scenario.unreplicated; b++) {
            FC_TRY(run_microbatch(m, SIM_SCATTER_ONLY));
        }
        FC_TRY(run_microbatch(m, SIM_SYNC));
    }
done:
    return status;
}
