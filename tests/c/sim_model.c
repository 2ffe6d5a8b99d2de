/* The model's life: parameters, groups and states as csrc/python makes them, the host's call-backs, and the checks
 * that may be made at any time. Stepping is in sim_train.c.
 *
 * The account (`full`, `gradient`) is kept for all ranks by arithmetic of its own: nothing here asks csrc/core/layout
 * where an element belongs. */
#include "sim_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* ---- where elements are, by torch.chunk's rule ---- */

/* Elements of one rank's padded shard. */
static int64_t padded_numel(const sim_param *p, int64_t world) {
    int64_t rows = p->shape.sizes[0];
    return rows > 0 ? (rows + world - 1) / world * (p->numel / rows) : 0;
}

/* The values that `rank` stores: its chunk, then zeros. */
static void shard_values(const sim_param *p, int64_t world, int64_t rank, double *out) {
    int64_t padded = padded_numel(p, world);
    for (int64_t i = 0; i < padded; i++) {
        int64_t whole = rank * padded + i;
        out[i] = whole < p->numel ? p->full[whole] : 0.0;
    }
}

static int64_t local_numel(const sim_param *p, int64_t world, int64_t rank) {
    int64_t padded = padded_numel(p, world);
    int64_t left = p->numel - rank * padded;
    return left < 0 ? 0 : (left < padded ? left : padded);
}

static fct_dtype compute_dtype(const sim_param *p) {
    return p->shape.compute != 0 ? p->shape.compute : p->shape.dtype;
}

/* The process group's oracle. */
static void write_row(void *context, int64_t rank, void *row, int64_t bytes) {
    const sim_group *g = (const sim_group *)context;
    char *at = (char *)row;
    for (size_t i = 0; i < g->count; i++) {
        const sim_param *p = &g->params[i];
        int64_t padded = padded_numel(p, g->core.shard.world);
        int64_t size = sim_itemsize(compute_dtype(p));
        double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
        shard_values(p, g->core.shard.world, rank, values);
        for (int64_t k = 0; k < padded; k++, at += size) {
            sim_put(compute_dtype(p), at, values[k]);
        }
        sim_scratch_free(values);
    }
    if (at - (char *)row != bytes) {
        sim_fail("rank %lld sends %lld bytes to an all-gather of %s, its peers expect %lld",
                 (long long)rank, (long long)bytes, g->name, (long long)(at - (char *)row));
    }
}

/* ---- host call-backs ---- */

static int host_make_unsharded(void *owner, fct_tensor *flat, fct_tensor **unsharded) {
    sim_param *p = (sim_param *)owner;
    fct_tensor *made = NULL;
    if (sim_fault(SIM_FAULT_HOST, "make_unsharded")) {
        return -1;
    }
    if (fct_tensor_alias(flat, p->shape.ndim, p->shape.sizes, p->core.strides, 0, &made) != 0) {
        return -1;
    }
    if (fct_tensor_set_requires_grad(made, fct_tensor_requires_grad(p->sharded)) != 0) {
        fct_tensor_release(made);
        return -1;
    }
    fct_tensor_release(p->unsharded);
    p->unsharded = made;
    *unsharded = made;
    return 0;
}

/* Fails between the slots, too: each is a module's own __setattr__. */
static int host_swap(void *owner, fc_sharded_state face) {
    sim_param *p = (sim_param *)owner;
    bool unsharded = face == FC_UNSHARDED;
    if (unsharded && p->unsharded == NULL) {
        sim_fail("%s has no unsharded parameter to register", p->name);
        return 0;
    }
    for (size_t slot = 0; slot < (p->shape.tied ? 2 : 1); slot++) {
        if (p->registered[slot] == unsharded) {
            continue;
        }
        if (sim_fault(SIM_FAULT_HOST, unsharded ? "swap to unsharded" : "swap to sharded")) {
            return -1;
        }
        p->registered[slot] = unsharded;
        if (!unsharded && slot == 0) {
            sim_log("reshard:%s", p->name);
        }
    }
    return 0;
}

static bool host_requires_grad(void *owner) {
    return fct_tensor_requires_grad(((const sim_param *)owner)->sharded);
}

