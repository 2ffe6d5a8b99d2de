/* The State type. step.c has the work of its hooks, hook.c the callables that modules call.
 *
 * A state owns tuples of its groups and prefetch targets. The core has arrays of the same items. A
 * state also owns references to the contexts that it shares with the other states under the root.
 */
#include "state.h"

#include "attributes.h"
#include "check_initialized.h"
#include "check_thread.h"
#include "deferred_decref.h"
#include "freed_modules.h"
#include "step.h"
#include "transitions.h"
#include "tree.h"

static fcpy_state *as_state(PyObject *obj) {
    return (fcpy_state *)obj;
}

/* ---- State: life ---- */

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL) {
        return NULL;
    }
    fcpy_state *self = (fcpy_state *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    fc_state_init(&self->core, self, NULL, NULL);
    self->mod = mod;
    self->input_dtype = FCT_NO_DTYPE;
    self->output_dtype = FCT_NO_DTYPE;
    Py_INCREF(Py_None);
    self->is_root = Py_None;
    self->groups = PyTuple_New(0);
    self->forward_prefetch = PyTuple_New(0);
    self->backward_prefetch = PyTuple_New(0);
    self->modules_to_run = PySet_New(NULL);
    if (self->groups == NULL || self->forward_prefetch == NULL || self->backward_prefetch == NULL ||
        self->modules_to_run == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int state_traverse(PyObject *obj, visitproc visit, void *arg) {
    fcpy_state *self = as_state(obj);
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT(self->groups);
    Py_VISIT(self->forward_prefetch);
    Py_VISIT(self->backward_prefetch);
    Py_VISIT(self->iteration);
    Py_VISIT(self->comm);
    Py_VISIT(self->modules_to_run);
    Py_VISIT(self->dict);
    return 0;
}

/* Clears the core's arrays with the tuples. The result is a state without contexts, like a new
 * one. */
static int state_clear(PyObject *obj) {
    fcpy_state *self = as_state(obj);
    fc_state_fini(&self->core);
    fc_state_init(&self->core, self, NULL, NULL);
    PyObject **const tuples[] = {&self->groups, &self->forward_prefetch, &self->backward_prefetch};
    for (size_t i = 0; i < sizeof tuples / sizeof tuples[0]; i++) {
        PyObject *empty = PyTuple_New(0); /* a singleton of the interpreter, so this cannot fail */
        Py_XSETREF(*tuples[i], empty);
    }
    Py_CLEAR(self->iteration);
    Py_CLEAR(self->comm);
    Py_CLEAR(self->dict);
    return 0;
}

static void state_dealloc(PyObject *obj) {
    fcpy_state *self = as_state(obj);
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    fc_state_fini(&self->core); /* removes the iteration's pointer to this state */
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    (void)state_clear(obj);
    Py_CLEAR(self->groups);
    Py_CLEAR(self->forward_prefetch);
    Py_CLEAR(self->backward_prefetch);
    Py_CLEAR(self->modules_to_run);
    Py_CLEAR(self->is_root);
    type->tp_free(obj);
    Py_DECREF(type);
}

/* ---- State: attributes ---- */

/* Replaces a tuple and the core's array of the same items. Takes `new_tuple`. Returns -1 if
 * `new_tuple` is NULL. */
static int replace_tuple(const fcpy_state *self, PyObject **tuple, void **array, size_t *count,
                         PyObject *new_tuple, size_t offset) {
    void *new_array = new_tuple != NULL ? fcpy_core_array(new_tuple, offset) : NULL;
    if (new_array == NULL) {
        Py_XDECREF(new_tuple);
        return -1;
    }
    PyObject *old_tuple = *tuple;
    void *old_array = *array;
    *tuple = new_tuple;
    *array = new_array;
    *count = (size_t)PyTuple_GET_SIZE(new_tuple);
    fcpy_defer_free(self->mod, old_array);
    fcpy_defer_decref(self->mod, old_tuple);
    return 0;
}

static PyObject *get_groups(PyObject *obj, void *closure) {
    (void)closure;
    return PySequence_List(as_state(obj)->groups);
}

static int set_groups(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_state *self = as_state(obj);
    PyObject *new_tuple = fcpy_tuple_of(value, self->mod->group_type, "_fsdp_param_groups");
    for (Py_ssize_t i = 0; new_tuple != NULL && i < PyTuple_GET_SIZE(new_tuple); i++) {
        if (!fcpy_group_check_initialized((fcpy_group *)PyTuple_GET_ITEM(new_tuple, i))) {
            Py_CLEAR(new_tuple);
        }
    }
    if (replace_tuple(self, &self->groups, (void **)&self->core.groups, &self->core.group_count,
                      new_tuple, offsetof(fcpy_group, core)) != 0) {
        return -1;
    }
    if (self->core.iteration != NULL) {
        fc_iteration_update_siblings(self->core.iteration);
    }
    return 0;
}

/* `closure` is NULL for the states to prefetch in forward, else those to prefetch in backward. */
static PyObject *get_prefetch(PyObject *obj, void *closure) {
    return PySequence_List(closure == NULL ? as_state(obj)->forward_prefetch
                                           : as_state(obj)->backward_prefetch);
}

static int set_prefetch(PyObject *obj, PyObject *value, void *closure) {
    fcpy_state *self = as_state(obj);
    fc_state *core = &self->core;
    PyObject *new_tuple = fcpy_tuple_of(value, self->mod->state_type, "the states to prefetch");
    if (closure == NULL) {
        return replace_tuple(self, &self->forward_prefetch, (void **)&core->forward_prefetch,
                             &core->forward_prefetch_count, new_tuple, offsetof(fcpy_state, core));
    }
    return replace_tuple(self, &self->backward_prefetch, (void **)&core->backward_prefetch,
                         &core->backward_prefetch_count, new_tuple, offsetof(fcpy_state, core));
}

static int set_iteration(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_state *self = as_state(obj);
    if (value == NULL || !PyObject_TypeCheck(value, self->mod->iteration_type)) {
        PyErr_SetString(PyExc_TypeError, "_state_ctx must be an IterationContext");
        return -1;
    }
    fc_iteration *old_iteration = self->core.iteration;
    if (old_iteration != NULL && old_iteration->forward_root == &self->core) {
        /* forward_root may only be a state that owns a reference to the iteration. */
        old_iteration->forward_root = NULL;
    }
    self->core.iteration = &((fcpy_iteration *)value)->core;
    fcpy_replace(self->mod, &self->iteration, value);
    return 0;
}

static int set_comm(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_state *self = as_state(obj);
    if (value == NULL || !PyObject_TypeCheck(value, self->mod->comm_type)) {
        PyErr_SetString(PyExc_TypeError, "_comm_ctx must be a CommContext");
        return -1;
    }
    self->core.comm = &((fcpy_comm *)value)->core;
    fcpy_replace(self->mod, &self->comm, value);
    return 0;
}

static PyObject *get_training(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_training_state(as_state(obj)->mod, as_state(obj)->core.training_state);
}

static int set_training(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_state *self = as_state(obj);
    if (fcpy_parse_training_state(self->mod, value, &self->core.training_state) != 0) {
        return -1;
    }
    self->thread = PyThread_get_thread_ident();
    return 0;
}

static int set_is_root(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    if (value != Py_None && value != Py_True && value != Py_False) {
        PyErr_SetString(PyExc_TypeError, "_is_root must be None or a bool");
        return -1;
    }
    Py_INCREF(value);
    Py_SETREF(as_state(obj)->is_root, value);
    return 0;
}

#define STATE_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_state, field))

static PyGetSetDef state_getset[] = {
    {"_fsdp_param_groups", get_groups, set_groups, "List of the state's ParamGroups (a copy).",
     NULL},
    {"_state_ctx", fcpy_get_object, set_iteration,
     "IterationContext shared by the states under one root.", STATE_OFFSET(iteration)},
    {"_comm_ctx", fcpy_get_object, set_comm, "CommContext shared by the states under one root.",
     STATE_OFFSET(comm)},
    {"_training_state", get_training, set_training, "TrainingState of the state.", NULL},
    {"_is_root", fcpy_get_object, set_is_root, "Whether this is the root; None before lazy init.",
     STATE_OFFSET(is_root)},
    {"_modules_to_run_forward", fcpy_get_object, NULL,
     "Set of the modules of the state that have not run in this forward.",
     STATE_OFFSET(modules_to_run)},
    {"_input_dtype", fcpy_get_dtype, fcpy_set_dtype,
     "dtype to which forward inputs are cast, or None.", STATE_OFFSET(input_dtype)},
    {"_output_dtype", fcpy_get_dtype, fcpy_set_dtype,
     "dtype to which forward outputs are cast, or None.", STATE_OFFSET(output_dtype)},
    {"_moves_inputs", fcpy_get_flag, fcpy_set_flag,
     "Whether a forward as the root calls _inputs_to_device().", STATE_OFFSET(moves_inputs)},
    {"_states_to_forward_prefetch", get_prefetch, set_prefetch,
     "States to unshard after this state's unshard in forward.", NULL},
    {"_states_to_backward_prefetch", get_prefetch, set_prefetch,
     "States to unshard after this state's unshard in backward.", (void *)1},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- State: methods ---- */

static PyObject *state_pre_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &inputs, &kwargs)) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    fcpy_calls_enter(as_state(obj)->mod);
    const int failed = fcpy_check_forward_thread(as_state(obj)) != 0 ||
                       fcpy_state_pre_forward(as_state(obj), module, &inputs, &kwargs) != 0;
    fcpy_calls_leave(as_state(obj)->mod);
    return fcpy_pack_pair(failed, inputs, kwargs);
}

