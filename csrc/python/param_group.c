/* The ParamGroup type: wraps the core's parameter group. Owns the tuple of Params and a
 * reference to the CommContext. Code that does not run in every step (lazy init, dtypes, state-dict
 * hooks) is in the Python subclass in fsdp_c/_runtime/param_group.py. */
#include "param_group.h"

#include "../bridge/pyobject.h"
#include "attributes.h"
#include "callbacks.h"
#include "check_initialized.h"
#include "deferred_decref.h"
#include "group_attributes.h"
#include "step.h"
#include "transitions.h"
#include "tree.h"

#include <string.h>

static fcpy_group *as_group(PyObject *obj) {
    return (fcpy_group *)obj;
}

/* Runs one transition of an initialized group. Returns None, or NULL with an exception. */
static PyObject *run_transition(PyObject *obj, fc_status (*transition)(fc_group *g)) {
    fcpy_group *self = as_group(obj);
    if (!fcpy_group_check_initialized(self)) {
        return NULL;
    }
    fcpy_group_refresh(self);
    fcpy_calls_enter(self->mod);
    const int failed = fcpy_group_check_status(self, transition(&self->core));
    fcpy_calls_leave(self->mod);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- life ---- */

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL) {
        return NULL;
    }
    fcpy_group *self = (fcpy_group *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->mod = mod;
        self->core.sharded_state = FC_SHARDED;
        self->core.training_state = FC_IDLE;
        self->core.base.reduce_dtype = FCT_NO_DTYPE;
        self->orig_dtype = FCT_NO_DTYPE;
    }
    return (PyObject *)self;
}

/* Marks the first `count` Params of the tuple as members of no group. */
static void unmark_params(PyObject *params, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        ((fcpy_param *)PyTuple_GET_ITEM(params, i))->grouped = false;
    }
}

/* Marks the Params as members of a group. Each Param must be initialized and in no group, because
 * its core struct stores its bucket in one group. On failure returns -1 with ValueError and marks
 * no Param. */
static int mark_params(PyObject *params) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++) {
        fcpy_param *param = (fcpy_param *)PyTuple_GET_ITEM(params, i);
        if (param->core.owner == NULL || param->grouped) {
            PyErr_Format(PyExc_ValueError, "parameter %zd of the group %s", i,
                         param->grouped ? "is in a group already" : "is not initialized");
            unmark_params(params, i);
            return -1;
        }
        param->grouped = true;
    }
    return 0;
}

static fc_process_group *process_group_at(fc_group_base *m, int index) {
    fc_process_group *const groups[FCPY_PROCESS_GROUPS] = {&m->shard, &m->scatter, &m->replicate,
                                                           &m->post_forward};
    return groups[index];
}

/* Checks the world and rank of a process group against the shards of the parameters: the layouts of
 * buffers and parameters must have the same world. */
static int check_process_group(PyObject *params, int index, PyObject *name, long long world,
                               long long rank) {
    bool is_valid = world >= 1 && rank >= 0 && rank < world;
    is_valid = is_valid && (name != Py_None || world == 1 || index != FCPY_PG_SHARD);
    const bool sharded = index == FCPY_PG_SHARD || name != Py_None;
    for (Py_ssize_t i = 0; index != FCPY_PG_REPLICATE && sharded && i < PyTuple_GET_SIZE(params);
         i++) {
        const fc_param *p = &((fcpy_param *)PyTuple_GET_ITEM(params, i))->core;
        const fc_layout *layout =
            index == FCPY_PG_POST_FORWARD ? &p->post_forward_layout : &p->layout;
        is_valid = is_valid && layout->world == world && layout->rank == rank;
    }
    if (!is_valid) {
        PyErr_Format(PyExc_ValueError,
                     "the parameters are not sharded for rank %lld of %lld in process group %R",
                     rank, world, name);
    }
    return is_valid ? 0 : -1;
}

/* Marks the Params as members of the group, and runs check_process_group. On failure returns -1
 * with an exception and marks no Param. */
