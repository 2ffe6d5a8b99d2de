/* The Param type: one parameter as Python sees it, and the host call-backs that the core makes for
 * a parameter.
 *
 * Owns the sharded parameter (a DTensor nn.Parameter), the unsharded nn.Parameter, the sharding
 * spec and the module slots. The cold side (sharding, DTensor specs, reloading) is the Python
 * subclass in fsdp_c/param.py. */
#include "objects.h"

/* ---- host call-backs: the core's view of Python ---- */

static int host_make_unsharded(void *owner, fct_tensor *flat, fct_tensor **unsharded) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *tensor = NULL;
    if (fct_py_from_tensor(flat, &tensor) != 0) {
        return -1;
    }
    PyObject *made = PyObject_CallMethodObjArgs((PyObject *)self, self->mod->names._make_unsharded,
                                                tensor, NULL);
    Py_DECREF(tensor);
    if (made == NULL) {
        return -1;
    }
    fct_tensor *handle = fct_py_tensor(made);
    if (handle == NULL) {
        PyErr_SetString(PyExc_TypeError, "_make_unsharded must return a tensor");
        Py_DECREF(made);
        return -1;
    }
    Py_XSETREF(self->unsharded_param, made);
    *unsharded = handle;
    return 0;
}

static int host_swap(void *owner, bool unsharded) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *param = unsharded ? self->unsharded_param : self->sharded_param;
    if (param == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: no parameter to register");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->slot_count; i++) {
        const fcpy_slot *slot = &self->slots[i];
        int failed = slot->parameters != NULL ? PyDict_SetItem(slot->parameters, slot->name, param)
                                              : PyObject_SetAttr(slot->module, slot->name, param);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* grad._local_tensor += local */
static int add_to_grad(fcpy_param *self, const fct_tensor *local) {
    int result = -1;
    PyObject *target = NULL;
    PyObject *grad = PyObject_GetAttr(self->sharded_param, self->mod->names.grad);
    if (grad == NULL) {
        return -1;
    }
    if (!PyObject_IsInstance(grad, self->mod->bound.dtensor_class)) {
        PyErr_Format(PyExc_AssertionError,
                     "Expected fsdp_param.sharded_param.grad to be DTensor, got %R",
                     (PyObject *)Py_TYPE(grad));
        goto done;
    }
    target = PyObject_GetAttr(grad, self->mod->names._local_tensor);
    fct_tensor *handle = target != NULL ? fct_py_tensor(target) : NULL;
    if (handle == NULL) {
        if (target != NULL) {
            PyErr_SetString(PyExc_TypeError, "the gradient's local tensor is no tensor");
        }
        goto done;
    }
    result = fct_tensor_add(handle, local);
done:
    Py_XDECREF(target);
    Py_DECREF(grad);
    return result;
}

static int set_new_grad(fcpy_param *self, fct_tensor *local) {
    PyObject *tensor = NULL;
    if (fct_py_from_tensor(local, &tensor) != 0) {
        return -1;
    }
    PyObject *const args[] = {self->mod->bound.dtensor_class, tensor, self->spec, Py_False};
    PyObject *grad =
        PyObject_Vectorcall(self->mod->bound.dtensor_new, args, 3, self->mod->no_grad_kwnames);
    Py_DECREF(tensor);
    if (grad == NULL) {
        return -1;
    }
    int result = fct_py_set_grad(self->sharded_param, grad);
    Py_DECREF(grad);
    return result;
}

/* The dict of post-accumulate-grad hooks, NULL (no error) where there are none. New reference. */
static PyObject *hooks_of(const fcpy_param *self) {
    PyObject *hooks =
        PyObject_GetAttr(self->sharded_param, self->mod->names._post_accumulate_grad_hooks);
    if (hooks == NULL) {
        PyErr_Clear();
        return NULL;
    }
    if (hooks == Py_None || PyObject_Size(hooks) <= 0) {
        PyErr_Clear();
        Py_DECREF(hooks);
        return NULL;
    }
    return hooks;
}

static int run_hooks(fcpy_param *self) {
    PyObject *hooks = hooks_of(self);
    if (hooks == NULL) {
        return 0;
    }
    int result = -1;
    PyObject *values = PyMapping_Values(hooks);
    Py_DECREF(hooks);
    if (values == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
        PyObject *returned = PyObject_CallOneArg(PyList_GET_ITEM(values, i), self->sharded_param);
        if (returned == NULL) {
            goto done;
        }
        Py_DECREF(returned);
    }
    result = 0;
done:
    Py_DECREF(values);
    return result;
}

/* The tensor behind the parameter object now: swap_tensors may change it, and wants no other
 * reference. */
static fct_tensor *sharded_handle(const fcpy_param *self) {
    return self->sharded_param != NULL ? fct_py_tensor(self->sharded_param) : NULL;
}

static bool host_requires_grad(void *owner) {
    const fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL && fct_tensor_requires_grad(sharded);
}

static uint32_t host_shard_version(void *owner) {
    const fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL ? fct_tensor_version(sharded) : 0;
}

static int host_take_grad(void *owner, fct_tensor *local) {
    fcpy_param *self = (fcpy_param *)owner;
    const fct_tensor *sharded = sharded_handle(self);
    if (sharded == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: no sharded parameter for the gradient");
        return -1;
    }
    int failed = fct_grad_has(sharded) ? add_to_grad(self, local) : set_new_grad(self, local);
    return failed ? -1 : run_hooks(self);
}

static bool host_wants_grad_now(void *owner) {
    PyObject *hooks = hooks_of((const fcpy_param *)owner);
    bool any = hooks != NULL;
    Py_XDECREF(hooks);
    return any;
}

const fc_host fcpy_host = {
    .make_unsharded = host_make_unsharded,
    .swap = host_swap,
    .requires_grad = host_requires_grad,
    .shard_version = host_shard_version,
    .take_grad = host_take_grad,
    .wants_grad_now = host_wants_grad_now,
};

/* ---- life ---- */

static void clear_slots(fcpy_param *self) {
    for (Py_ssize_t i = 0; i < self->slot_count; i++) {
        Py_CLEAR(self->slots[i].module);
        Py_CLEAR(self->slots[i].parameters);
        Py_CLEAR(self->slots[i].name);
    }
    PyMem_Free(self->slots);
    self->slots = NULL;
    self->slot_count = 0;
}

/* Param(sizes, world, rank) */
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
    }
    return (PyObject *)self;
}

