/* The ParamGroup type: the core's parameter group as Python sees it. Owns the tuple of Params and
 * the CommContext. The cold side (lazy init, dtypes, state-dict hooks) is the Python subclass in
 * fsdp_c/param_group.py. */
#include "objects.h"

#include <math.h>
#include <string.h>

static fcpy_group *as_group(PyObject *obj) {
    return (fcpy_group *)obj;
}

static int raise_group(fcpy_group *self, fc_status status) {
    return fcpy_raise(
        status, self->core.members.comm != NULL ? self->core.members.comm->error.message : NULL);
}

static PyObject *none_or_raise(fcpy_group *self, fc_status status) {
    if (status != FC_OK) {
        (void)raise_group(self, status);
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
        self->orig_dtype = FCT_NO_DTYPE;
    }
    return (PyObject *)self;
}

/* The Params' core structs, in the tuple's order; NULL with MemoryError. */
static fc_param **core_params(PyObject *tuple) {
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    fc_param **params = (fc_param **)malloc((count > 0 ? count : 1) * sizeof *params);
    if (params == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        params[i] = &((fcpy_param *)PyTuple_GET_ITEM(tuple, (Py_ssize_t)i))->core;
    }
    return params;
}

static fc_link *link_at(fc_members *m, int index) {
    fc_link *const links[FCPY_LINKS] = {&m->shard, &m->scatter, &m->replicate, &m->forward};
    return links[index];
}

/* Points a link to the process group of that name; None: to none. */
static int set_link(fcpy_group *self, int index, PyObject *name, long long world, long long rank) {
    const char *text = NULL;
    if (name != Py_None) {
        text = PyUnicode_AsUTF8(name);
        if (text == NULL) {
            return -1;
        }
    }
    fc_link_set(link_at(&self->core.members, index), text, world, rank);
    Py_INCREF(name);
    Py_XSETREF(self->link_names[index], name);
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
    fct_device parsed;
    if (self->core.members.comm != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a parameter group is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOLLn", keywords, &list,
                                     self->mod->comm_type, &comm, &device, &pg_name, &world, &rank,
                                     &module_count) ||
        fcpy_check_list(list, self->mod->param_type, "params") != 0 ||
        fct_py_device(device, &parsed) != 0) {
        return -1;
    }
    PyObject *copy = PyList_AsTuple(list);
    fc_param **params = copy != NULL ? core_params(copy) : NULL;
    if (params == NULL) {
        Py_XDECREF(copy);
        free((void *)params);
        return -1;
    }
    fc_group_init(&self->core, self, &fcpy_host, &((fcpy_comm *)comm)->core, params,
                  (size_t)PyTuple_GET_SIZE(copy), parsed, world, rank);
    self->core.via = &fcpy_transitions;
    self->core.place.modules = (size_t)module_count;
    self->params = copy;
    Py_INCREF(comm);
    self->comm = comm;
    return set_link(self, 0, pg_name, world, rank);
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

/* params and comm stay until dealloc: the core borrows them. */
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
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    (void)group_clear(obj);
    /* Its Python side went with the dict; no method may run now. */
    self->core.gather.flight.hosted = false;
    if (self->core.via != NULL) {
        fc_group_fini(&self->core);
    }
    Py_CLEAR(self->params);
    Py_CLEAR(self->comm);
    for (int i = 0; i < FCPY_LINKS; i++) {
        Py_CLEAR(self->link_names[i]);
    }
    Py_CLEAR(self->fqn);
    type->tp_free(obj);
    Py_DECREF(type);
}

/* ---- methods ---- */

static PyObject *group_unshard(PyObject *obj, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"async_op", NULL};
    int async_op = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", keywords, &async_op)) {
        return NULL;
    }
    fc_group *g = &as_group(obj)->core;
    return none_or_raise(as_group(obj), fc_group_unshard(g, g->training_state, async_op != 0));
}

/* A method without arguments: one transition of the core. */
#define GROUP_TRANSITION(name, transition)                                                         \
    static PyObject *name(PyObject *obj, PyObject *unused) {                                       \
        (void)unused;                                                                              \
        return none_or_raise(as_group(obj), transition(&as_group(obj)->core));                     \
    }