static PyObject *state_root_pre_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *inputs = NULL;
    PyObject *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &inputs, &kwargs) ||
        !fcpy_state_check_initialized(as_state(obj))) {
        return NULL;
    }
    Py_INCREF(inputs);
    Py_INCREF(kwargs);
    fcpy_calls_enter(as_state(obj)->mod);
    const int failed = fcpy_state_begin_forward(as_state(obj), &inputs, &kwargs);
    fcpy_calls_leave(as_state(obj)->mod);
    return fcpy_pack_pair(failed, inputs, kwargs);
}

static PyObject *state_post_forward(PyObject *obj, PyObject *args) {
    PyObject *module = NULL;
    PyObject *inputs = NULL;
    PyObject *output = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &module, &inputs, &output)) {
        return NULL;
    }
    fcpy_calls_enter(as_state(obj)->mod);
    PyObject *result = fcpy_state_post_forward(as_state(obj), module, inputs, output);
    fcpy_calls_leave(as_state(obj)->mod);
    return result;
}

/* Calls `run` on an initialized state. Returns a new reference to `result`, or NULL with an
 * exception. */
static PyObject *run_initialized(fcpy_state *self, int (*run)(fcpy_state *self), PyObject *result) {
    if (!fcpy_state_check_initialized(self)) {
        return NULL;
    }
    fcpy_calls_enter(self->mod);
    const int failed = run(self);
    fcpy_calls_leave(self->mod);
    if (failed) {
        return NULL;
    }
    Py_INCREF(result);
    return result;
}