static int claim_params(PyObject *params, PyObject *pg_name, long long world, long long rank) {
    if (mark_params(params) != 0) {
        return -1;
    }
    if (check_process_group(params, FCPY_PG_SHARD, pg_name, world, rank) != 0) {
        unmark_params(params, PyTuple_GET_SIZE(params));
        return -1;
    }
    return 0;
}

/* Sets the process group at `index` to `group`, or to the process group named `name` if `group` is
 * None. If both are None, the group has no process group at this index. */
static int set_process_group(fcpy_group *self, int index, PyObject *name, long long world,
                             long long rank, PyObject *group) {
    const char *text = name != Py_None ? PyUnicode_AsUTF8(name) : NULL;
    if (name != Py_None && text == NULL) {
        return -1;
    }
    fct_pg *handle = NULL;
    if (group != Py_None && fct_py_pg(group, &handle) != 0) {
        return -1;
    }
    fc_process_group *pg = process_group_at(&self->core.base, index);
    fc_process_group_set(pg, text, world, rank);
    pg->handle = handle; /* NULL: resolved by its name at first use */
    fcpy_replace(self->mod, &self->pg_names[index], name);
    return 0;
}

static int group_init(PyObject *obj, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"params", "comm_ctx", "device",       "pg_name",
                               "world",  "rank",     "module_count", NULL};
    fcpy_group *self = as_group(obj);
    PyObject *list = NULL;
    PyObject *comm = NULL;
    PyObject *device = NULL;
    PyObject *pg_name = NULL;
    long long world = 0;
    long long rank = 0;
    Py_ssize_t module_count = 1;
    fct_device torch_device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOLLn", keywords, &list,
                                     self->mod->comm_type, &comm, &device, &pg_name, &world, &rank,
                                     &module_count) ||
        fct_py_device(device, &torch_device) != 0 ||
        fcpy_group_check_device(&((fcpy_comm *)comm)->core, torch_device) != 0) {
        return -1;
    }
    PyObject *tuple = fcpy_tuple_of(list, self->mod->param_type, "params");
    void *params = tuple != NULL ? fcpy_core_array(tuple, offsetof(fcpy_param, core)) : NULL;
    /* Read after the arguments are parsed, because parsing may run code. */
    const bool uninitialized = self->core.base.callbacks == NULL;
    if (params != NULL && !uninitialized) {
        PyErr_SetString(PyExc_RuntimeError, "ParamGroup is already initialized");
    }
    if (params == NULL || !uninitialized ||
        (pg_name != Py_None && PyUnicode_AsUTF8(pg_name) == NULL) ||
        claim_params(tuple, pg_name, world, rank) != 0) {
        Py_XDECREF(tuple);
        free(params);
        return -1;
    }
    fc_group_init(&self->core, self, &fcpy_callbacks, &((fcpy_comm *)comm)->core,
                  (fc_param **)params, (size_t)PyTuple_GET_SIZE(tuple), torch_device, world, rank);
    self->core.place.modules = (size_t)module_count;
    self->params = tuple;
    self->comm = Py_NewRef(comm);
    return set_process_group(self, FCPY_PG_SHARD, pg_name, world, rank, Py_None);
}

static int group_traverse(PyObject *obj, visitproc visit, void *arg) {
    fcpy_group *self = as_group(obj);
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(self->params);
    Py_VISIT(self->comm);
    Py_VISIT(self->unit);
    Py_VISIT(self->dict);
    return 0;
}

/* params and comm stay until dealloc, because the core borrows them. */
static int group_clear(PyObject *obj) {
    as_group(obj)->core.place.unit = NULL;
    Py_CLEAR(as_group(obj)->unit);
    Py_CLEAR(as_group(obj)->dict);
    return 0;
}