static int param_init_layout(fcpy_param *self, PyObject *sizes, long long world, long long rank) {
    int64_t shape[64];
    fc_error error = {{0}};
    PyObject *items = PySequence_Fast(sizes, "sizes must be a sequence of integers");
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t ndim = PySequence_Fast_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < ndim && ndim <= 64; i++) {
        shape[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i));
    }
    Py_DECREF(items);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (ndim > 64) {
        PyErr_SetString(PyExc_ValueError, "a tensor has at most 64 dimensions");
        return -1;
    }
    fc_param_fini(&self->core);
    fc_status status = fc_param_init(&self->core, self, (int32_t)ndim, shape, world, rank, &error);
    return status == FC_OK ? 0 : fcpy_raise(status, error.message);
}

static int param_init(PyObject *obj, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"sizes", "world", "rank", NULL};
    PyObject *sizes = NULL;
    long long world = 0;
    long long rank = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLL", keywords, &sizes, &world, &rank)) {
        return -1;
    }
    return param_init_layout((fcpy_param *)obj, sizes, world, rank);
}

static int param_traverse(PyObject *obj, visitproc visit, void *arg) {
    fcpy_param *self = (fcpy_param *)obj;
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(self->sharded_param);
    Py_VISIT(self->unsharded_param);
    Py_VISIT(self->spec);
    Py_VISIT(self->dict);
    for (Py_ssize_t i = 0; i < self->slot_count; i++) {
        Py_VISIT(self->slots[i].module);
        Py_VISIT(self->slots[i].parameters);
    }
    return 0;
}

static int param_clear(PyObject *obj) {
    fcpy_param *self = (fcpy_param *)obj;
    Py_CLEAR(self->spec);
    Py_CLEAR(self->dict);
    clear_slots(self);
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
    Py_CLEAR(self->unsharded_param);
    Py_CLEAR(self->fqn);
    type->tp_free(obj);
    Py_DECREF(type);
}

/* ---- attributes ---- */

static int tensor_or_fail(PyObject *value, fct_tensor **handle, const char *name) {
    fct_tensor *found = value != NULL ? fct_py_tensor(value) : NULL;
    if (found == NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be a tensor", name);
        return -1;
    }
    *handle = found;
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
    if (tensor_or_fail(value, &handle, "sharded_param") != 0) {
        return -1;
    }
    Py_INCREF(value);
    Py_XSETREF(self->sharded_param, value);
    return 0;
}