static PyObject *state_pre_backward(PyObject *obj, PyObject *grad) {
    return run_initialized(as_state(obj), fcpy_state_pre_backward, grad);
}

static PyObject *state_end_backward(PyObject *obj, PyObject *unused) {
    (void)unused;
    return fcpy_state_check_context_attribute(as_state(obj), "post_forward_order")
               ? run_initialized(as_state(obj), fcpy_state_end_backward, Py_None)
               : NULL;
}

static int run_finalize(fcpy_state *self) {
    fcpy_state_refresh_iteration(self);
    return fcpy_state_check_status(self, fc_iteration_finalize(self->core.iteration));
}

static PyObject *state_finalize(PyObject *obj, PyObject *unused) {
    (void)unused;
    return run_initialized(as_state(obj), run_finalize, Py_None);
}

static int run_complete(fcpy_state *self) {
    fcpy_state_refresh_iteration(self);
    return fcpy_state_check_status(self,
                                   fc_iteration_complete(self->core.iteration, self->core.comm));
}

static PyObject *state_complete(PyObject *obj, PyObject *unused) {
    (void)unused;
    return run_initialized(as_state(obj), run_complete, Py_None);
}

static int run_reset(fcpy_state *self) {
    if (self->is_root == Py_False) {
        PyErr_SetString(PyExc_RuntimeError,
                        "reset_iter_state must be called on the root FSDP module");
        return -1;
    }
    if (fcpy_state_reset(self) != 0) {
        return -1;
    }
    return fcpy_drop_result(PyObject_CallMethod((PyObject *)self, "_complete_reset", NULL));
}

static PyObject *state_reset(PyObject *obj, PyObject *unused) {
    (void)unused;
    return run_initialized(as_state(obj), run_reset, Py_None);
}

static PyMethodDef state_methods[] = {
    {"_pre_forward", state_pre_forward, METH_VARARGS,
     "_pre_forward(module, args, kwargs) -> (args, kwargs)"},
    {"_post_forward", state_post_forward, METH_VARARGS,
     "_post_forward(module, args, output) -> output"},
    {"_start_finalization", state_finalize, METH_NOARGS,
     "Starts the reductions that backwards have deferred."},
    {"_complete_finalization", state_complete, METH_NOARGS,
     "Waits for all reductions and ends the iteration."},
    {"_reset_iter_state", state_reset, METH_NOARGS,
     "Resets all states under the root after an exception in forward or backward. Only for the "
     "root."},
    {"_note_freed_modules", fcpy_state_note_freed_modules, METH_NOARGS,
     "Notes that all modules of the state were freed. Calls _leave_lists() when also no autograd "
     "graph and no copy of a module has its hooks."},
    {"_root_post_backward_final_callback", state_end_backward, METH_NOARGS,
     "Callback at the end of a backward."},
    /* ---- names of torch's private interface; fsdp_c calls these only if they are overridden, or
     * under functorch ---- */
    {"_root_pre_forward", state_root_pre_forward, METH_VARARGS,
     "_root_pre_forward(module, args, kwargs) -> (args, kwargs): begins an iteration; later calls "
     "in the iteration have no effect."},
    {"_pre_backward", state_pre_backward, METH_O,
     "_pre_backward(grad) -> grad: unshards for backward."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef state_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(fcpy_state, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_state, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot state_slots[] = {
    {Py_tp_new, (void *)state_new},
    {Py_tp_dealloc, (void *)state_dealloc},
    {Py_tp_traverse, (void *)state_traverse},
    {Py_tp_clear, (void *)state_clear},
    {Py_tp_getset, state_getset},
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {Py_tp_doc, "State(): the state of the modules of one fully_shard call."},
    {0, NULL},
};

PyType_Spec fcpy_state_spec = {
    .name = "fsdp_c._C.State",
    .basicsize = sizeof(fcpy_state),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = state_slots,
};
