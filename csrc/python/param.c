/* The Param type: one parameter. callbacks.c has the functions that the core calls for it.
 *
 * Owns the sharded parameter (a DTensor nn.Parameter), the unsharded nn.Parameter, the sharding
 * spec and the module slots. Most code that does not run in every step (sharding, DTensor specs,
 * reloading) is in Python: in the subclass in fsdp_c/_runtime/param.py and in its bases in
 * param_shard.py and replaced_shard.py. */
#include "param.h"

#include "../bridge/pyobject.h"
#include "../core/bucket.h"
#include "attributes.h"
#include "deferred_decref.h"
#include "errors.h"
#include "extension.h"
#include "shard.h"
#include "slots.h"

/* ---- life ---- */

static PyObject *param_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL) {
        return NULL;
    }
    (void)args;
    (void)kwargs;
    fcpy_param *self = (fcpy_param *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->mod = mod;
        self->core.orig_dtype = self->core.param_dtype = self->core.reduce_dtype =
            self->core.grad_dtype = self->core.sharded_grad_dtype = FCT_NO_DTYPE;
    }
    return (PyObject *)self;
}

/* Stores a sequence of integers in `shape`. Returns its length, or -1 with an exception. */
static int parse_sizes(PyObject *sizes, int64_t shape[64]) {
    PyObject *items = PySequence_Tuple(sizes); /* __index__ of an item may change a list */
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < ndim && ndim <= 64 && !PyErr_Occurred(); i++) {
        shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(items, i));
    }
    Py_DECREF(items);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (ndim > 64) {
        PyErr_SetString(PyExc_ValueError, "a tensor has at most 64 dimensions");
        return -1;
    }
    return (int)ndim;
}

/* Param(sizes, dim, world, rank, post_forward=None) */
static int param_init(PyObject *obj, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"sizes", "dim", "world", "rank", "post_forward", NULL};
    fcpy_param *self = (fcpy_param *)obj;
    PyObject *sizes = NULL;
    PyObject *post_forward = Py_None;
    int64_t shape[64];
    fc_error error = {{0}};
    int dim = 0;
    long long world = 0;
    long long rank = 0;
    long long post_forward_world = 0;
    long long post_forward_rank = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiLL|O", keywords, &sizes, &dim, &world, &rank,
                                     &post_forward)) {
        return -1;
    }
    if (post_forward != Py_None && !PyTuple_Check(post_forward)) {
        PyErr_Format(PyExc_TypeError, "post_forward must be a tuple (world, rank), not %s",
                     Py_TYPE(post_forward)->tp_name);
        return -1;
    }
    if (post_forward != Py_None &&
        !PyArg_ParseTuple(post_forward, "LL", &post_forward_world, &post_forward_rank)) {
        return -1;
    }
    int ndim = parse_sizes(sizes, shape);
    if (ndim < 0) {
        return -1;
    }
    fc_param initialized;
    fc_status status =
        fc_param_init(&initialized, self, (int32_t)ndim, shape, (int32_t)dim, world, rank, &error);
    if (status == FC_OK && post_forward != Py_None) {
        status = fc_param_init_post_forward(&initialized, shape, post_forward_world,
                                            post_forward_rank, &error);
    }
    if (status == FC_OK && self->core.owner != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Param is already initialized");
        status = FC_ERAISED;
    }
    if (status != FC_OK) {
        fc_param_fini(&initialized);
        return fcpy_raise(status, error.message);
    }
    initialized.name = self->core.name;
    fc_param_fini(&self->core); /* releases tensors that setters stored before */
    self->core = initialized;
    return 0;
}

/* Returns the unsharded tensor's Python object if the references of the C struct keep it alive, and
 * else NULL. The object may have hooks and attributes that refer to the model. */
static PyObject *get_held_object(const fc_param *p) {
    const bool has_node =
        p->subscription != NULL && fct_grad_subscription_owns_node(p->subscription);
    return p->unsharded != NULL ? fct_py_object_to_traverse(p->unsharded, has_node ? 2 : 1) : NULL;
}

static int param_traverse(PyObject *obj, visitproc visit, void *arg) {
    fcpy_param *self = (fcpy_param *)obj;
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(self->sharded_param);
    Py_VISIT(self->post_forward_param);
    Py_VISIT(self->unsharded_param);
    if (!PyObject_GC_IsFinalized(obj)) { /* param_finalize() will not be called again */
        Py_VISIT(get_held_object(&self->core));
    }
    Py_VISIT(self->spec);
    Py_VISIT(self->shard_identity.local);
    Py_VISIT(self->dict);
    for (Py_ssize_t i = 0; i < self->slot_count; i++) {
        Py_VISIT(self->slots[i].parameters);
        Py_VISIT(self->slots[i].module);
    }
    return 0;
}