static int host_take_grad(void *owner, fct_tensor *local) {
    sim_param *p = (sim_param *)owner;
    if (sim_fault(SIM_FAULT_HOST, "take_grad")) {
        return -1;
    }
    fct_tensor *grad = sim_grad_peek(p->sharded);
    if (grad != NULL) {
        if (fct_tensor_add(grad, local) != 0) {
            return -1;
        }
    } else {
        fct_tensor_retain(local);
        sim_grad_accumulate(p->sharded, local);
    }
    if (p->shape.hooked) {
        sim_tensor_touch(sim_grad_peek(p->sharded), "a post-accumulate-grad hook");
        sim_log("hook:%s", p->name);
    }
    return 0;
}

static bool host_wants_grad_now(void *owner) {
    return ((const sim_param *)owner)->shape.hooked;
}

const fc_host sim_host = {
    .make_unsharded = host_make_unsharded,
    .swap = host_swap,
    .requires_grad = host_requires_grad,
    .take_grad = host_take_grad,
    .wants_grad_now = host_wants_grad_now,
};

/* ---- life ---- */

static void param_init(sim_param *p, const sim_group *g, const sim_shape *shape, size_t index,
                       const sim_scenario *s) {
    fc_error error;
    p->shape = *shape;
    p->shape.dtype = shape->dtype != 0 ? shape->dtype : (fct_dtype)FCK_FLOAT32;
    p->seed = 17 * index + 5 * strlen(g->name) + (size_t)g->name[0];
    (void)snprintf(p->name, sizeof p->name, "%s.%zu", g->name, index);
    p->numel = 1;
    for (int32_t d = 0; d < shape->ndim; d++) {
        p->numel *= shape->sizes[d];
    }
    p->full = (double *)sim_alloc((size_t)(p->numel + 1) * sizeof *p->full);
    p->gradient = (double *)sim_alloc((size_t)(p->numel + 1) * sizeof *p->gradient);
    for (int64_t i = 0; i < p->numel; i++) {
        double whole = (double)(((uint64_t)i * 7 + p->seed) % 33);
        p->full[i] = fct_dtype_is_floating(p->shape.dtype) ? (whole - 16.0) / 8.0 : whole;
    }
    assert_int_equal(
        fc_param_init(&p->core, p, shape->ndim, shape->sizes, 0, s->world, s->rank, &error), FC_OK);
    p->core.name = p->name;
    p->core.orig_dtype = p->shape.dtype;
    p->core.param_dtype = shape->compute != 0 ? shape->compute : FCT_NO_DTYPE;
    p->core.reduce_dtype = s->reduce_dtype != 0 ? s->reduce_dtype : FCT_NO_DTYPE;
    int64_t padded = padded_numel(p, s->world);
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    shard_values(p, s->world, s->rank, values);
    fct_tensor *data = sim_tensor_new(p->shape.dtype, 1, &padded, values);
    fct_tensor *sharded = NULL;
    assert_int_equal(
        fct_tensor_alias(data, shape->ndim, p->core.local_sizes, p->core.strides, 0, &sharded), 0);
    assert_int_equal(fct_tensor_set_requires_grad(sharded, !shape->frozen), 0);
    fc_param_set_sharded_data(&p->core, data);
    fct_tensor_release(data);
    p->sharded = sharded;
    sim_scratch_free(values);
}

static void group_init(sim_group *g, sim_model *m, size_t layer, size_t index) {
    const sim_scenario *s = &m->scenario;
    fc_param **params = (fc_param **)malloc((s->shape_count + 1) * sizeof *params);
    if (layer == 0) {
        (void)snprintf(g->name, sizeof g->name, "root");
    } else {
        (void)snprintf(g->name, sizeof g->name, "%zu%s", layer - 1, index == 0 ? "" : "b");
    }
    (void)snprintf(g->pg_name, sizeof g->pg_name, "%s", g->name);
    g->count = s->shape_count;
    for (size_t i = 0; i < g->count; i++) {
        param_init(&g->params[i], g, &s->shapes[i], i, s);
        params[i] = &g->params[i].core;
    }
    fc_group_init(&g->core, g, &sim_host, &m->comm, params, g->count, sim_device(), s->world,
                  s->rank);
    g->core.name = g->name;
    g->core.shard.name = g->pg_name;
    g->core.module_count = s->modules_share_group ? 2 : 1;
    g->core.reshard_after_forward = !s->stay_after_forward && !(layer == 0 && s->root_stays);
    g->core.unshard_async_op = s->async_unshard;
    g->core.force_sum = s->force_sum;
    g->core.reduce_unused = s->reduce_unused;
    g->core.has_divide_factor = s->divide_factor != 0.0;
    g->core.divide_factor = s->divide_factor;
    g->core.reduce_dtype = s->reduce_dtype != 0 ? s->reduce_dtype : FCT_NO_DTYPE;
    for (size_t i = g->count; i-- > 0;) {
        if (!g->params[i].shape.frozen) {
            g->core.orig_dtype = g->params[i].shape.dtype;
        }
    }
    sim_pg_register(g->pg_name, s->world, s->rank, write_row, g);
}