static PyObject *tensor_or_none(fct_tensor *tensor) {
    PyObject *result = NULL;
    if (tensor == NULL) {
        Py_RETURN_NONE;
    }
    return fct_py_from_tensor(tensor, &result) == 0 ? result : NULL;
}

static PyObject *get_sharded_data(PyObject *obj, void *closure) {
    (void)closure;
    return tensor_or_none(((fcpy_param *)obj)->core.sharded_data);
}

static int set_sharded_data(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fct_tensor *handle = NULL;
    if (tensor_or_fail(value, &handle, "_sharded_param_data") != 0) {
        return -1;
    }
    fc_param_set_sharded_data(&((fcpy_param *)obj)->core, handle);
    return 0;
}

static PyObject *get_unsharded_param(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    if (self->core.unsharded == NULL || self->unsharded_param == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_unsharded_param");
        return NULL;
    }
    return fcpy_or_none(self->unsharded_param);
}

static PyObject *get_all_gather_outputs(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
    PyObject *list = PyList_New(0);
    if (list == NULL || self->core.flat == NULL) {
        return list;
    }
    PyObject *flat = tensor_or_none(self->core.flat);
    if (flat == NULL || PyList_Append(list, flat) != 0) {
        Py_CLEAR(list);
    }
    Py_XDECREF(flat);
    return list;
}

static PyObject *get_accumulated(PyObject *obj, void *closure) {
    (void)closure;
    return tensor_or_none(((fcpy_param *)obj)->core.accumulated);
}

static int set_accumulated(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fct_tensor *handle = NULL;
    if (value != NULL && value != Py_None &&
        tensor_or_fail(value, &handle, "unsharded_accumulated_grad") != 0) {
        return -1;
    }
    fc_param_set_accumulated(&((fcpy_param *)obj)->core, handle);
    return 0;
}

/* The three dtypes; the closure is the field's offset. */
static fct_dtype *dtype_field(PyObject *obj, void *closure) {
    return (fct_dtype *)(void *)((char *)obj + (size_t)(uintptr_t)closure);
}

static PyObject *get_dtype(PyObject *obj, void *closure) {
    return fcpy_get_dtype(*dtype_field(obj, closure));
}

static int set_dtype(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_set_dtype(value, dtype_field(obj, closure));
}

static PyObject *get_spec(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_or_none(((fcpy_param *)obj)->spec);
}

static int set_spec(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    Py_XINCREF(value);
    Py_XSETREF(((fcpy_param *)obj)->spec, value);
    return 0;
}

static PyObject *get_fqn(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_or_none(((fcpy_param *)obj)->fqn);
}

static int set_fqn(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_param *self = (fcpy_param *)obj;
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
    self->core.name = text;
    return 0;
}

static PyObject *get_count(PyObject *obj, void *closure) {
    return PyLong_FromLongLong(*(int64_t *)(void *)((char *)obj + (size_t)(uintptr_t)closure));
}

#define PARAM_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_param, core.field))