/* Python's garbage collector calls it before it clears an object. torch aborts if the collector
 * clears a tensor's Python object while there are other references to the tensor. */
static void param_finalize(PyObject *obj) {
    fcpy_param *self = (fcpy_param *)obj;
    if (get_held_object(&self->core) != NULL) {
        fc_param_set_unsharded(&self->core, NULL);
    }
}

static int param_clear(PyObject *obj) {
    fcpy_param *self = (fcpy_param *)obj;
    Py_CLEAR(self->spec);
    Py_CLEAR(self->dict);
    fcpy_slots_clear(self);
    return 0;
}

static void param_dealloc(PyObject *obj) {
    fcpy_param *self = (fcpy_param *)obj;
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    (void)param_clear(obj);
    fc_param_fini(&self->core);
    Py_CLEAR(self->sharded_param);
    Py_CLEAR(self->post_forward_param);
    Py_CLEAR(self->unsharded_param);
    Py_CLEAR(self->shard_identity.local);
    Py_CLEAR(self->fqn);
    type->tp_free(obj);
    Py_DECREF(type);
}

/* ---- attributes ---- */

static int parse_tensor(PyObject *value, fct_tensor **handle, const char *name) {
    fct_tensor *tensor = value != NULL ? fct_py_tensor(value) : NULL;
    if (tensor == NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be a tensor", name);
        return -1;
    }
    *handle = tensor;
    return 0;
}

static PyObject *get_sharded_param(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    if (self->sharded_param == NULL) {
        PyErr_SetString(PyExc_AttributeError, "sharded_param");
        return NULL;
    }
    return fcpy_or_none(self->sharded_param);
}

static int set_sharded_param(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    fct_tensor *handle = NULL;
    if (parse_tensor(value, &handle, "sharded_param") != 0) {
        return -1;
    }
    fcpy_replace(self->mod, &self->sharded_param, value);
    fcpy_replace(self->mod, &self->shard_identity.local, NULL);
    return 0;
}

static PyObject *wrap_tensor(fct_tensor *tensor) {
    PyObject *result = NULL;
    if (tensor == NULL) {
        Py_RETURN_NONE;
    }
    return fct_py_from_tensor(tensor, &result) == 0 ? result : NULL;
}

static PyObject *get_sharded_data(PyObject *obj, void *closure) {
    (void)closure;
    return wrap_tensor(((fcpy_param *)obj)->core.sharded_data);
}

static int set_sharded_data(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fct_tensor *handle = NULL;
    if (parse_tensor(value, &handle, "_sharded_param_data") != 0) {
        return -1;
    }
    fcpy_param *self = (fcpy_param *)obj;
    fcpy_hold_tensor(self->mod, self->core.sharded_data);
    fc_param_set_sharded_data(&self->core, handle);
    return 0;
}

static PyObject *get_unsharded_param(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    if (self->core.unsharded == NULL || self->unsharded_param == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "'FSDPParam' object has no attribute '_unsharded_param'");
        return NULL;
    }
    return fcpy_or_none(self->unsharded_param);
}

/* Replaces the core's unsharded tensor by a tensor of an extension hook or of other Python code.
 * The new tensor may be a view of all_gather_outputs. */
static int set_unsharded_param(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    fct_tensor *handle = NULL;
    if (value != NULL && parse_tensor(value, &handle, "_unsharded_param") != 0) {
        return -1;
    }
    PyObject *old = self->unsharded_param;
    fcpy_hold_tensor(self->mod, self->core.unsharded);
    fc_param_set_unsharded(&self->core, handle);
    Py_XINCREF(value);
    self->unsharded_param = value;
    fcpy_defer_decref(self->mod, old);
    return 0;
}

static PyObject *get_post_forward_param(PyObject *obj, void *closure) {
    (void)closure;
    const fcpy_param *self = (fcpy_param *)obj;
    return fcpy_or_none(self->core.post_forward_data != NULL ? self->post_forward_param : NULL);
}

static PyObject *get_post_forward_data(PyObject *obj, void *closure) {
    (void)closure;
    return wrap_tensor(((fcpy_param *)obj)->core.post_forward_data);
}

static PyObject *get_accumulated(PyObject *obj, void *closure) {
    const fc_param *p = &((fcpy_param *)obj)->core;
    return wrap_tensor(closure == NULL ? p->accumulated : p->partial);
}

static int set_accumulated(PyObject *obj, PyObject *value, void *closure) {
    fct_tensor *handle = NULL;
    if (value != NULL && value != Py_None &&
        parse_tensor(value, &handle, "a partial gradient") != 0) {
        return -1;
    }
    fcpy_param *self = (fcpy_param *)obj;
    if (closure == NULL) {
        fcpy_hold_tensor(self->mod, self->core.accumulated);
        fc_param_set_accumulated(&self->core, handle);
    } else {
        fcpy_hold_tensor(self->mod, self->core.partial);
        fc_param_set_partial(&self->core, handle);
    }
    return 0;
}