static fc_state **state_list(sim_model *m, size_t first, size_t count, bool backwards) {
    fc_state **list = (fc_state **)malloc((count + 1) * sizeof *list);
    for (size_t i = 0; i < count; i++) {
        list[i] = &m->layers[backwards ? first - i : first + i].core;
    }
    return list;
}

static void set_prefetches(sim_model *m) {
    const sim_scenario *s = &m->scenario;
    for (size_t i = 1; i < m->layer_count; i++) {
        fc_state *state = &m->layers[i].core;
        size_t after = m->layer_count - 1 - i;
        size_t ahead = s->forward_prefetch < after ? s->forward_prefetch : after;
        size_t behind = s->backward_prefetch < i - 1 ? s->backward_prefetch : i - 1;
        state->forward_prefetch = state_list(m, i + 1, ahead, false);
        state->forward_prefetch_count = ahead;
        state->backward_prefetch = state_list(m, i - 1, behind, true);
        state->backward_prefetch_count = behind;
    }
}

/* One at a time: it is large, and thousands are made. */
static sim_model the_model;

sim_model *sim_model_new(const sim_scenario *scenario) {
    sim_model *m = &the_model;
    memset(m, 0, sizeof *m);
    m->scenario = *scenario;
    m->layer_count = scenario->layers + 1;
    fc_comm_init(&m->comm, sim_device());
    if (scenario->max_reductions > 0) {
        m->comm.max_reductions = scenario->max_reductions;
    }
    fc_iteration_init(&m->iteration);
    for (size_t i = 0; i < m->layer_count; i++) {
        sim_layer *layer = &m->layers[i];
        layer->group_count = i > 0 && scenario->layer_groups > 0 ? scenario->layer_groups : 1;
        fc_state_init(&layer->core, layer, &m->iteration, &m->comm, sim_device());
        layer->core.groups = (fc_group **)malloc(layer->group_count * sizeof *layer->core.groups);
        layer->core.group_count = layer->group_count;
        for (size_t k = 0; k < layer->group_count; k++) {
            group_init(&layer->groups[k], m, i, k);
            layer->core.groups[k] = &layer->groups[k].core;
        }
    }
    fc_iteration_set_states(&m->iteration, state_list(m, 0, m->layer_count, false), m->layer_count);
    set_prefetches(m);
    return m;
}

static void param_fini(sim_param *p) {
    fc_param_fini(&p->core);
    fct_tensor_release(p->unsharded);
    fct_tensor_release(p->sharded);
    free(p->full);
    free(p->gradient);
}

void sim_model_free(sim_model *m) {
    sim_fault_arm(0, SIM_ONCE);
    sim_drop_at_end();
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            fc_group_fini(&m->layers[i].groups[k].core);
        }
        fc_state_fini(&m->layers[i].core);
    }
    fc_comm_fini(&m->comm);
    fc_iteration_fini(&m->iteration);
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            for (size_t j = 0; j < m->layers[i].groups[k].count; j++) {
                param_fini(&m->layers[i].groups[k].params[j]);
            }
        }
    }
    sim_drain(); /* what is queued may still name a parameter */
}

/* ---- checks ---- */

static void check_group(sim_group *g, const char *when) {
    fc_status status = fc_group_check(&g->core);
    bool unsharded = g->core.sharded_state == FC_UNSHARDED;
    if (status != FC_OK) {
        sim_fail("%s: group %s is inconsistent: %s", when, g->name, g->core.comm->error.message);
    }
    for (size_t i = 0; i < g->count; i++) {
        const sim_param *p = &g->params[i];
        for (size_t slot = 0; slot < (p->shape.tied ? 2 : 1); slot++) {
            if (p->registered[slot] != unsharded && !g->core.torn) {
                sim_fail("%s: the %s parameter %s is registered, but its group is not", when,
                         p->registered[slot] ? "unsharded" : "sharded", p->name);
            }
        }
    }
}

