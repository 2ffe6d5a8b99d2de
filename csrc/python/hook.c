/* The Hook type: the callable that is registered on a module as its forward (pre-)hook. Owns its
 * state, and for states of several modules the set of those modules. Under torch.compile dynamo
 * breaks the graph here and calls it. */
#include "hook.h"

#include "admit.h"
#include "dynamo.h"
#include "retired.h"
#include "step.h"

typedef enum fcpy_hook_kind { HOOK_PRE_FORWARD = 0, HOOK_POST_FORWARD = 1 } fcpy_hook_kind;

/* A callable to register on a module. */
typedef struct fcpy_hook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    fcpy_state *state; /* owned */
    fcpy_hook_kind kind;
    bool grouped;      /* several modules share the state: count which of them have run */
    PyObject *modules; /* set of those modules, for grouped hooks */
} fcpy_hook;

/* (module, args, kwargs) -> None where nothing changed, else (args, kwargs) */
static PyObject *run_pre_forward(fcpy_hook *self, PyObject *module, PyObject *args,
                                 PyObject *kwargs) {
    PyObject *new_args = args;
    PyObject *new_kwargs = kwargs;
    PyObject *result = NULL;
    if (fcpy_admit_forward(self->state) != 0) {
        return NULL;
    }
    if (self->grouped && PySet_GET_SIZE(self->state->modules_to_run) == 0) {
        PyObject *updated =
            PyObject_CallMethod(self->state->modules_to_run, "update", "O", self->modules);
        if (updated == NULL) {
            return NULL;
        }
        Py_DECREF(updated);
    }
    Py_INCREF(new_args);
    Py_INCREF(new_kwargs);
    const bool nested = self->state->entering;
    self->state->entering = true;
    const int failed = fcpy_state_pre_forward(self->state, module, &new_args, &new_kwargs);
    self->state->entering = nested;
    if (!failed) {
        if (new_args == args && new_kwargs == kwargs) {
            result = Py_None;
            Py_INCREF(result);
        } else {
            result = PyTuple_Pack(2, new_args, new_kwargs);
        }
    }
    Py_DECREF(new_args);
    Py_DECREF(new_kwargs);
    return result;
}

/* (module, args, output) -> None where nothing changed, else the new output */
static PyObject *run_post_forward(fcpy_hook *self, PyObject *module, PyObject *input,
                                  PyObject *output) {
    PyObject *result = NULL;
    bool complete = true;
    /* Called whatever was raised, also where this thread was refused. */
    if (self->grouped && fcpy_admit_forward(self->state) != 0) {
        return NULL;
    }
    if (self->grouped) {
        int found = PySet_Discard(self->state->modules_to_run, module);
        if (found < 0) {
            return NULL;
        }
        complete = found == 1 && PySet_GET_SIZE(self->state->modules_to_run) == 0;
    }
    result = complete ? fcpy_state_post_forward(self->state, module, input, output)
                      : fcpy_state_cast_output(self->state, output);
    if (result == output) {
        Py_DECREF(result);
        Py_RETURN_NONE;
    }
    return result;
}

static PyObject *hook_call(PyObject *callable, PyObject *const *args, size_t nargsf,
                           PyObject *kwnames) {
    fcpy_hook *self = (fcpy_hook *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (count != 3 || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)) {
        PyErr_Format(PyExc_TypeError, "a forward hook takes 3 arguments, got %zd", count);
        return NULL;
    }
    fcpy_module *mod = self->state->mod;
    PyObject *paused = fcpy_dynamo_pause(mod);
    fcpy_calls_enter(mod);
    PyObject *result = self->kind == HOOK_PRE_FORWARD
                           ? run_pre_forward(self, args[0], args[1], args[2])
                           : run_post_forward(self, args[0], args[1], args[2]);
    fcpy_calls_leave(mod);
    fcpy_dynamo_resume(mod, paused);
    return result;
}

/* Hook(state, post, modules=None) */
static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"state", "post", "modules", NULL};
    PyObject *state = NULL;
    PyObject *modules = Py_None;
    int post = 0;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!p|O", keywords,
                                                    mod->state_type, &state, &post, &modules)) {
        return NULL;
    }
    fcpy_hook *self = (fcpy_hook *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = hook_call;
    self->kind = post ? HOOK_POST_FORWARD : HOOK_PRE_FORWARD;
    self->grouped = modules != Py_None;
    Py_INCREF(state);
    self->state = (fcpy_state *)state;
    Py_INCREF(modules);
    self->modules = modules;
    return (PyObject *)self;
}

static int hook_traverse(PyObject *obj, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT((PyObject *)((fcpy_hook *)obj)->state);
    Py_VISIT(((fcpy_hook *)obj)->modules);
    return 0;
}

static int hook_clear(PyObject *obj) {
    (void)obj; /* the state breaks the cycle: a hook without its state could be called */
    return 0;
}

static void hook_dealloc(PyObject *obj) {
    fcpy_hook *self = (fcpy_hook *)obj;
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    Py_CLEAR(self->state);
    Py_CLEAR(self->modules);
    type->tp_free(obj);
    Py_DECREF(type);
}

static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(fcpy_hook, vectorcall), READONLY, NULL},
    {"state", T_OBJECT, offsetof(fcpy_hook, state), READONLY, "The state whose hook this is."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_new, (void *)hook_new},
    {Py_tp_dealloc, (void *)hook_dealloc},
    {Py_tp_call, (void *)PyVectorcall_Call},
    {Py_tp_traverse, (void *)hook_traverse},
    {Py_tp_clear, (void *)hook_clear},
    {Py_tp_members, hook_members},
    {Py_tp_doc, "Hook(state, post, modules=None): a forward (pre-)hook for a module."},
    {0, NULL},
};

PyType_Spec fcpy_hook_spec = {
    .name = "fsdp_c._C.Hook",
    .basicsize = sizeof(fcpy_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = hook_slots,
};
