/* Initializes and releases the model of a dry run. Owns its roots, states, units and parameters,
 * and the storages of tensors that the model allocates. step.c runs the calls. */
#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../core/dtype.h"
#include "boundary_device.h"
#include "callbacks.h"

/* ---- init ---- */

static fc_status init_param(fcd_param *p, const fcd_unit_description *u, size_t index,
                            fc_error *error) {
    const fcd_param_description *d = &u->params[index];
    fc_status status = FC_OK;
    fct_tensor *data = NULL;
    p->description = d;
    p->requires_grad = d->requires_grad;
    FC_TRY(fc_param_init(&p->core, p, d->ndim, d->sizes, d->dim, u->world, 0, error));
    if (u->post_forward_world > 0) {
        FC_TRY(fc_param_init_post_forward(&p->core, d->sizes, u->post_forward_world, 0, error));
    }
    p->core.name = d->name;
    p->core.orig_dtype = d->dtype;
    p->core.param_dtype = d->compute != d->dtype ? d->compute : FCT_NO_DTYPE;
    p->core.reduce_dtype = d->reduce != d->compute ? d->reduce : FCT_NO_DTYPE;
    p->core.offloaded = u->offload;
    p->core.pinned = u->offload && u->pinned;
    fcd_storage *storage = fcd_storage_new(p->core.layout.padded_numel * fc_dtype_size(d->dtype),
                                           FCD_SHARDS, u->offload);
    if (storage != NULL) {
        data = fcd_tensor_over(storage, d->dtype, 1, &p->core.layout.padded_numel);
    }
    fcd_storage_release(storage);
    status = data != NULL ? FC_OK : FC_ENOMEM;
    fc_param_set_sharded_data(&p->core, data);
    fct_tensor_release(data);
done:
    return status;
}

static void init_process_groups(fcd_unit *unit, const fcd_unit_description *u, size_t index) {
    fc_group_base *base = &unit->core.base;
    (void)snprintf(unit->name, sizeof unit->name, "#%zu", index);
    (void)snprintf(unit->shard_name, sizeof unit->shard_name, "%zu shard", index);
    (void)snprintf(unit->replicate_name, sizeof unit->replicate_name, "%zu replicate", index);
    (void)snprintf(unit->post_forward_name, sizeof unit->post_forward_name, "%zu smaller", index);
    base->name = unit->name;
    fc_process_group_set(&base->shard, unit->shard_name, u->world, 0);
    if (u->replicas > 1) {
        fc_process_group_set(&base->replicate, unit->replicate_name, u->replicas, 0);
    }
    if (u->post_forward_world > 0) {
        fc_process_group_set(&base->post_forward, unit->post_forward_name, u->post_forward_world,
                             0);
    }
}

static void init_settings(fc_group *g, const fcd_unit_description *u,
                          const fcd_state_description *s) {
    g->place.modules = (size_t)s->modules;
    g->settings.reshard_after_forward = u->reshard_after_forward;
    g->settings.reshard_after_backward = u->reshard_after_backward;
    g->settings.unshard_in_backward = u->unshard_in_backward;
    g->settings.reduce_grads = u->reduce_grads;
    g->reducer.all_reduce_grads = u->all_reduce_grads;
    g->base.reduce_dtype = u->reduce;
    g->reducer.overlap = u->overlap ? FC_OVERLAP_UNLESS_CPU_BOUND : FC_OVERLAP_NEVER;
    g->buckets.limit = u->bucket_bytes;
}

static fc_status init_unit(fcd_model *m, size_t index) {
    const fcd_unit_description *u = &m->description->units[index];
    const fcd_state_description *s = &m->description->states[u->state];
    fcd_unit *unit = &m->units[index];
    fcd_root *root = &m->roots[s->root];
    fc_status status = FC_OK;
    fc_param **params = (fc_param **)calloc(u->count + 1, sizeof *params);
    unit->params = (fcd_param *)calloc(u->count + 1, sizeof *unit->params);
    m->unit_count = index + 1;
    if (params == NULL || unit->params == NULL) {
        free((void *)params);
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < u->count; i++) {
        params[i] = &unit->params[i].core;
    }
    fc_group_init(&unit->core, unit, &fcd_callbacks, &root->comm, params, u->count,
                  root->comm.device, u->world, 0);
    init_process_groups(unit, u, index);
    init_settings(&unit->core, u, s);
    if (root->comm.max_reductions < (size_t)u->max_input_buffers) {
        root->comm.max_reductions = (size_t)u->max_input_buffers;
    }
    for (size_t i = 0; i < u->count; i++) {
        unit->count = i + 1;
        FC_TRY(init_param(&unit->params[i], u, i, &m->error));
    }
done:
    return status;
}

/* Fills the array of the state's groups, and sets the position of each group among them. */
static fc_status collect_groups(fcd_model *m, size_t index) {
    const fcd_description *d = m->description;
    fc_state *state = &m->states[index];
    state->groups = (fc_group **)calloc(d->unit_count + 1, sizeof(fc_group *));
    if (state->groups == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < d->unit_count; i++) {
        if ((size_t)d->units[i].state == index) {
            m->units[i].core.place.index = state->group_count;
            state->groups[state->group_count++] = &m->units[i].core;
        }
    }
    for (size_t i = 0; i < state->group_count; i++) {
        state->groups[i]->place.unit = state;
        state->groups[i]->place.siblings = state->group_count;
    }
    return FC_OK;
}