static void group_dealloc(PyObject *obj) {
    fcpy_group *self = as_group(obj);
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    /* Frees the core's state first, because the code that ClearWeakRefs and the decrefs below run
     * must not find an initialized group. */
    self->core.gather.pending.uses_fallback = false;
    fc_group_fini(&self->core);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    (void)group_clear(obj);
    if (self->params != NULL) {
        unmark_params(self->params, PyTuple_GET_SIZE(self->params));
    }
    Py_CLEAR(self->params);
    Py_CLEAR(self->comm);
    for (int i = 0; i < FCPY_PROCESS_GROUPS; i++) {
        Py_CLEAR(self->pg_names[i]);
    }
    Py_CLEAR(self->fqn);
    type->tp_free(obj);
    Py_DECREF(type);
}

/* ---- methods ---- */

static fc_status unshard(fc_group *g) {
    return fc_group_unshard(g, g->training_state, false);
}

static fc_status unshard_async(fc_group *g) {
    return fc_group_unshard(g, g->training_state, true);
}

static PyObject *group_unshard(PyObject *obj, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"async_op", NULL};
    int async_op = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", keywords, &async_op)) {
        return NULL;
    }
    return run_transition(obj, async_op ? unshard_async : unshard);
}

/* Defines a method without arguments that runs one transition of the core. */
#define GROUP_TRANSITION(name, transition)                                                         \
    static PyObject *name(PyObject *obj, PyObject *unused) {                                       \
        (void)unused;                                                                              \
        return run_transition(obj, transition);                                                    \
    }
GROUP_TRANSITION(group_wait, fc_group_wait_unshard)
GROUP_TRANSITION(group_reshard, fc_group_reshard)
GROUP_TRANSITION(group_to_sharded, fc_group_to_sharded)
GROUP_TRANSITION(group_to_unsharded, fc_group_to_unsharded)
GROUP_TRANSITION(group_to_post_forward, fc_group_to_sharded_post_forward)
GROUP_TRANSITION(group_reset, fc_group_reset)
GROUP_TRANSITION(group_complete, fc_group_complete_reductions)
GROUP_TRANSITION(group_check, fc_group_check)

static PyObject *group_pre_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &inputs, &kwargs) ||
        !fcpy_group_check_initialized(as_group(obj))) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    fcpy_group_refresh(as_group(obj));
    fcpy_calls_enter(as_group(obj)->mod);
    const int failed = fcpy_group_pre_forward(as_group(obj), &inputs, &kwargs);
    fcpy_calls_leave(as_group(obj)->mod);
    return fcpy_pack_pair(failed, inputs, kwargs);
}

static PyObject *group_insert_node(PyObject *obj, PyObject *args) {
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OO", &inputs, &kwargs) ||
        !fcpy_group_check_initialized(as_group(obj))) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    fcpy_group_refresh(as_group(obj));
    const int failed = fcpy_group_insert_node(as_group(obj), &inputs, &kwargs);
    return fcpy_pack_pair(failed, inputs, kwargs);
}

static PyObject *group_post_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *input = NULL;
    PyObject *output = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &input, &output)) {
        return NULL;
    }
    PyObject *none = run_transition(obj, fc_group_post_forward);
    if (none == NULL) {
        return NULL;
    }
    Py_DECREF(none);
    return Py_NewRef(output);
}

/* Also refreshes the groups that backward prefetches. */
static fc_status pre_backward(fc_group *g) {
    fcpy_group_refresh_targets((fcpy_group *)g->base.owner);
    return fc_group_pre_backward(g, true);
}

static fc_status pre_backward_without_prefetch(fc_group *g) {
    return fc_group_pre_backward(g, false);
}

static PyObject *group_pre_backward(PyObject *obj, PyObject *args) {
    int default_prefetch = 1;
    if (PyTuple_GET_SIZE(args) > 0) {
        default_prefetch = PyObject_IsTrue(PyTuple_GET_ITEM(args, 0));
        if (default_prefetch < 0) {
            return NULL;
        }
    }
    const fcpy_group *self = as_group(obj);
    const bool can_run =
        self->core.base.shard.world == 1
            ? fcpy_group_check_param_attribute(self, "param_dtype")
            : fcpy_group_check_context_attribute(self, "all_gather_copy_in_stream");
    return can_run ? run_transition(obj,
                                    default_prefetch ? pre_backward : pre_backward_without_prefetch)
                   : NULL;
}

