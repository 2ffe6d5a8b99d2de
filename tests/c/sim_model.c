/* Life cycle of a simulated model: parameters, groups and states as csrc/python creates them, the
 * fc_callbacks, and the checks that can run at any time. Steps are in sim_train.c, expected
 * values in sim_account.c. */
#include "sim_model.h"

#include "core/bucket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* ---- fc_callbacks ---- */

int sim_whole_tensor(const sim_param *p, const fct_tensor *flat, fct_tensor **out) {
    int64_t strides[3] = {1, 1, 1};
    fct_facts facts;
    for (int32_t d = p->shape.ndim - 1; d > 0; d--) {
        strides[d - 1] = strides[d] * (p->shape.sizes[d] > 1 ? p->shape.sizes[d] : 1);
    }
    fct_tensor_facts(flat, &facts);
    return fct_tensor_alias(flat, p->shape.ndim, p->shape.sizes, strides,
                            facts.offset_bytes / facts.itemsize, out);
}

static int callback_make_unsharded(void *owner, fct_tensor *flat, fct_tensor **unsharded) {
    sim_callback("make_unsharded");
    sim_param *p = (sim_param *)owner;
    fct_tensor *made = NULL;
    if (sim_fault(SIM_FAULT_CALLBACK, "make_unsharded")) {
        return -1;
    }
    if (sim_whole_tensor(p, flat, &made) != 0) {
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

static int callback_make_post_forward(void *owner, fct_tensor *data) {
    sim_callback("make_post_forward");
    sim_param *p = (sim_param *)owner;
    if (data != NULL && sim_fault(SIM_FAULT_CALLBACK, "make_post_forward")) {
        return -1;
    }
    if (data != NULL) {
        fct_tensor_retain(data);
    }
    fct_tensor_release(p->post_forward);
    p->post_forward = data;
    return 0;
}

/* Can fail between the slots, because each slot is a module's own __setattr__. */
static int callback_swap(void *owner, fc_sharded_state state) {
    sim_callback("swap");
    static const char *const what[] = {"", "swap to sharded", "swap to post-forward",
                                       "swap to unsharded"};
    sim_param *p = (sim_param *)owner;
    if ((state == FC_UNSHARDED && p->unsharded == NULL) ||
        (state == FC_SHARDED_POST_FORWARD && p->post_forward == NULL)) {
        sim_fail("%s: nothing to register for a %s", p->name, what[state]);
        return 0;
    }
    for (size_t slot = 0; slot < (p->shape.tied ? 2 : 1); slot++) {
        if (p->registered[slot] == state) {
            continue;
        }
        if (sim_fault(SIM_FAULT_CALLBACK, what[state])) {
            return -1;
        }
        p->registered[slot] = state;
        if (state != FC_UNSHARDED && slot == 0) {
            sim_log("reshard:%s", p->name);
        }
    }
    return 0;
}

static bool callback_requires_grad(void *owner) {
    sim_callback("requires_grad");
    return fct_tensor_requires_grad(((const sim_param *)owner)->sharded);
}

static int callback_set_requires_grad(void *owner, bool value) {
    sim_callback("set_requires_grad");
    return fct_tensor_set_requires_grad(((const sim_param *)owner)->sharded, value);
}

/* sharded_data records all writes of the simulation. */
static uint32_t callback_shard_version(void *owner) {
    (void)owner;
    sim_callback("shard_version");
    return 0;
}

static int callback_refresh_shard(void *owner) {
    sim_callback("refresh_shard");
    sim_param *p = (sim_param *)owner;
    if (p->replacement == NULL) {
        return 0;
    }
    if (sim_fault(SIM_FAULT_CALLBACK, "refresh_shard")) {
        return -1;
    }
    fc_param_set_sharded_data(&p->core, p->replacement);
    fct_tensor_release(p->replacement);
    p->replacement = NULL;
    return 0;
}

static int callback_set_sharded_grad(void *owner, fct_tensor *local) {
    sim_callback("set_sharded_grad");
    sim_param *p = (sim_param *)owner;
    if (sim_fault(SIM_FAULT_CALLBACK, "set_sharded_grad")) {
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

static bool callback_has_grad(void *owner) {
    sim_callback("has_grad");
    return sim_grad_peek(((const sim_param *)owner)->sharded) != NULL;
}

static bool callback_needs_grad_now(void *owner) {
    sim_callback("needs_grad_now");
    return ((const sim_param *)owner)->shape.hooked;
}

/* Returns an fc_status and sets no exception. sim_train.c passes the status on. */
static int callback_grad_arrived(void *owner) {
    sim_callback("grad_arrived");
    sim_param *p = (sim_param *)owner;
    if (!fc_bucket_arrived(&p->core)) {
        return 0;
    }
    sim_group *group = (sim_group *)p->core.buckets->base->owner;
    return (int)SIM_HOOK(sim_hook_refresh(&group->core), fc_group_reduce_buckets(&group->core));
}

static int callback_reduce_hook(void *group, fct_tensor *output) {
    sim_callback("reduce_hook");
    (void)group;
    if (sim_fault(SIM_FAULT_CALLBACK, "reduce_hook")) {
        return -1;
    }
    return fct_tensor_div(output, 0.5);
}

const fc_callbacks sim_callbacks = {
    .make_unsharded = callback_make_unsharded,
    .extend_inputs = sim_extend_inputs,
    .extend_unsharded = sim_extend_unsharded,
    .make_post_forward = callback_make_post_forward,
    .reduce_hook = callback_reduce_hook,
    .grad_arrived = callback_grad_arrived,
    .swap = callback_swap,
    .requires_grad = callback_requires_grad,
    .set_requires_grad = callback_set_requires_grad,
    .shard_version = callback_shard_version,
    .refresh_shard = callback_refresh_shard,
    .set_sharded_grad = callback_set_sharded_grad,
    .has_grad = callback_has_grad,
    .needs_grad_now = callback_needs_grad_now,
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
        double integer = (double)(((uint64_t)i * 7 + p->seed) % 33);
        p->full[i] = fct_dtype_is_floating(p->shape.dtype) ? (integer - 16.0) / 8.0 : integer;
    }
    assert_int_equal(fc_param_init(&p->core, p, shape->ndim, shape->sizes, shape->dim, s->world,
                                   s->rank, &error),
                     FC_OK);
    if (s->post_forward_world > 0) {
        assert_int_equal(fc_param_init_post_forward(&p->core, shape->sizes, s->post_forward_world,
                                                    s->rank % s->post_forward_world, &error),
                         FC_OK);
    }
    p->registered[0] = FC_SHARDED;
    p->registered[1] = FC_SHARDED;
    p->core.name = p->name;
    p->core.orig_dtype = p->shape.dtype;
    p->core.param_dtype = shape->compute != 0 ? shape->compute : FCT_NO_DTYPE;
    p->core.reduce_dtype = s->reduce_dtype != 0 ? s->reduce_dtype : FCT_NO_DTYPE;
    int64_t padded = sim_padded_numel(p, shape->dim, s->world);
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    sim_shard_values(p, p->full, shape->dim, s->world, s->rank, values);
    p->core.extended = shape->extended != SIM_NOT_EXTENDED;
    p->core.offloaded = s->offload;
    p->core.pinned = s->offload && !s->unpinned;
    fct_tensor *data = s->offload && s->device.streams
                           ? sim_tensor_new_in_host(p->shape.dtype, padded, p->core.pinned, values)
                           : sim_tensor_new(p->shape.dtype, 1, &padded, values);
    fct_tensor *sharded = NULL;
    assert_int_equal(
        fct_tensor_alias(data, shape->ndim, p->core.local_sizes, p->core.strides, 0, &sharded), 0);
    assert_int_equal(fct_tensor_set_requires_grad(sharded, !shape->frozen), 0);
    fc_param_set_sharded_data(&p->core, data);
    fct_tensor_release(data);
    p->sharded = sharded;
    sim_scratch_free(values);
}

/* Registers the group's process groups. The factor of replica k is the sum of the gradient factors
 * in its shard group, relative to rank 0. */
static void process_groups_init(sim_group *g, const sim_scenario *s) {
    static const char *const suffixes[] = {"", ".scatter", ".replicas", ".forward"};
    double first = sim_gradient_weight(s) - (double)s->rank;
    double world = (double)s->world;
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        (void)snprintf(g->pg_names[i], sizeof g->pg_names[i], "%s%s", g->name, suffixes[i]);
    }
    fc_process_group_set(&g->core.base.shard, g->pg_names[0], s->world, s->rank);
    sim_pg_register(g->pg_names[0], s->world, s->rank, sim_write_shard, g);
    sim_pg_weigh(g->pg_names[0], first, 1.0);
    if (s->own_scatter) {
        fc_process_group_set(&g->core.base.scatter, g->pg_names[1], s->world, s->rank);
        sim_pg_register(g->pg_names[1], s->world, s->rank, NULL, g);
        sim_pg_weigh(g->pg_names[1], first, 1.0);
    }
    if (s->replicas > 0) {
        fc_process_group_set(&g->core.base.replicate, g->pg_names[2], s->replicas, s->replica);
        sim_pg_register(g->pg_names[2], s->replicas, s->replica, NULL, g);
        sim_pg_weigh(g->pg_names[2], world * (world + 1.0) / 2.0, world * world);
    }
    if (s->post_forward_world > 0) {
        fc_process_group_set(&g->core.base.post_forward, g->pg_names[3], s->post_forward_world,
                             s->rank % s->post_forward_world);
        sim_pg_register(g->pg_names[3], s->post_forward_world, s->rank % s->post_forward_world,
                        sim_write_forward_shard, g);
    }
}

/* Sets the allocators of all-gathers and reduce-scatters. The smaller group has none: its
 * all-gathers use memory of the shard group's allocator. */
static void memory_init(sim_group *g, const sim_scenario *s) {
    const char *const names[2] = {g->pg_names[0], g->pg_names[s->own_scatter ? 1 : 0]};
    fct_pg *groups[2] = {NULL, NULL};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(fct_pg_resolve(names[i], &groups[i]), 0);
        if (!s->without_memory) {
            sim_pg_has_memory(names[i], true);
        }
    }
    if (s->post_forward_world > 0 && !s->without_memory) {
        sim_pg_has_memory(g->pg_names[3], false);
    }
    fc_group_base_set_memory(&g->core.base, sim_allocator_new(groups[0]),
                             sim_allocator_new(groups[1]));
}

static void group_init(sim_group *g, sim_model *m, size_t layer, size_t index) {
    const sim_scenario *s = &m->scenario;
    fc_param **params = (fc_param **)malloc((s->shape_count + 1) * sizeof *params);
    if (layer == 0) {
        (void)snprintf(g->name, sizeof g->name, "root");
    } else {
        (void)snprintf(g->name, sizeof g->name, "%zu%s", layer - 1, index == 0 ? "" : "b");
    }
    g->count = s->shape_count;
    for (size_t i = 0; i < g->count; i++) {
        param_init(&g->params[i], g, &s->shapes[i], i, s);
        params[i] = &g->params[i].core;
    }
    fc_group_init(&g->core, g, &sim_callbacks, &m->comm, params, g->count, sim_device(), s->world,
                  s->rank);
    g->core.transitions = &sim_transitions;
    g->core.base.name = g->name;
    g->core.base.reduce_dtype = s->reduce_dtype != 0 ? s->reduce_dtype : FCT_NO_DTYPE;
    process_groups_init(g, s);
    if (s->memory_of_groups) {
        memory_init(g, s);
    }
    g->core.place.unit = &m->layers[layer];
    g->core.place.index = index;
    g->core.place.siblings = m->layers[layer].group_count;
    g->core.reducer.has_hook = s->user_reduce;
    g->core.place.modules = s->modules_share_group ? 2 : 1;
    g->core.settings.reshard_after_forward =
        !s->no_reshard_after_forward && !(layer == 0 && s->root_no_reshard_after_forward);
    g->core.settings.unshard_async_op = s->async_unshard;
    g->core.reducer.force_sum = s->force_sum;
    g->core.reducer.reduce_unused = s->reduce_unused;
    g->core.reducer.overlap = s->overlap;
    g->core.buckets.limit = s->bucket_bytes;
    g->core.reducer.has_divide_factor = s->divide_factor != 0.0;
    g->core.reducer.divide_factor = s->divide_factor;
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

/* One instance: the struct is large, and tests create thousands. */
static _Thread_local sim_model the_model;

sim_model *sim_model_new(const sim_scenario *scenario) {
    sim_model *m = &the_model;
    memset(m, 0, sizeof *m);
    m->scenario = *scenario;
    m->layer_count = scenario->layers + 1;
    fc_comm_init(&m->comm, sim_device());
    fc_set_min_owned_chunk_bytes(scenario->device.chunks ? 1 : SIM_NEVER_SPLIT);
    sim_set_agreement(scenario->has_agreement, "");
    m->comm.checksums = scenario->checksums;
    if (scenario->max_reductions > 0) {
        m->comm.max_reductions = scenario->max_reductions;
    }
    fc_iteration_init(&m->iteration);
    for (size_t i = 0; i < m->layer_count; i++) {
        sim_layer *layer = &m->layers[i];
        layer->group_count = i > 0 && scenario->layer_groups > 0 ? scenario->layer_groups : 1;
        fc_state_init(&layer->core, layer, &m->iteration, &m->comm);
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
    fct_tensor_release(p->post_forward);
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
    sim_drain(); /* queued operations may still use the name of a parameter */
}

/* ---- checks ---- */

static void check_group(sim_group *g, const char *when) {
    fc_status status = fc_group_check(&g->core);
    if (status != FC_OK) {
        sim_fail("%s: group %s is inconsistent: %s", when, g->name,
                 g->core.base.comm->error.message);
    }
    for (size_t i = 0; i < g->count; i++) {
        const sim_param *p = &g->params[i];
        for (size_t slot = 0; slot < (p->shape.tied ? 2 : 1); slot++) {
            if (p->registered[slot] != g->core.sharded_state && !g->core.registration_dirty) {
                sim_fail("%s: sharded state %d of %s is registered, but its group has %d", when,
                         (int)p->registered[slot], p->name, (int)g->core.sharded_state);
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
    const sim_scenario *scenario = &m->scenario;
    int64_t padded = sim_padded_numel(p, p->shape.dim, scenario->world);
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    sim_shard_values(p, p->full, p->shape.dim, scenario->world, scenario->rank, values);
    sim_tensor_expect(p->core.sharded_data, values, p->name);
    sim_scratch_free(values);
}

void sim_model_check_shards(sim_model *m) {
    each_param(m, check_shard);
}

static void clear_expected_gradient(sim_model *m, sim_group *g, sim_param *p) {
    (void)m;
    (void)g;
    memset(p->gradient, 0, (size_t)p->numel * sizeof *p->gradient);
    p->contributions = 0;
}

static void clear_extension(sim_model *m, sim_group *g, sim_param *p) {
    (void)m;
    (void)g;
    p->hooked_gathers = 0;
}

void sim_model_discard_step(sim_model *m) {
    sim_set_in_backward(false);
    sim_drop_at_end();
    m->tape_length = 0;
    each_param(m, clear_expected_gradient);
    each_param(m, clear_extension);
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

static void optimize(sim_model *m, sim_group *g, sim_param *p) {
    const sim_scenario *s = &m->scenario;
    const fct_tensor *grad = sim_grad_peek(p->sharded);
    (void)g;
    bool expected = !p->shape.frozen && (p->contributions > 0 || s->reduce_unused);
    if ((grad != NULL) != expected) {
        sim_fail("%s has %s", p->name, grad != NULL ? "an unexpected gradient" : "no gradient");
    }
    if (grad == NULL || !expected) {
        return;
    }
    fct_facts facts;
    fct_tensor_facts(grad, &facts);
    fct_facts shard;
    fct_tensor_facts(p->core.sharded_data, &shard);
    if (facts.dtype != p->shape.dtype || facts.device.type != shard.device.type ||
        facts.numel != sim_local_numel(p, p->shape.dim, s->world, s->rank)) {
        sim_fail("the gradient of %s has dtype %d, device type %d and %lld elements", p->name,
                 (int)facts.dtype, (int)facts.device.type, (long long)facts.numel);
        return;
    }
    int64_t padded = sim_padded_numel(p, p->shape.dim, s->world);
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    sim_shard_values(p, p->gradient, p->shape.dim, s->world, s->rank, values);
    for (int64_t i = 0; i < facts.numel; i++) {
        values[i] *= sim_reduced_scale(s);
    }
    sim_tensor_expect(grad, values, p->name);
    for (int64_t i = 0; i < p->numel; i++) {
        p->full[i] =
            sim_round(p->shape.dtype, p->full[i] - p->gradient[i] * sim_reduced_scale(s) / 4.0);
    }
    sim_shard_values(p, p->full, p->shape.dim, s->world, s->rank, values);
    sim_tensor_write(p->core.sharded_data, values, "the optimizer's write");
    sim_scratch_free(values);
}

void sim_model_optimize(sim_model *m) {
    each_param(m, optimize);
    sim_model_zero_grad(m);
    each_param(m, clear_expected_gradient);
}

static _Thread_local double digest;

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

/* The simulation does not count roots: the identifier of a root is its number. */
int fct_number_root(fct_pg *pg, fct_device device, uint64_t root, uint64_t *number) {
    (void)pg, (void)device;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_number_root")) {
        return -1;
    }
    *number = root;
    return 0;
}
