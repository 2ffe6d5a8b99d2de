/* The Hook type: the callable in a module's forward (pre-)hooks. A call runs the functions of
 * step.c. Owns its state and, if the state has several modules, a weak set of those modules. Also
 * owns `torch_hook`, the callable that torch registers: a method bound to the state, or a function
 * around it.
 *
 * Attributes, comparisons, hash and repr are those of `torch_hook`, so that programs that search
 * for torch's hooks find this hook. Under torch.compile dynamo breaks the graph at the hook and
 * calls it. */
#include "hook.h"

#include "check_thread.h"
#include "deferred_decref.h"
#include "dynamo.h"
#include "freed_modules.h"
#include "step.h"
#include "transitions.h"

/* A callable that is registered on a module. */
typedef struct fcpy_hook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    fcpy_state *state;    /* owned */
    bool post;            /* a post-forward hook, else a pre-forward hook */
    PyObject *modules;    /* weakref.WeakSet of the state's modules if it has several, else None */
    PyObject *torch_hook; /* torch's callable; never NULL */
    PyObject *weakrefs;
} fcpy_hook;

/* Pre-forward hook. Returns (args, kwargs), or None if neither changed. */
static PyObject *run_pre_forward(fcpy_hook *self, PyObject *module, PyObject *args,
                                 PyObject *kwargs) {
    PyObject *new_args = args;
    PyObject *new_kwargs = kwargs;
    PyObject *result = NULL;
    if (fcpy_check_forward_thread(self->state) != 0) {
        return NULL;
    }
    if (self->modules != Py_None && PySet_GET_SIZE(self->state->modules_to_run) == 0) {
        if (fcpy_drop_result(PyObject_CallMethod(self->state->modules_to_run, "update", "(O)",
                                                 self->modules)) != 0) {
            return NULL;
        }
    }
    Py_INCREF(new_args);
    Py_INCREF(new_kwargs);
    const bool was_entering = self->state->entering;
    self->state->entering = true;
    const int failed = fcpy_state_pre_forward(self->state, module, &new_args, &new_kwargs);
    self->state->entering = was_entering;
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

/* Post-forward hook. Returns the new output, or None if it did not change. */
static PyObject *run_post_forward(fcpy_hook *self, PyObject *module, PyObject *input,
                                  PyObject *output) {
    PyObject *result = NULL;
    bool complete = true;
    /* torch also calls this hook after an exception, even if pre-forward has refused this thread.
     */
    if (self->modules != Py_None && fcpy_check_forward_thread(self->state) != 0) {
        return NULL;
    }
    if (self->modules != Py_None) {
        int removed = PySet_Discard(self->state->modules_to_run, module);
        if (removed < 0) {
            return NULL;
        }
        complete = removed == 1 && PySet_GET_SIZE(self->state->modules_to_run) == 0;
    }
    if (!complete) {
        fcpy_state_refresh(self->state);
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
        /* nn.Module is not the caller. torch's callable checks the arguments. */
        return PyObject_Vectorcall(self->torch_hook, args, nargsf, kwnames);
    }
    fcpy_module *mod = self->state->mod;
    PyObject *dynamo_callback = fcpy_dynamo_pause(mod);
    fcpy_calls_enter(mod);
    PyObject *result = self->post ? run_post_forward(self, args[0], args[1], args[2])
                                  : run_pre_forward(self, args[0], args[1], args[2]);
    fcpy_calls_leave(mod);
    fcpy_dynamo_resume(mod, dynamo_callback);
    return result;
}

/* Hook(state, post, torch_hook, modules=None) */
static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"state", "post", "torch_hook", "modules", NULL};
    PyObject *state = NULL;
    PyObject *torch_hook = NULL;
    PyObject *modules = Py_None;
    int post = 0;
    fcpy_module *mod = fcpy_module_of(type);
    if (mod == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!pO|O", keywords, mod->state_type, &state,
                                     &post, &torch_hook, &modules)) {
        return NULL;
    }
    if (!PyCallable_Check(torch_hook)) {
        PyErr_Format(PyExc_TypeError, "Hook: torch_hook must be callable, got %s",
                     Py_TYPE(torch_hook)->tp_name);
        return NULL;
    }
    fcpy_hook *self = (fcpy_hook *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = hook_call;
    self->post = post != 0;
    fcpy_hook_retain(state);
    self->state = (fcpy_state *)state;
    self->state->has_hooks = true;
    Py_INCREF(modules);
    self->modules = modules;
    Py_INCREF(torch_hook);
    self->torch_hook = torch_hook;
    return (PyObject *)self;
}