static PyObject *get_sharded_grad_dtype(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_dtype_object(fc_param_sharded_grad_dtype(&((fcpy_param *)obj)->core));
}

static int set_spec(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    fcpy_replace(self->mod, &self->spec, value);
    return 0;
}

static int set_fqn(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    return fcpy_set_text(self->mod, value, &self->fqn, &self->core.name);
}

static PyObject *get_count(PyObject *obj, void *closure) {
    return PyLong_FromLongLong(*(int64_t *)(void *)((char *)obj + (size_t)(uintptr_t)closure));
}

#define PARAM_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_param, core.field))

static PyGetSetDef param_getset[] = {
    {"sharded_param", get_sharded_param, set_sharded_param,
     "The DTensor parameter that is registered while sharded.", NULL},
    {"_sharded_param_data", get_sharded_data, set_sharded_data,
     "1-D tensor of padded_numel elements: the padded shard that this rank sends in gathers.",
     NULL},
    {"_unsharded_param", get_unsharded_param, set_unsharded_param,
     "The parameter used for computation, after the first unshard.", NULL},
    {"unsharded_param", get_unsharded_param, NULL,
     "The parameter used for computation, after the first unshard.", NULL},
    {"all_gather_outputs", fcpy_get_outputs, fcpy_set_outputs,
     "List of the 1-D tensors behind the unsharded parameter, [] before the first unshard.", NULL},
    {"_extended", fcpy_get_flag, fcpy_set_flag,
     "Whether gathers call _extend_inputs() and _extend_unsharded().", PARAM_OFFSET(extended)},
    {"_sharded_post_forward_param", get_post_forward_param, NULL,
     "The parameter registered while resharded to a smaller mesh, or None.", NULL},
    {"is_dtensor", fcpy_get_flag, fcpy_set_flag,
     "Whether the parameter was a DTensor. If so, gradients are passed to "
     "_get_grad_inner_tensor().",
     PARAM_OFFSET(wrapped)},
    {"_accumulated", get_accumulated, set_accumulated,
     "Gradient in the reduce dtype accumulated by backwards that did not reduce, or None.", NULL},
    {"_partial", get_accumulated, set_accumulated,
     "1-D tensor of padded_numel elements: gradient that is reduce-scattered but not all-reduced, "
     "or None.",
     (void *)1},
    {"orig_dtype", fcpy_get_dtype, fcpy_set_dtype, "dtype of the sharded parameter.",
     PARAM_OFFSET(orig_dtype)},
    {"param_dtype", fcpy_get_dtype, fcpy_set_dtype,
     "dtype of the unsharded parameter; None: no cast.", PARAM_OFFSET(param_dtype)},
    {"reduce_dtype", fcpy_get_dtype, fcpy_set_dtype,
     "dtype of accumulated gradients; None: the dtype of the gradient.",
     PARAM_OFFSET(reduce_dtype)},
    {"_grad_dtype", fcpy_get_dtype, fcpy_set_dtype,
     "grad_dtype of the unsharded parameter outside of backward; None: not set.",
     PARAM_OFFSET(grad_dtype)},
    {"sharded_grad_dtype", get_sharded_grad_dtype, fcpy_set_dtype,
     "dtype of the sharded gradient; None: the dtype of the reduction.",
     PARAM_OFFSET(sharded_grad_dtype)},
    {"_has_sharded_grad_dtype_override", fcpy_get_flag, fcpy_set_flag,
     "Whether the user has set grad_dtype of the sharded parameter.",
     PARAM_OFFSET(overrides_grad_dtype)},
    {"_defers_cast", fcpy_get_flag, fcpy_set_flag,
     "Whether gradients may keep their own dtype during backward, although _grad_dtype is wider.",
     PARAM_OFFSET(defers_cast)},
    {"_sharding_spec", fcpy_get_object, set_spec, "DTensorSpec of the shard and of its gradient.",
     (void *)offsetof(fcpy_param, spec)},
    {"_param_fqn", fcpy_get_object, set_fqn, "Fully qualified name, after lazy init.",
     (void *)offsetof(fcpy_param, fqn)},
    {"offload_to_cpu", fcpy_get_flag, fcpy_set_flag,
     "Whether CPUOffloadPolicy keeps the shard and its gradient in CPU memory.",
     PARAM_OFFSET(offloaded)},
    {"pin_memory", fcpy_get_flag, fcpy_set_flag, "Whether the CPU memory of the shard is pinned.",
     PARAM_OFFSET(pinned)},
    {"padded_numel", get_count, NULL, "Elements that every rank stores and sends.",
     PARAM_OFFSET(layout.padded_numel)},
    {"chunk_rows", get_count, NULL, "Rows (of the sharded dim) that every rank reserves.",
     PARAM_OFFSET(layout.chunk_rows)},
    {"local_rows", get_count, NULL, "Rows of this rank's shard.", PARAM_OFFSET(layout.local_rows)},
    {"rows", get_count, NULL, "Rows of the whole parameter.", PARAM_OFFSET(layout.rows)},
    /* ---- names of torch's private interface; fsdp_c itself does not use them ---- */
    {"_sharded_post_forward_param_data", get_post_forward_data, NULL,
     "1-D tensor with the data of _sharded_post_forward_param, or None.", NULL},
    {"_unsharded_inner_tensors", fcpy_get_inner, fcpy_set_inner,
     "List of the tensors that an all-gather extension has made of all_gather_outputs.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- methods ---- */

static PyObject *register_sharded(PyObject *obj, PyObject *unused) {
    (void)unused;
    fcpy_param *self = (fcpy_param *)obj;
    fcpy_module *mod = self->mod;
    fcpy_calls_enter(mod);
    const int failed = fcpy_slots_register(self, self->sharded_param);
    fcpy_calls_leave(mod);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Another call that is in progress, also of another thread, may use the gradients. */
static void drop_held_grads(fcpy_param *self) {
    fcpy_hold_tensor(self->mod, self->core.accumulated);
    fcpy_hold_tensor(self->mod, self->core.partial);
    fc_param_drop_grad(&self->core);
}

static PyObject *release_unsharded(PyObject *obj, PyObject *unused) {
    (void)unused;
    fcpy_param *self = (fcpy_param *)obj;
    PyObject *param = self->unsharded_param;
    if (fc_param_keep_grad(&self->core) != FC_OK) {
        return NULL;
    }
    fcpy_hold_tensor(self->mod, self->core.unsharded);
    fcpy_defer_outputs_release(self);
    fc_param_release_unsharded(&self->core);
    self->unsharded_param = NULL;
    fcpy_defer_decref(self->mod, param);
    Py_RETURN_NONE;
}

static PyObject *drop_grad(PyObject *obj, PyObject *unused) {
    (void)unused;
    drop_held_grads((fcpy_param *)obj);
    Py_RETURN_NONE;
}

static PyMethodDef param_methods[] = {
    {"_set_slots", fcpy_slots_set, METH_VARARGS,
     "_set_slots(pairs, direct): sets the (module, name) pairs that hold the parameter. direct[i] "
     "is True if the module's _parameters dict may be written directly."},
    {"_register_sharded", register_sharded, METH_NOARGS,
     "Registers sharded_param under the (module, name) pairs of _set_slots()."},
    {"_drop_grad", drop_grad, METH_NOARGS, "Drops the gradients that wait for a later reduction."},
    {"_release_unsharded", release_unsharded, METH_NOARGS,
     "Drops the unsharded parameter, but not its gradient. Only valid while sharded."},
    {"_cut", fcpy_shard_cut, METH_VARARGS,
     "_cut(tensor, dim): makes sharded_param and _sharded_param_data of this rank's rows of a "
     "plain tensor. Returns the local tensor. May be called once."},
    {"_note_shard", fcpy_shard_note, METH_NOARGS,
     "Records that _sharded_param_data is the shard in sharded_param, until that tensor is "
     "replaced. The two then share one version counter."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef param_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_param, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_param, weakrefs), READONLY, NULL},
    {"_swapping", T_BOOL, offsetof(fcpy_param, swapping), READONLY,
     "Whether an overridden to_sharded(), to_unsharded() or to_sharded_post_forward() is running."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot param_slots[] = {
    {Py_tp_new, (void *)param_new},
    {Py_tp_init, (void *)param_init},
    {Py_tp_dealloc, (void *)param_dealloc},
    {Py_tp_traverse, (void *)param_traverse},
    {Py_tp_finalize, (void *)param_finalize},
    {Py_tp_clear, (void *)param_clear},
    {Py_tp_getset, param_getset},
    {Py_tp_methods, param_methods},
    {Py_tp_members, param_members},
    {Py_tp_doc,
     "Param(sizes, dim, world, rank, post_forward=None): one parameter of shape `sizes`, sharded "
     "on `dim` over `world` ranks. Between forward and backward the parameter is "
     "sharded on dim 0 over `post_forward` = (world, rank)."},
    {0, NULL},
};

PyType_Spec fcpy_param_spec = {
    .name = "fsdp_c._C.Param",
    .basicsize = sizeof(fcpy_param),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = param_slots,
};
