/* The CommContext type: streams, and the gathers and reductions in flight, shared by the groups of
 * one root. */
#include "comm_context.h"

#include "../bridge/pyobject.h"
#include "../core/reduction.h"
#include "attributes.h"
#include "errors.h"

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"device", NULL};
    PyObject *device = NULL;
    fct_device torch_device;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O", keywords, &device) ||
        fct_py_device(device, &torch_device) != 0) {
        return NULL;
    }
    fcpy_comm *self = (fcpy_comm *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->mod = mod;
        fc_comm_init(&self->core, torch_device);
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
    /* torch's argument. Not used, because the constructor has set the device. */
    PyObject *device = NULL;
    if (!PyArg_ParseTuple(args, "|O", &device)) {
        return NULL;
    }
    fc_status status = fc_comm_init_streams(&((fcpy_comm *)obj)->core);
    if (status != FC_OK) {
        (void)fcpy_raise(status, ((fcpy_comm *)obj)->core.error.message);
        return NULL;
    }
    ((fcpy_comm *)obj)->initialized = true;
    Py_RETURN_NONE;
}

/* _stream_numbers(index): returns (stream id, device index, device type) of a stream. 0 is the
 * copy-in, 1 the gather, 2 the reduce, 3 the all-reduce stream. Returns None before lazy_init(). */
static PyObject *comm_stream_numbers(PyObject *obj, PyObject *arg) {
    const fc_comm_ctx *c = &((fcpy_comm *)obj)->core;
    long index = PyLong_AsLong(arg);
    if (index == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!c->streams_ready) {
        Py_RETURN_NONE;
    }
    const fct_stream streams[] = {c->copy_in_stream, c->gather_stream, c->reduce_stream,
                                  c->all_reduce_stream};
    if (index < 0 || index >= (long)(sizeof streams / sizeof streams[0])) {
        PyErr_SetString(PyExc_IndexError, "_stream_numbers expects a number from 0 to 3");
        return NULL;
    }
    const fct_stream *s = &streams[index];
    return Py_BuildValue("(Lii)", (long long)s->id, s->device.index, s->device.type);
}

static PyObject *comm_order(PyObject *obj, void *closure) {
    (void)closure;
    const fc_order *order = &((fcpy_comm *)obj)->core.order;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < order->count; i++) {
        PyObject *group =
            order->items[i] != NULL ? (PyObject *)order->items[i]->base.owner : Py_None;
        if (PyList_Append(list, group) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Accepts only the empty list: the groups store their indices in the order. */
static int comm_set_order(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL || !PyList_Check(value) || PyList_GET_SIZE(value) > 0) {
        PyErr_SetString(PyExc_TypeError, "post_forward_order can only be set to an empty list");
        return -1;
    }
    fc_order *order = &((fcpy_comm *)obj)->core.order;
    while (order->count > 0) {
        fc_group *group = order->items[--order->count];
        order->items[order->count] = NULL; /* the core may be iterating over the array */
        if (group != NULL) {
            group->post_forward_indices.count = 0;
        }
    }
    return 0;
}

static PyObject *comm_deferred(PyObject *obj, void *closure) {
    (void)closure;
    size_t count = 0;
    for (const fc_deferred_release *p = ((fcpy_comm *)obj)->core.deferred; p != NULL; p = p->next) {
        count++;
    }
    return PyLong_FromSize_t(count);
}

static int comm_set_max_buffers(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    size_t count = value != NULL ? PyLong_AsSize_t(value) : 0;
    if (count == (size_t)-1 && PyErr_Occurred()) {
        return -1;
    }
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "reduce_scatter_max_input_buffers must be at least 1");
        return -1;
    }
    ((fcpy_comm *)obj)->core.max_reductions = count;
    return 0;
}

static PyGetSetDef comm_getset[] = {
    {"reductions_in_flight", fcpy_get_size, NULL,
     "Number of gradient reductions whose buffers are not released yet.",
     (void *)offsetof(fcpy_comm, core.reductions)},
    {"deferred_collectives", comm_deferred, NULL,
     "Number of collectives that no code waits for, kept until the backend has finished them.",
     NULL},
    {"reduce_scatter_max_input_buffers", fcpy_get_size, comm_set_max_buffers,
     "Maximum number of reductions that keep their buffers.",
     (void *)offsetof(fcpy_comm, core.max_reductions)},
    /* ---- names of torch's private interface; fsdp_c itself does not use them ---- */
    {"post_forward_order", comm_order, comm_set_order,
     "List of the groups in the order in which their forwards ended (a copy); may be set to [].",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef comm_methods[] = {
    {"lazy_init", comm_lazy_init, METH_VARARGS, "Takes the streams from torch's pool; idempotent."},
    {"_stream_numbers", comm_stream_numbers, METH_O,
     "(stream_id, device_index, device_type) of one of the four streams, or None."},
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
    {Py_tp_doc, "CommContext(device): streams, events and buffers of the collectives in flight."},
    {0, NULL},
};

PyType_Spec fcpy_comm_spec = {
    .name = "fsdp_c._C.CommContext",
    .basicsize = sizeof(fcpy_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = comm_slots,
};
