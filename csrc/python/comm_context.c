/* The CommContext type (streams and what is in flight, shared by the groups of one root) and the
 * IterationContext type (the states of one root and the iteration's flags). */
#include "../core/reduction.h"

#include "objects.h"

/* ---- CommContext ---- */

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"device", NULL};
    PyObject *device = NULL;
    fct_device parsed;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O", keywords, &device) ||
        fct_py_device(device, &parsed) != 0) {
        return NULL;
    }
    fcpy_comm *self = (fcpy_comm *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->mod = mod;
        fc_comm_init(&self->core, parsed);
    }
    return (PyObject *)self;
}

static int comm_traverse(PyObject *obj, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(((fcpy_comm *)obj)->dict);
    return 0;
}

static int comm_clear(PyObject *obj) {
    Py_CLEAR(((fcpy_comm *)obj)->dict);
    return 0;
}

static void comm_dealloc(PyObject *obj) {
    fcpy_comm *self = (fcpy_comm *)obj;
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    (void)comm_clear(obj);
    fc_reduction_discard(&((fcpy_comm *)obj)->core, NULL);
    fc_comm_fini(&self->core);
    type->tp_free(obj);
    Py_DECREF(type);
}

static PyObject *comm_lazy_init(PyObject *obj, PyObject *args) {
    PyObject *device = NULL; /* stock's argument; ours knows its device */
    if (!PyArg_ParseTuple(args, "|O", &device)) {
        return NULL;
    }
    fc_status status = fc_comm_init_streams(&((fcpy_comm *)obj)->core);
    if (status != FC_OK) {
        (void)fcpy_raise(status, ((fcpy_comm *)obj)->core.error.message);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* _stream_id(which): of the copy-in, gather, reduce or all-reduce stream; None: not there. */
static PyObject *comm_stream_id(PyObject *obj, PyObject *arg) {
    const fc_comm *c = &((fcpy_comm *)obj)->core;
    long which = PyLong_AsLong(arg);
    if (which == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!c->streams_ready) {
        Py_RETURN_NONE;
    }
    const fct_stream streams[] = {c->copy_in_stream, c->gather_stream, c->reduce_stream,
                                  c->all_reduce_stream};
    if (which < 0 || which >= (long)(sizeof streams / sizeof streams[0])) {
        PyErr_SetString(PyExc_IndexError, "there are four streams");
        return NULL;
    }
    return PyLong_FromLongLong(streams[which].id);
}

static PyObject *comm_order(PyObject *obj, void *closure) {
    (void)closure;
    const fc_order *order = &((fcpy_comm *)obj)->core.order;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < order->count; i++) {
        PyObject *group =
            order->items[i] != NULL ? (PyObject *)order->items[i]->members.owner : Py_None;
        if (PyList_Append(list, group) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Only emptied: the groups in it know their places. */
static int comm_set_order(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL || !PyList_Check(value) || PyList_GET_SIZE(value) > 0) {
        PyErr_SetString(PyExc_TypeError, "post_forward_order can only be set to an empty list");
        return -1;
    }
    fc_order *order = &((fcpy_comm *)obj)->core.order;
    while (order->count > 0) {
        fc_group *group = order->items[--order->count];
        order->items[order->count] = NULL; /* the core may be in the middle of it */
        if (group != NULL) {
            group->positions.count = 0;
        }
    }
    return 0;
}

static PyObject *comm_in_flight(PyObject *obj, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((fcpy_comm *)obj)->core.reductions);
}

static PyObject *comm_parked(PyObject *obj, void *closure) {
    (void)closure;
    size_t count = 0;
    for (const fc_parked *p = ((fcpy_comm *)obj)->core.parked; p != NULL; p = p->next) {
        count++;
    }
    return PyLong_FromSize_t(count);
}

static PyObject *comm_max_buffers(PyObject *obj, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((fcpy_comm *)obj)->core.max_reductions);
}

static int comm_set_max_buffers(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    size_t count = value != NULL ? PyLong_AsSize_t(value) : 0;
    if (count == (size_t)-1 && PyErr_Occurred()) {
        return -1;
    }
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "at least one buffer is needed");
        return -1;
    }
    ((fcpy_comm *)obj)->core.max_reductions = count;
    return 0;
}