static fc_status collect_prefetch(fcd_model *m, const int32_t *targets, size_t count,
                                  fc_state ***list, size_t *length) {
    *list = (fc_state **)calloc(count + 1, sizeof **list);
    if (*list == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        (*list)[i] = &m->states[targets[i]];
    }
    *length = count;
    return FC_OK;
}

/* Sets the states of a root's iteration, in order. */
static fc_status collect_states(fcd_model *m, size_t root) {
    const fcd_description *d = m->description;
    size_t count = 0;
    fc_state **states = (fc_state **)calloc(d->state_count + 1, sizeof(fc_state *));
    if (states == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = root; i < d->state_count; i++) {
        if ((size_t)d->states[i].root == root) {
            states[count++] = &m->states[i];
        }
    }
    fc_iteration_set_states(&m->roots[root].iteration, states, count);
    return FC_OK;
}

static fc_status connect_state(fcd_model *m, size_t index) {
    const fcd_state_description *s = &m->description->states[index];
    fc_state *state = &m->states[index];
    fc_status status = FC_OK;
    FC_TRY(collect_groups(m, index));
    FC_TRY(collect_prefetch(m, s->forward_prefetch, s->forward_count, &state->forward_prefetch,
                            &state->forward_prefetch_count));
    FC_TRY(collect_prefetch(m, s->backward_prefetch, s->backward_count, &state->backward_prefetch,
                            &state->backward_prefetch_count));
    if ((size_t)s->root == index) {
        FC_TRY(collect_states(m, index));
        FC_TRY(fc_comm_init_streams(&m->roots[index].comm));
    }
done:
    return status;
}

static fc_status allocate_arrays(fcd_model *m, size_t storages) {
    const fcd_description *d = m->description;
    m->units = (fcd_unit *)calloc(d->unit_count + 1, sizeof *m->units);
    m->states = (fc_state *)calloc(d->state_count + 1, sizeof *m->states);
    m->roots = (fcd_root *)calloc(d->state_count + 1, sizeof *m->roots);
    m->storages = (fcd_storage **)calloc(storages + 1, sizeof *m->storages);
    m->storage_count = storages;
    return m->units != NULL && m->states != NULL && m->roots != NULL && m->storages != NULL
               ? FC_OK
               : FC_ENOMEM;
}

fc_status fcd_model_init(fcd_model *m, const fcd_description *description, size_t storages) {
    const fct_device device = {.type = description->streams ? FCT_DEVICE_CUDA : FCT_DEVICE_CPU,
                               .index = -1};
    fc_status status = FC_OK;
    memset(m, 0, sizeof *m);
    m->description = description;
    FC_TRY(allocate_arrays(m, storages));
    for (size_t i = 0; i < description->state_count; i++) {
        fcd_root *root = &m->roots[description->states[i].root];
        if (root == &m->roots[i]) {
            fc_comm_init(&root->comm, device);
            fc_iteration_init(&root->iteration);
        }
        fc_state_init(&m->states[i], root, &root->iteration, &root->comm);
    }
    m->states_initialized = true;
    for (size_t i = 0; i < description->unit_count; i++) {
        FC_TRY(init_unit(m, i));
    }
    for (size_t i = 0; i < description->state_count; i++) {
        FC_TRY(connect_state(m, i));
    }
done:
    if (status == FC_ENOMEM) {
        (void)fc_error_set(&m->error, status, "out of memory");
    }
    return status;
}

/* ---- fini ---- */

static void fini_param(fcd_param *p) {
    fc_param_fini(&p->core);
    fct_tensor_release(p->unsharded);
    fct_tensor_release(p->post_forward);
    fct_tensor_release(p->grad);
}

void fcd_model_fini(fcd_model *m) {
    const size_t state_count = m->states_initialized ? m->description->state_count : 0;
    fcd_drop_end_callbacks();
    fcd_release_deferred();
    for (size_t i = 0; i < m->unit_count; i++) {
        fc_group_fini(&m->units[i].core);
    }
    for (size_t i = 0; i < state_count; i++) {
        fc_state_fini(&m->states[i]);
    }
    for (size_t i = 0; i < state_count; i++) {
        if ((size_t)m->description->states[i].root == i) {
            fc_comm_fini(&m->roots[i].comm);
            fc_iteration_fini(&m->roots[i].iteration);
        }
    }
    for (size_t i = 0; i < m->unit_count; i++) {
        for (size_t j = 0; j < m->units[i].count; j++) {
            fini_param(&m->units[i].params[j]);
        }
        free(m->units[i].params);
    }
    fcd_release_deferred();
    for (size_t i = 0; m->storages != NULL && i < m->storage_count; i++) {
        fcd_storage_release(m->storages[i]);
    }
    free((void *)m->storages);
    free(m->roots);
    free(m->states);
    free(m->units);
    memset(m, 0, sizeof *m);
}