/* ---- attributes, comparison and copies are those of torch's callable ---- */

static PyObject *torch_hook_of(PyObject *obj) {
    return ((fcpy_hook *)obj)->torch_hook;
}

/* Forwards __class__ too, so that isinstance(hook, types.MethodType) and inspect.ismethod() return
 * the same as in torch. */
static PyObject *hook_getattro(PyObject *obj, PyObject *name) {
    if (PyUnicode_CompareWithASCIIString(name, "__reduce_ex__") == 0) {
        return PyObject_GenericGetAttr(obj, name);
    }
    return PyObject_GetAttr(torch_hook_of(obj), name);
}

static int hook_setattro(PyObject *obj, PyObject *name, PyObject *value) {
    return PyObject_SetAttr(torch_hook_of(obj), name, value);
}

static PyObject *hook_richcompare(PyObject *obj, PyObject *other, int operation) {
    if (Py_IS_TYPE(other, Py_TYPE(obj))) {
        other = torch_hook_of(other);
    }
    return PyObject_RichCompare(torch_hook_of(obj), other, operation);
}

static Py_hash_t hook_hash(PyObject *obj) {
    return PyObject_Hash(torch_hook_of(obj));
}

static PyObject *hook_repr(PyObject *obj) {
    return PyObject_Repr(torch_hook_of(obj));
}

/* For copy and pickle. A method is restored as an attribute of its state. For a function the result
 * is its name: copy.copy then returns the hook itself, and pickle raises, because no module has the
 * hook under that name. */
static PyObject *hook_reduce_ex(PyObject *obj, PyObject *protocol) {
    PyObject *torch_hook = torch_hook_of(obj);
    if (PyFunction_Check(torch_hook)) {
        return PyObject_GetAttrString(torch_hook, "__qualname__");
    }
    return PyObject_CallMethod(torch_hook, "__reduce_ex__", "O", protocol);
}

static int hook_traverse(PyObject *obj, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT((PyObject *)((fcpy_hook *)obj)->state);
    Py_VISIT(((fcpy_hook *)obj)->modules);
    Py_VISIT(((fcpy_hook *)obj)->torch_hook);
    return 0;
}

static int hook_clear(PyObject *obj) {
    (void)obj; /* a hook must keep its state, so the state breaks the cycle */
    return 0;
}

static void hook_dealloc(PyObject *obj) {
    fcpy_hook *self = (fcpy_hook *)obj;
    PyTypeObject *type = Py_TYPE(obj);
    PyObject_GC_UnTrack(obj);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(obj);
    }
    Py_CLEAR(self->modules);
    Py_CLEAR(self->torch_hook);
    fcpy_hook_release(self->state);
    type->tp_free(obj);
    Py_DECREF(type);
}

static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(fcpy_hook, vectorcall), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fcpy_hook, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef hook_methods[] = {
    {"__reduce_ex__", hook_reduce_ex, METH_O, "Copies and pickles the hook as torch's callable."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_new, (void *)hook_new},
    {Py_tp_dealloc, (void *)hook_dealloc},
    {Py_tp_call, (void *)PyVectorcall_Call},
    {Py_tp_traverse, (void *)hook_traverse},
    {Py_tp_clear, (void *)hook_clear},
    {Py_tp_members, hook_members},
    {Py_tp_methods, hook_methods},
    {Py_tp_getattro, (void *)hook_getattro},
    {Py_tp_setattro, (void *)hook_setattro},
    {Py_tp_richcompare, (void *)hook_richcompare},
    {Py_tp_hash, (void *)hook_hash},
    {Py_tp_repr, (void *)hook_repr},
    {Py_tp_doc,
     "Hook(state, post, torch_hook, modules=None): a forward (pre-)hook for a module, with "
     "the attributes of `torch_hook`."},
    {0, NULL},
};

PyType_Spec fcpy_hook_spec = {
    .name = "fsdp_c._C.Hook",
    .basicsize = sizeof(fcpy_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = hook_slots,
};