GROUP_TRANSITION(group_wait, fc_group_wait_unshard)
GROUP_TRANSITION(group_reshard, fc_group_reshard)
GROUP_TRANSITION(group_to_sharded, fc_group_to_sharded)
GROUP_TRANSITION(group_to_unsharded, fc_group_to_unsharded)
GROUP_TRANSITION(group_to_forward, fc_group_to_sharded_post_forward)
GROUP_TRANSITION(group_backward_prefetch, fc_group_backward_prefetch)
GROUP_TRANSITION(group_finalize, fc_group_finalize_backward)
GROUP_TRANSITION(group_reset, fc_group_reset)
GROUP_TRANSITION(group_check, fc_group_check)

static PyObject *group_pre_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &inputs, &kwargs)) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    const int failed = fcpy_group_pre_forward(as_group(obj), &inputs, &kwargs);
    return fcpy_give_pair(failed, inputs, kwargs);
}

static PyObject *group_insert_node(PyObject *obj, PyObject *args) {
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OO", &inputs, &kwargs)) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    const int failed = fcpy_group_insert_node(as_group(obj), &inputs, &kwargs);
    return fcpy_give_pair(failed, inputs, kwargs);
}

static PyObject *group_post_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *input = NULL;
    PyObject *output = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &input, &output)) {
        return NULL;
    }
    fc_status status = fc_group_post_forward(&as_group(obj)->core);
    if (status != FC_OK) {
        (void)raise_group(as_group(obj), status);
        return NULL;
    }
    Py_INCREF(output);
    return output;
}

static PyObject *group_pre_backward(PyObject *obj, PyObject *args) {
    int default_prefetch = 1;
    if (PyTuple_GET_SIZE(args) > 0) {
        default_prefetch = PyObject_IsTrue(PyTuple_GET_ITEM(args, 0));
        if (default_prefetch < 0) {
            return NULL;
        }
    }
    return none_or_raise(as_group(obj),
                         fc_group_pre_backward(&as_group(obj)->core, default_prefetch != 0));
}

static PyObject *group_post_backward(PyObject *obj, PyObject *args) {
    (void)args;
    return none_or_raise(as_group(obj), fc_group_post_backward(&as_group(obj)->core));
}

static PyObject *group_invalidate(PyObject *obj, PyObject *unused) {
    (void)unused;
    fc_group_invalidate(&as_group(obj)->core);
    Py_RETURN_NONE;
}

