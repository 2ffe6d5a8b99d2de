/* The IterationContext type: the states of one root and the flags of the running iteration. */
#include "iteration_context.h"

#include "attributes.h"
#include "deferred_decref.h"

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
    PyObject *empty = PyTuple_New(0); /* a singleton of the interpreter, so this cannot fail */
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
    PyObject *new_states = fcpy_tuple_of(value, self->mod->state_type, "all_states");
    void *states =
        new_states != NULL ? fcpy_core_array(new_states, offsetof(fcpy_state, core)) : NULL;
    if (states == NULL) {
        Py_XDECREF(new_states);
        return -1;
    }
    PyObject *old_tuple = self->all_states;
    void *old_states = (void *)self->core.states;
    self->core.states = NULL;
    fc_iteration_set_states(&self->core, (fc_state **)states, (size_t)PyTuple_GET_SIZE(new_states));
    self->all_states = new_states;
    fcpy_defer_free(self->mod, old_states);
    fcpy_defer_decref(self->mod, old_tuple);
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
    /* Borrowed: the destructor of the state resets the field. */
    self->core.forward_root = &((fcpy_state *)value)->core;
    return 0;
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
    {"post_backward_final_callback_queued", fcpy_get_flag, fcpy_set_flag,
     "Whether the end-of-backward callback of this backward is queued.",
     ITERATION_OFFSET(callback_queued)},
    {"manual_finalization", fcpy_get_flag, fcpy_set_flag,
     "Whether backwards are completed by finalize_backward().", ITERATION_OFFSET(manual)},
    {"reduction_pending", fcpy_get_flag, NULL,
     "Whether a finalization was started and not completed.", ITERATION_OFFSET(pending)},
    /* ---- names of torch's private interface; fsdp_c itself does not use them ---- */
    {"iter_forward_root", get_forward_root, set_forward_root,
     "State whose forward began this iteration, or None.", NULL},
    {"post_optim_event", fcpy_get_object, set_optim_event,
     "Event that the next iteration's gathers wait for instead of the current stream, or None.",
     (void *)offsetof(fcpy_iteration, post_optim_event)},
    {"is_last_backward", fcpy_get_flag, fcpy_set_flag,
     "Whether the end of the next backward finalizes it.", ITERATION_OFFSET(is_last_backward)},
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
     "IterationContext(): flags of the running iteration, shared by the states under one root."},
    {0, NULL},
};

PyType_Spec fcpy_iteration_spec = {
    .name = "fsdp_c._C.IterationContext",
    .basicsize = sizeof(fcpy_iteration),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = iteration_slots,
};