static fc_status backward_prefetch(fc_group *g) {
    fcpy_group_refresh_targets((fcpy_group *)g->base.owner);
    return fc_group_backward_prefetch(g);
}

GROUP_TRANSITION(group_backward_prefetch, backward_prefetch)

/* Outside of a backward, no end-of-backward callback follows that would complete the reductions.
 * The method then completes them before it returns. */
static fc_status complete_outside_backward(fc_group *g, fc_status status) {
    return status == FC_OK && !fct_in_backward() ? fc_group_complete_reductions(g) : status;
}

static fc_status post_backward(fc_group *g) {
    return complete_outside_backward(g, fc_group_post_backward(g));
}

static fc_status finalize_backward(fc_group *g) {
    return complete_outside_backward(g, fc_group_finalize_backward(g));
}

static PyObject *group_post_backward(PyObject *obj, PyObject *args) {
    (void)args;
    const fcpy_group *self = as_group(obj);
    const bool can_run =
        self->core.settings.reduce_grads
            ? fcpy_group_check_context_attribute(self, "reduce_scatter_max_input_buffers")
            : fcpy_group_check_param_attribute(self, "reduce_dtype");
    return can_run ? run_transition(obj, post_backward) : NULL;
}

static PyObject *group_finalize(PyObject *obj, PyObject *unused) {
    (void)unused;
    return fcpy_group_check_context_attribute(as_group(obj), "_last_post_reduce_events")
               ? run_transition(obj, finalize_backward)
               : NULL;
}

static PyObject *group_invalidate(PyObject *obj, PyObject *unused) {
    (void)unused;
    fc_group_invalidate(&as_group(obj)->core);
    Py_RETURN_NONE;
}