static PyGetSetDef param_getset[] = {
    {"sharded_param", get_sharded_param, set_sharded_param,
     "The registered DTensor parameter while sharded.", NULL},
    {"_sharded_param_data", get_sharded_data, set_sharded_data,
     "1-D tensor of padded_numel elements: this rank's shard with its padding; what is sent.",
     NULL},
    {"_unsharded_param", get_unsharded_param, NULL,
     "The parameter used for computation, after the 1st unshard.", NULL},
    {"unsharded_param", get_unsharded_param, NULL, "The same as _unsharded_param.", NULL},
    {"all_gather_outputs", get_all_gather_outputs, NULL,
     "List of the 1-D tensor behind the unsharded parameter, [] before the first unshard.", NULL},
    {"unsharded_accumulated_grad", get_accumulated, set_accumulated,
     "Partial gradient in the reduce dtype, of backwards that did not reduce; or None.", NULL},
    {"orig_dtype", get_dtype, set_dtype, "dtype of the sharded parameter.",
     PARAM_OFFSET(orig_dtype)},
    {"param_dtype", get_dtype, set_dtype, "dtype to compute in; None: no cast.",
     PARAM_OFFSET(param_dtype)},
    {"reduce_dtype", get_dtype, set_dtype, "dtype to reduce in; None: the gradient's.",
     PARAM_OFFSET(reduce_dtype)},
    {"_sharding_spec", get_spec, set_spec, "DTensorSpec of the shard and of its gradient.", NULL},
    {"_param_fqn", get_fqn, set_fqn, "Name from the root module, after lazy init.", NULL},
    {"padded_numel", get_count, NULL, "Elements every rank stores and sends.",
     PARAM_OFFSET(layout.padded_numel)},
    {"chunk_rows", get_count, NULL, "Rows (dim 0) every rank reserves.",
     PARAM_OFFSET(layout.chunk_rows)},
    {"local_rows", get_count, NULL, "Rows (dim 0) of this rank's shard.",
     PARAM_OFFSET(layout.local_rows)},
    {"rows", get_count, NULL, "Rows (dim 0) of the whole parameter.", PARAM_OFFSET(layout.rows)},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- methods ---- */

/* One (module, name) pair into a slot; the dict is used directly unless the module has its own
 * __setattr__. */
static int fill_slot(fcpy_param *self, fcpy_slot *slot, PyObject *pair, bool direct) {
    PyObject *module = NULL;
    PyObject *name = NULL;
    if (!PyArg_ParseTuple(pair, "OU", &module, &name)) {
        return -1;
    }
    if (direct) {
        slot->parameters = PyObject_GetAttr(module, self->mod->names._parameters);
        if (slot->parameters == NULL) {
            return -1;
        }
        if (!PyDict_Check(slot->parameters)) {
            Py_CLEAR(slot->parameters);
        }
    }
    Py_INCREF(module);
    slot->module = module;
    Py_INCREF(name);
    slot->name = name;
    PyUnicode_InternInPlace(&slot->name);
    return 0;
}

static PyObject *set_slots(PyObject *obj, PyObject *args) {
    fcpy_param *self = (fcpy_param *)obj;
    PyObject *pairs = NULL;
    PyObject *direct = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &pairs, &PyList_Type, &direct)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(pairs);
    if (PyList_GET_SIZE(direct) != count) {
        PyErr_SetString(PyExc_ValueError, "one flag is needed for each slot");
        return NULL;
    }
    clear_slots(self);
    self->slots = (fcpy_slot *)PyMem_Calloc((size_t)(count > 0 ? count : 1), sizeof *self->slots);
    if (self->slots == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        self->slot_count = i + 1;
        if (fill_slot(self, &self->slots[i], PyList_GET_ITEM(pairs, i),
                      PyList_GET_ITEM(direct, i) == Py_True) != 0) {
            clear_slots(self);
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *register_sharded(PyObject *obj, PyObject *unused) {
    (void)unused;
    if (host_swap(obj, false) != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *forget_unsharded(PyObject *obj, PyObject *unused) {
    (void)unused;
    fcpy_param *self = (fcpy_param *)obj;
    fc_param_drop_grad(&self->core);
    fc_param_forget_unsharded(&self->core);
    Py_CLEAR(self->unsharded_param);
    Py_RETURN_NONE;
}

static PyMethodDef param_methods[] = {
    {"_set_slots", set_slots, METH_VARARGS,
     "_set_slots(pairs, direct): the (module, name) pairs that hold the parameter; direct[i] is "
     "True where the "
     "module's _parameters dict may be written directly."},
    {"_register_sharded", register_sharded, METH_NOARGS, "Puts sharded_param into every slot."},
    {"_forget_unsharded", forget_unsharded, METH_NOARGS,
     "Drops the unsharded parameter; only while sharded."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef param_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_param, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_param, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot param_slots[] = {
    {Py_tp_new, (void *)param_new},
    {Py_tp_init, (void *)param_init},
    {Py_tp_dealloc, (void *)param_dealloc},
    {Py_tp_traverse, (void *)param_traverse},
    {Py_tp_clear, (void *)param_clear},
    {Py_tp_getset, param_getset},
    {Py_tp_methods, param_methods},
    {Py_tp_members, param_members},
    {Py_tp_doc, "Param(sizes, world, rank): one parameter of `sizes`, sharded on dim 0."},
    {0, NULL},
};

PyType_Spec fcpy_param_spec = {
    .name = "fsdp_c._C.Param",
    .basicsize = sizeof(fcpy_param),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = param_slots,
};