static PyGetSetDef comm_getset[] = {
    {"post_forward_order", comm_order, comm_set_order,
     "List of the groups in the order their forwards ended (a copy); may be set to [].", NULL},
    {"reductions_in_flight", comm_in_flight, NULL,
     "Gradient reductions whose buffers are still kept.", NULL},
    {"collectives_parked", comm_parked, NULL,
     "Collectives that nobody waits for any more, kept until the backend is done with them.", NULL},
    {"reduce_scatter_max_input_buffers", comm_max_buffers, comm_set_max_buffers,
     "How many of them are kept at most.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef comm_methods[] = {
    {"lazy_init", comm_lazy_init, METH_VARARGS, "Takes the streams from torch's pool; idempotent."},
    {"_stream_id", comm_stream_id, METH_O, "torch's number of one of the four streams, or None."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef comm_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_comm, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_comm, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_new, (void *)comm_new},
    {Py_tp_dealloc, (void *)comm_dealloc},
    {Py_tp_traverse, (void *)comm_traverse},
    {Py_tp_clear, (void *)comm_clear},
    {Py_tp_getset, comm_getset},
    {Py_tp_methods, comm_methods},
    {Py_tp_members, comm_members},
    {Py_tp_doc, "CommContext(device): streams, events and buffers in flight."},
    {0, NULL},
};

PyType_Spec fcpy_comm_spec = {
    .name = "fsdp_c._C.CommContext",
    .basicsize = sizeof(fcpy_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = comm_slots,
};

/* ---- IterationContext ---- */

static PyObject *iteration_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL) {
        return NULL;
    }
    fcpy_iteration *self = (fcpy_iteration *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->mod = mod;
    fc_iteration_init(&self->core);
    self->all_states = PyTuple_New(0);
    if (self->all_states == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int iteration_traverse(PyObject *obj, visitproc visit, void *arg) {
    fcpy_iteration *self = (fcpy_iteration *)obj;
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(self->all_states);
    Py_VISIT(self->post_optim_event);
    Py_VISIT(self->dict);
    return 0;
}

static int iteration_clear(PyObject *obj) {
    fcpy_iteration *self = (fcpy_iteration *)obj;
    PyObject *empty = PyTuple_New(0); /* the interpreter has it */
    fc_iteration_fini(&self->core);
    Py_XSETREF(self->all_states, empty);
    Py_CLEAR(self->post_optim_event);
    Py_CLEAR(self->dict);
    return 0;
}

static void iteration_dealloc(PyObject *obj) {
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    (void)iteration_clear(obj);
    Py_CLEAR(((fcpy_iteration *)obj)->all_states);
    type->tp_free(obj);
    Py_DECREF(type);
}

static PyObject *get_all_states(PyObject *obj, void *closure) {
    (void)closure;
    return PySequence_List(((fcpy_iteration *)obj)->all_states);
}

static int set_all_states(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_iteration *self = (fcpy_iteration *)obj;
    PyObject *fresh = fcpy_tuple_of(value, self->mod->state_type, "all_states");
    void *states = fresh != NULL ? fcpy_core_array(fresh, offsetof(fcpy_state, core)) : NULL;
    if (states == NULL) {
        Py_XDECREF(fresh);
        return -1;
    }
    PyObject *old = self->all_states;
    void *old_states = (void *)self->core.states;
    self->core.states = NULL;
    fc_iteration_set_states(&self->core, (fc_state **)states, (size_t)PyTuple_GET_SIZE(fresh));
    self->all_states = fresh;
    fcpy_retire_block(self->mod, old_states);
    fcpy_retire(self->mod, old);
    return 0;
}

static PyObject *get_forward_root(PyObject *obj, void *closure) {
    (void)closure;
    const fc_state *root = ((fcpy_iteration *)obj)->core.forward_root;
    return fcpy_or_none(root != NULL ? (PyObject *)root->owner : NULL);
}

static int set_forward_root(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_iteration *self = (fcpy_iteration *)obj;
    if (value == NULL || value == Py_None) {
        self->core.forward_root = NULL;
        return 0;
    }
    if (!PyObject_TypeCheck(value, self->mod->state_type)) {
        PyErr_SetString(PyExc_TypeError, "iter_forward_root must be a state or None");
        return -1;
    }
    if (((fcpy_state *)value)->core.iteration != &self->core) {
        PyErr_SetString(PyExc_ValueError,
                        "iter_forward_root must be a state whose _state_ctx this is");
        return -1;
    }
    self->core.forward_root = &((fcpy_state *)value)->core; /* which it forgets when it dies */
    return 0;
}

static PyObject *get_flag(PyObject *obj, void *closure) {
    return PyBool_FromLong(*(bool *)((char *)obj + (size_t)(uintptr_t)closure));
}

static int set_flag(PyObject *obj, PyObject *value, void *closure) {
    return fcpy_set_bool(value, (bool *)((char *)obj + (size_t)(uintptr_t)closure));
}

static PyObject *get_optim_event(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_or_none(((fcpy_iteration *)obj)->post_optim_event);
}

static int set_optim_event(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_iteration *self = (fcpy_iteration *)obj;
    value = value == Py_None ? NULL : value;
    Py_XINCREF(value);
    Py_XSETREF(self->post_optim_event, value);
    return 0;
}

#define ITERATION_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_iteration, core.field))

static PyGetSetDef iteration_getset[] = {
    {"all_states", get_all_states, set_all_states,
     "List of the states under the root in named_modules() order (a copy).", NULL},
    {"iter_forward_root", get_forward_root, set_forward_root,
     "State whose forward this iteration is, or None.", NULL},
    {"post_optim_event", get_optim_event, set_optim_event,
     "Event that the next iteration's gathers wait for in place of the current stream, or None.",
     NULL},
    {"post_backward_final_callback_queued", get_flag, set_flag,
     "Whether this backward's end is hooked already.", ITERATION_OFFSET(callback_queued)},
    {"is_last_backward", get_flag, set_flag, "Whether the next backward's end finalizes.",
     ITERATION_OFFSET(is_last_backward)},
    {"manual_finalization", get_flag, set_flag, "Whether finalize_backward() finishes backwards.",
     ITERATION_OFFSET(manual)},
    {"reduction_pending", get_flag, NULL, "Whether a started finalization was not completed yet.",
     ITERATION_OFFSET(pending)},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef iteration_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_iteration, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot iteration_slots[] = {
    {Py_tp_new, (void *)iteration_new},
    {Py_tp_dealloc, (void *)iteration_dealloc},
    {Py_tp_traverse, (void *)iteration_traverse},
    {Py_tp_clear, (void *)iteration_clear},
    {Py_tp_getset, iteration_getset},
    {Py_tp_members, iteration_members},
    {Py_tp_doc,
     "IterationContext(): what the states under one root share about the running iteration."},
    {0, NULL},
};

PyType_Spec fcpy_iteration_spec = {
    .name = "fsdp_c._C.IterationContext",
    .basicsize = sizeof(fcpy_iteration),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = iteration_slots,
};