static PyObject *group_drop_sharded_grads(PyObject *obj, PyObject *unused) {
    fcpy_group *self = as_group(obj);
    (void)unused;
    if (!fcpy_group_check_initialized(self)) {
        return NULL;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(self->params); i++) {
        fcpy_param *param = (fcpy_param *)PyTuple_GET_ITEM(self->params, i);
        PyObject *sharded = Py_XNewRef(param->sharded_param);
        if (sharded != NULL) {
            status = PyObject_SetAttr(sharded, self->mod->names.grad, Py_None);
            Py_DECREF(sharded);
        }
    }
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

/* Counts the group as a user of a process group, except for the process group of reduce-scatters:
 * gathers precede reduce-scatters, and count the group for their process group. Python sets all
 * process groups of a new group, so the constructor counts none. A process group that is set again
 * is counted again, because it may be a new one of the same name. */
static int register_user(int index, PyObject *name) {
    return index == FCPY_PG_SCATTER || name == Py_None
               ? 0
               : fct_pg_register_user(PyUnicode_AsUTF8(name));
}

/* _set_process_group(kind, name, world, rank, group=None) */
static PyObject *group_set_process_group(PyObject *obj, PyObject *args) {
    static const char *const kinds[FCPY_PROCESS_GROUPS] = {"shard", "scatter", "replicate",
                                                           "post_forward"};
    const char *kind = NULL;
    PyObject *name = NULL;
    long long world = 0;
    long long rank = 0;
    PyObject *group = Py_None;
    if (!PyArg_ParseTuple(args, "sOLL|O", &kind, &name, &world, &rank, &group) ||
        !fcpy_group_check_initialized(as_group(obj))) {
        return NULL;
    }
    for (int i = 0; i < FCPY_PROCESS_GROUPS; i++) {
        if (strcmp(kind, kinds[i]) == 0) {
            if (check_process_group(as_group(obj)->params, i, name, world, rank) != 0 ||
                set_process_group(as_group(obj), i, name, world, rank, group) != 0 ||
                register_user(i, name) != 0) {
                return NULL;
            }
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError,
                        "_set_process_group expects 'shard', 'scatter', 'replicate' or "
                        "'post_forward', got '%s'",
                        kind);
}

/* _set_plans(shard, scatter, replicate, post_forward, root, checksums) */
static PyObject *group_set_plans(PyObject *obj, PyObject *args) {
    unsigned long long plans[FCPY_PROCESS_GROUPS] = {0};
    unsigned long long root = 0;
    int checksums = 0;
    if (!fcpy_group_check_initialized(as_group(obj)) ||
        !PyArg_ParseTuple(args, "KKKKKp", &plans[0], &plans[1], &plans[2], &plans[3], &root,
                          &checksums)) {
        return NULL;
    }
    fc_comm_ctx *comm = as_group(obj)->core.base.comm;
    if (comm != NULL) {
        comm->checksums = checksums != 0;
    }
    for (int i = 0; i < FCPY_PROCESS_GROUPS; i++) {
        fc_process_group_set_plan(process_group_at(&as_group(obj)->core.base, i), plans[i], root);
    }
    Py_RETURN_NONE;
}

/* _set_memory(gather, reduce) */
static PyObject *group_set_memory(PyObject *obj, PyObject *args) {
    PyObject *sources[2] = {NULL, NULL};
    fct_allocator *allocators[2] = {NULL, NULL};
    if (!fcpy_group_check_initialized(as_group(obj)) ||
        !PyArg_ParseTuple(args, "OO", &sources[0], &sources[1])) {
        return NULL;
    }
    for (int i = 0; i < 2; i++) {
        const char *name = NULL;
        PyObject *group = NULL;
        if (sources[i] == Py_None) {
            continue;
        }
        const bool is_pair = PyTuple_Check(sources[i]);
        if (!is_pair) {
            PyErr_Format(PyExc_TypeError, "expected (name, source) or None, got %R", sources[i]);
        }
        if (!is_pair || !PyArg_ParseTuple(sources[i], "sO", &name, &group) ||
            fct_py_allocator(name, group, &allocators[i]) != 0) {
            fct_allocator_free(allocators[0]);
            return NULL;
        }
    }
    fc_group_base_set_memory(&as_group(obj)->core.base, allocators[0], allocators[1]);
    Py_RETURN_NONE;
}

/* _set_unit(state, index, siblings) */
static PyObject *group_set_unit(PyObject *obj, PyObject *args) {
    fc_group *g = &as_group(obj)->core;
    PyObject *state = NULL;
    Py_ssize_t index = 0;
    Py_ssize_t siblings = 1;
    if (!PyArg_ParseTuple(args, "O!nn", as_group(obj)->mod->state_type, &state, &index,
                          &siblings) ||
        !fcpy_group_check_initialized(as_group(obj))) {
        return NULL;
    }
    if (index < 0 || index >= siblings) {
        PyErr_SetString(PyExc_ValueError, "_set_unit: the index must be at least 0 and below the "
                                          "number of groups");
        return NULL;
    }
    PyObject *reference = PyWeakref_NewRef(state, NULL);
    if (reference == NULL) {
        return NULL;
    }
    Py_XSETREF(as_group(obj)->unit, reference);
    /* A state has one weak reference without a callback, so all groups of the unit have the same
     * one. No other state gets its address, because the groups own it. */
    g->place.unit = reference;
    g->place.index = (size_t)index;
    g->place.siblings = (size_t)siblings;
    Py_RETURN_NONE;
}

static PyMethodDef group_methods[] = {
    {"_set_plans", group_set_plans, METH_VARARGS,
     "_set_plans(shard, scatter, replicate, post_forward, root, checksums): sets the hash of the "
     "root's plan for each process group. The next collective over a process group compares the "
     "hash across ranks. 0: no comparison, 1: the root is unknown. `root` identifies the root on "
     "this rank. `checksums`: the ranks compare checksums of data."},
    {"_set_process_group", group_set_process_group, METH_VARARGS,
     "_set_process_group(kind, name, world, rank, group=None): sets the process group for 'shard', "
     "'scatter', 'replicate' or 'post_forward' collectives. If group is None, it is looked up by "
     "name. If name is None too, the group has no process group for them."},
    {"_set_memory", group_set_memory, METH_VARARGS,
     "_set_memory(gather, reduce): sets the allocators of the buffers of all-gathers and of "
     "reduce-scatters: (name, source), or None for torch's allocator. The source is a process "
     "group, or an object of torch that allocates."},
    {"_set_unit", group_set_unit, METH_VARARGS,
     "_set_unit(state, index, siblings): sets the State of the fully_shard call, and the group's "
     "index among the groups of that State."},
    {"unshard", (PyCFunction)(void (*)(void))group_unshard, METH_VARARGS | METH_KEYWORDS,
     "unshard(async_op=False): starts the all-gather, unless an all-gather is in flight or the "
     "group is unsharded. Shards that changed between steps are gathered again."},
    {"reshard", group_reshard, METH_NOARGS,
     "Registers the sharded parameters and frees the unsharded ones."},
    {"_to_sharded", group_to_sharded, METH_NOARGS, "reshard() in any training state."},
    {"_to_unsharded", group_to_unsharded, METH_NOARGS,
     "Registers the unsharded parameters, which the caller has gathered."},
    {"_to_sharded_post_forward", group_to_post_forward, METH_NOARGS,
     "Registers the parameters of the smaller mesh and keeps their data."},
    {"post_forward", group_post_forward, METH_VARARGS,
     "post_forward(module, input, output) -> output: reshards and records the group in the "
     "post-forward order."},
    {"_register_post_backward_hook", group_insert_node, METH_VARARGS,
     "_register_post_backward_hook(args, kwargs) -> (args, kwargs): passes the tensors that "
     "require grad through the post-backward node."},
    {"finalize_backward", group_finalize, METH_NOARGS,
     "Waits for reductions and drops an unused all-gather."},
    {"_reset_iter_state", group_reset, METH_NOARGS,
     "Resets the group to sharded and idle, and drops partial gradients."},
    {"_invalidate", group_invalidate, METH_NOARGS,
     "Marks the gather plan and the buckets as stale. The next unshard makes a new plan, and the "
     "next forward new buckets."},
    {"_drop_sharded_grads", group_drop_sharded_grads, METH_NOARGS,
     "Sets grad of the sharded parameters to None."},
    {"_check", group_check, METH_NOARGS,
     "Raises RuntimeError if an invariant is violated (for tests)."},
    /* ---- names of torch's private interface; fsdp_c calls these only if overridden ---- */
    {"_wait_for_post_backward", group_complete, METH_NOARGS,
     "Completes the reductions in flight. The current stream waits for them."},
    {"wait_for_unshard", group_wait, METH_NOARGS,
     "Waits for unshard() and registers the unsharded parameters."},
    {"pre_forward", group_pre_forward, METH_VARARGS,
     "pre_forward(module, args, kwargs) -> (args, kwargs): unshards, and passes the tensors that "
     "require grad through the post-backward node."},
    {"_backward_prefetch", group_backward_prefetch, METH_NOARGS,
     "Unshards the group that backward is expected to reach next."},
    {"pre_backward", group_pre_backward, METH_VARARGS,
     "pre_backward(default_prefetch): unshards for backward."},
    {"post_backward", group_post_backward, METH_VARARGS,
     "Collects gradients, reshards and reduces; idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef group_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_group, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_group, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, (void *)group_new},
    {Py_tp_init, (void *)group_init},
    {Py_tp_dealloc, (void *)group_dealloc},
    {Py_tp_traverse, (void *)group_traverse},
    {Py_tp_clear, (void *)group_clear},
    {Py_tp_getset, fcpy_group_getset},
    {Py_tp_methods, group_methods},
    {Py_tp_members, group_members},
    {Py_tp_doc, "ParamGroup(params, comm_ctx, device, pg_name, world, rank, module_count): "
                "parameters that are gathered and reduced together."},
    {0, NULL},
};

PyType_Spec fcpy_group_spec = {
    .name = "fsdp_c._C.ParamGroup",
    .basicsize = sizeof(fcpy_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = group_slots,
};