/* _set_link(kind, name, world, rank) */
static PyObject *group_set_link(PyObject *obj, PyObject *args) {
    static const char *const kinds[FCPY_LINKS] = {"shard", "scatter", "replicate", "forward"};
    const char *kind = NULL;
    PyObject *name = NULL;
    long long world = 0;
    long long rank = 0;
    if (!PyArg_ParseTuple(args, "sOLL", &kind, &name, &world, &rank)) {
        return NULL;
    }
    for (int i = 0; i < FCPY_LINKS; i++) {
        if (strcmp(kind, kinds[i]) == 0) {
            if (set_link(as_group(obj), i, name, world, rank) != 0) {
                return NULL;
            }
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "no such link: '%s'", kind);
}

/* _set_unit(unit, index, siblings) */
static PyObject *group_set_unit(PyObject *obj, PyObject *args) {
    fc_group *g = &as_group(obj)->core;
    PyObject *unit = NULL;
    Py_ssize_t index = 0;
    Py_ssize_t siblings = 1;
    if (!PyArg_ParseTuple(args, "O!nn", as_group(obj)->mod->state_type, &unit, &index, &siblings)) {
        return NULL;
    }
    if (index < 0 || index >= siblings) {
        PyErr_SetString(PyExc_ValueError, "the index must be below the number of groups");
        return NULL;
    }
    Py_INCREF(unit);
    Py_XSETREF(as_group(obj)->unit, unit);
    g->place.unit = unit;
    g->place.index = (size_t)index;
    g->place.siblings = (size_t)siblings;
    Py_RETURN_NONE;
}

static PyMethodDef group_methods[] = {
    {"_set_link", group_set_link, METH_VARARGS,
     "_set_link(kind, name, world, rank): the process group for 'shard', 'scatter', 'replicate' or "
     "'forward' collectives; name None: none."},
    {"_set_unit", group_set_unit, METH_VARARGS,
     "_set_unit(unit, index, siblings): which of the groups of one fully_shard call this is."},
    {"unshard", (PyCFunction)(void (*)(void))group_unshard, METH_VARARGS | METH_KEYWORDS,
     "unshard(async_op=False): starts the all-gather unless one is in flight or the group is "
     "unsharded already."},
    {"wait_for_unshard", group_wait, METH_NOARGS,
     "Waits for unshard() and registers the unsharded parameters."},
    {"reshard", group_reshard, METH_NOARGS,
     "Registers the sharded parameters and frees the unsharded ones."},
    {"_to_sharded", group_to_sharded, METH_NOARGS, "reshard() whatever the training state."},
    {"_to_unsharded", group_to_unsharded, METH_NOARGS,
     "Registers the unsharded parameters, which the caller has gathered."},
    {"_to_sharded_post_forward", group_to_forward, METH_NOARGS,
     "Keeps and registers the shards of the smaller group."},
    {"pre_forward", group_pre_forward, METH_VARARGS,
     "pre_forward(module, args, kwargs) -> (args, kwargs): unshards and inserts the post-backward "
     "node."},
    {"post_forward", group_post_forward, METH_VARARGS,
     "post_forward(module, input, output) -> output: reshards and notes the order."},
    {"_register_post_backward_hook", group_insert_node, METH_VARARGS,
     "_register_post_backward_hook(args, kwargs) -> (args, kwargs): with the post-backward node "
     "above the tensors that require grad."},
    {"_backward_prefetch", group_backward_prefetch, METH_NOARGS,
     "Unshards what backward is expected to reach next."},
    {"pre_backward", group_pre_backward, METH_VARARGS,
     "pre_backward(default_prefetch): unshards for backward."},
    {"post_backward", group_post_backward, METH_VARARGS,
     "Collects gradients, reshards and reduces; idempotent."},
    {"finalize_backward", group_finalize, METH_NOARGS,
     "Waits for reductions and drops an unused all-gather."},
    {"_reset_iter_state", group_reset, METH_NOARGS,
     "Back to sharded and idle, without partial gradients."},
    {"_invalidate", group_invalidate, METH_NOARGS,
     "The transfer plan is built anew at the next unshard."},
    {"_check", group_check, METH_NOARGS,
     "Raises RuntimeError where an invariant does not hold (tests)."},
    {NULL, NULL, 0, NULL},
};

/* ---- attributes ---- */

static PyObject *get_flag(PyObject *obj, void *closure) {
    return PyBool_FromLong(*(bool *)((char *)obj + (size_t)(uintptr_t)closure));
}

static int set_flag(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_set_bool(value, (bool *)((char *)obj + (size_t)(uintptr_t)closure));
}

static PyObject *get_dtype(PyObject *obj, void *closure) {
    return fcpy_get_dtype(*(fct_dtype *)(void *)((char *)obj + (size_t)(uintptr_t)closure));
}

static int set_dtype(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_set_dtype(value, (fct_dtype *)(void *)((char *)obj + (size_t)(uintptr_t)closure));
}

static PyObject *get_params(PyObject *obj, void *closure) {
    (void)closure;
    PyObject *params = as_group(obj)->params;
    return params != NULL ? PySequence_List(params) : PyList_New(0);
}

static PyObject *get_comm(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_or_none(as_group(obj)->comm);
}

static int set_comm(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_group *self = as_group(obj);
    if (value == NULL || !PyObject_TypeCheck(value, self->mod->comm_type)) {
        PyErr_SetString(PyExc_TypeError, "comm_ctx must be a fsdp_c CommContext");
        return -1;
    }
    fc_status status = fc_group_set_comm(&self->core, &((fcpy_comm *)value)->core);
    if (status != FC_OK) {
        return raise_group(self, status);
    }
    Py_INCREF(value);
    Py_XSETREF(self->comm, value);
    return 0;
}

static PyObject *get_training(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_training_state(as_group(obj)->mod, as_group(obj)->core.training_state);
}

static int set_training(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    return fcpy_parse_training_state(as_group(obj)->mod, value,
                                     &as_group(obj)->core.training_state);
}

static PyObject *get_sharded(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_sharded_state(as_group(obj)->mod, as_group(obj)->core.sharded_state);
}

static PyObject *is_state(PyObject *obj, void *closure) {
    return PyBool_FromLong((uintptr_t)as_group(obj)->core.sharded_state == (uintptr_t)closure);
}

static PyObject *get_divide_factor(PyObject *obj, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    if (!g->reducer.has_divide_factor) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(g->reducer.divide_factor);
}

static int set_divide_factor(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fc_group *g = &as_group(obj)->core;
    if (value == NULL || value == Py_None) {
        g->reducer.has_divide_factor = false;
        return 0;
    }
    double factor = PyFloat_AsDouble(value);
    if (factor == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!(factor > 0.0) || isinf(factor)) {
        PyErr_Format(PyExc_ValueError,
                     "the gradient divide factor must be positive and finite, got %R", value);
        return -1;
    }
    g->reducer.divide_factor = factor;
    g->reducer.has_divide_factor = true;
    return 0;
}

static PyObject *get_fqn(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_or_none(as_group(obj)->fqn);
}

static int set_fqn(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_group *self = as_group(obj);
    const char *text = NULL;
    if (value != NULL && value != Py_None) {
        text = PyUnicode_AsUTF8(value);
        if (text == NULL) {
            return -1;
        }
        Py_INCREF(value);
    } else {
        value = NULL;
    }
    Py_XSETREF(self->fqn, value);
    self->core.members.name = text;
    return 0;
}

static PyObject *get_pending(PyObject *obj, void *closure) {
    (void)closure;
    if (as_group(obj)->core.gather.flight.active) {
        Py_RETURN_TRUE;
    }
    Py_RETURN_NONE;
}

static PyObject *get_positions(PyObject *obj, void *closure) {
    (void)closure;
    const fc_positions *positions = &as_group(obj)->core.positions;
    PyObject *list = PyList_New((Py_ssize_t)positions->count);
    for (size_t i = 0; list != NULL && i < positions->count; i++) {
        PyObject *number = PyLong_FromSize_t(positions->items[i]);
        if (number == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, number);
    }
    return list;
}

static PyObject *get_size(PyObject *obj, void *closure) {
    return PyLong_FromSize_t(*(size_t *)(void *)((char *)obj + (size_t)(uintptr_t)closure));
}

static PyObject *get_partial(PyObject *obj, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    for (size_t i = 0; i < g->members.count; i++) {
        if (g->members.params[i]->partial != NULL) {
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_NONE;
}

/* Only dropped. */
static int set_partial(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    if (value != Py_None) {
        PyErr_SetString(PyExc_TypeError, "_partial_reduce_output can only be set to None");
        return -1;
    }
    for (size_t i = 0; i < g->members.count; i++) {
        fc_param_set_partial(g->members.params[i], NULL);
    }
    return 0;
}

static int set_keep_storage(PyObject *obj, PyObject *value, void *closure) {
    bool keep = false;
    (void)closure;
    if (fcpy_set_bool(value, &keep) != 0) {
        return -1;
    }
    fc_group_set_keep_storage(&as_group(obj)->core, keep);
    return 0;
}

#define GROUP_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_group, core.field))
#define GROUP_FLAG(name, field, doc) {name, get_flag, set_flag, doc, GROUP_OFFSET(field)}

static PyGetSetDef group_getset[] = {
    {"fsdp_params", get_params, NULL, "List of the group's Params (a copy).", NULL},
    {"comm_ctx", get_comm, set_comm, "The CommContext shared under one root.", NULL},
    {"_training_state", get_training, set_training, "TrainingState of the group.", NULL},
    {"_sharded_state", get_sharded, NULL, "ShardedState of the group.", NULL},
    {"is_sharded", is_state, NULL, "Whether the sharded parameters are registered.",
     (void *)FC_SHARDED},
    {"is_sharded_post_forward", is_state, NULL, "Whether resharded to a smaller mesh.",
     (void *)FC_SHARDED_POST_FORWARD},
    {"is_unsharded", is_state, NULL, "Whether the unsharded parameters are registered.",
     (void *)FC_UNSHARDED},
    {"gradient_divide_factor", get_divide_factor, set_divide_factor,
     "Divisor of the sum of gradients; None: mean.", NULL},
    {"_module_fqn", get_fqn, set_fqn,
     "Names of the group's modules from the root, after lazy init.", NULL},
    {"_all_gather_result", get_pending, NULL, "True while an all-gather is in flight, else None.",
     NULL},
    {"_post_forward_indices", get_positions, NULL, "Positions in the post-forward order (a copy).",
     NULL},
    {"_orig_dtype", get_dtype, set_dtype, "dtype of the trainable parameters, or None.",
     (void *)offsetof(fcpy_group, orig_dtype)},
    {"_reduce_dtype", get_dtype, set_dtype, "dtype gradients are reduced in, or None.",
     GROUP_OFFSET(reducer.reduce_dtype)},
    GROUP_FLAG("reduce_grads", settings.reduce_grads, "Whether backward reduces gradients."),
    GROUP_FLAG("all_reduce_grads", reducer.all_reduce_grads,
               "HSDP only: whether backward all-reduces."),
    GROUP_FLAG("_reshard_after_forward", settings.reshard_after_forward,
               "Whether forward ends sharded."),
    GROUP_FLAG("reshard_after_backward", settings.reshard_after_backward,
               "Whether backward ends sharded."),
    GROUP_FLAG("unshard_async_op", settings.unshard_async_op,
               "Whether hooks unshard on the current stream."),
    GROUP_FLAG("unshard_in_backward", settings.unshard_in_backward,
               "Whether backward needs the parameters."),
    GROUP_FLAG("force_sum_reduction_for_comms", reducer.force_sum,
               "Reduce with SUM only and divide separately."),
    GROUP_FLAG("reduce_scatter_unused_params", reducer.reduce_unused,
               "Reduce zeros for parameters without gradient."),
    {"_keep_unsharded_storage", get_flag, set_keep_storage,
     "Whether resharding leaves the unsharded memory.", GROUP_OFFSET(gather.keep_storage)},
    {"_deferred", get_flag, NULL, "Whether a backward has left gradients for a later reduction.",
     GROUP_OFFSET(deferred)},
    {"_hosted_gather", get_flag, set_flag, "Whether _host_gather() gathers.",
     (void *)offsetof(fcpy_group, hosted_gather)},
    {"_hosted_reduce", get_flag, set_flag, "Whether _host_reduce() reduces.",
     (void *)offsetof(fcpy_group, hosted_reduce)},
    GROUP_FLAG("_has_reduce_hook", reducer.has_hook, "Whether _run_reduce_hook() is called."),
    {"_bucket_bytes", fcpy_group_get_bucket_bytes, fcpy_group_set_bucket_bytes,
     "Bytes of gradients at which a bucket is full; 0: all are reduced at once.", NULL},
    {"_buckets", fcpy_group_get_buckets, NULL,
     "List of (first, end) of fsdp_params, in the order in which they are reduced.", NULL},
    {"_param_group_index", get_size, NULL, "Which of its unit's groups this is.",
     GROUP_OFFSET(place.index)},
    {"_num_param_groups", get_size, NULL, "How many groups its unit has.",
     GROUP_OFFSET(place.siblings)},
    {"_partial_reduce_output", get_partial, set_partial,
     "True while gradients were reduce-scattered but not all-reduced, else None; None drops them.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
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
    {Py_tp_getset, group_getset},
    {Py_tp_methods, group_methods},
    {Py_tp_members, group_members},
    {Py_tp_doc, "ParamGroup(params, comm_ctx, device, pg_name, world, rank, module_count): "
                "parameters that are "
                "gathered and reduced together."},
    {0, NULL},
};

PyType_Spec fcpy_group_spec = {
    .name = "fsdp_c._C.ParamGroup",
    .basicsize = sizeof(fcpy_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = group_slots,
};