void sim_model_check(sim_model *m, const char *when) {
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            check_group(&m->layers[i].groups[k], when);
        }
    }
}

static void each_param(sim_model *m, void (*visit)(sim_model *, sim_group *, sim_param *)) {
    for (size_t i = 0; i < m->layer_count; i++) {
        for (size_t k = 0; k < m->layers[i].group_count; k++) {
            sim_group *g = &m->layers[i].groups[k];
            for (size_t j = 0; j < g->count; j++) {
                visit(m, g, &g->params[j]);
            }
        }
    }
}

static void check_shard(sim_model *m, sim_group *g, sim_param *p) {
    (void)g;
    double *values =
        (double *)sim_scratch((size_t)(padded_numel(p, m->scenario.world) + 1) * sizeof *values);
    shard_values(p, m->scenario.world, m->scenario.rank, values);
    sim_tensor_expect(p->core.sharded_data, values, p->name);
    sim_scratch_free(values);
}

void sim_model_check_shards(sim_model *m) {
    each_param(m, check_shard);
}

static void forget(sim_model *m, sim_group *g, sim_param *p) {
    (void)m;
    (void)g;
    memset(p->gradient, 0, (size_t)p->numel * sizeof *p->gradient);
    p->contributions = 0;
}

void sim_model_forget_step(sim_model *m) {
    sim_set_in_backward(false);
    sim_drop_at_end();
    m->tape_length = 0;
    each_param(m, forget);
}

static void zero_grad(sim_model *m, sim_group *g, sim_param *p) {
    fct_tensor *grad = NULL;
    (void)m;
    (void)g;
    fct_grad_take(p->sharded, &grad);
    fct_tensor_release(grad);
}

void sim_model_zero_grad(sim_model *m) {
    each_param(m, zero_grad);
}

/* ---- the optimizer ---- */

/* How the sum over rank 0's gradients becomes the reduced gradient. */
static double reduced_scale(const sim_scenario *s) {
    double ranks = (double)(s->world * (s->world + 1)) / 2.0;
    if (s->divide_factor != 0.0) {
        return ranks / s->divide_factor;
    }
    return ranks / (double)s->world;
}

static void optimize(sim_model *m, sim_group *g, sim_param *p) {
    const sim_scenario *s = &m->scenario;
    const fct_tensor *grad = sim_grad_peek(p->sharded);
    (void)g;
    bool expected = !p->shape.frozen && (p->contributions > 0 || s->reduce_unused);
    if ((grad != NULL) != expected) {
        sim_fail("%s has %s", p->name,
                 grad != NULL ? "a gradient that nobody gave it" : "no gradient");
    }
    if (grad == NULL || !expected) {
        return;
    }
    fct_facts facts;
    fct_tensor_facts(grad, &facts);
    if (facts.dtype != p->shape.dtype || facts.numel != local_numel(p, s->world, s->rank)) {
        sim_fail("the gradient of %s has dtype %d and %lld elements", p->name, (int)facts.dtype,
                 (long long)facts.numel);
        return;
    }
    int64_t padded = padded_numel(p, s->world);
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    for (int64_t i = 0; i < facts.numel; i++) {
        values[i] = p->gradient[s->rank * padded + i] * reduced_scale(s);
    }
    sim_tensor_expect(grad, values, p->name);
    for (int64_t i = 0; i < p->numel; i++) {
        p->full[i] =
            sim_round(p->shape.dtype, p->full[i] - p->gradient[i] * reduced_scale(s) / 4.0);
    }
    shard_values(p, s->world, s->rank, values);
    sim_tensor_write(p->core.sharded_data, values, "the optimizer's write");
    sim_scratch_free(values);
}

void sim_model_optimize(sim_model *m) {
    each_param(m, optimize);
    sim_model_zero_grad(m);
    each_param(m, forget);
}

static double digest;

static void add_to_digest(sim_model *m, sim_group *g, sim_param *p) {
    (void)m;
    (void)g;
    for (int64_t i = 0; i < p->numel; i++) {
        digest += p->full[i] * (double)(i + 1 + (int64_t)p->seed);
    }
}

double sim_model_digest(sim_model *m) {
    digest = 0.0;
    each_param(m, add_to_digest);
    return digest;
}
