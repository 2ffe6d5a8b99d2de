/* Who may enter a state's forward or backward. Owns nothing.
 *
 * No tracer that runs the model on tensors without memory: what is gathered then would be kept.
 * And one thread at a time: a second one would use what the first has gathered, and free it.
 *
 * Compares thread numbers before anything of a state is changed, so that the thread which is
 * refused leaves the other unharmed. Threads may follow one another, and a forward may hand units
 * to threads of its own: only the same state, or a backward under the same root, is refused.
 * Autograd's threads (accelerators have their own) recompute forwards and run hooks in the name of
 * whoever called backward. */
#include "admit.h"

/* "module 'name' (Class)" of the state; new reference, or NULL with an exception. */
static PyObject *describe(fcpy_state *self) {
    PyObject *fqn = PyTuple_GET_SIZE(self->groups) > 0
                        ? ((fcpy_group *)PyTuple_GET_ITEM(self->groups, 0))->fqn
                        : NULL;
    PyObject *modules = PyObject_GetAttr((PyObject *)self, self->mod->names._modules);
    if (modules == NULL) {
        return NULL;
    }
    const char *cls = PyTuple_Check(modules) && PyTuple_GET_SIZE(modules) > 0
                          ? Py_TYPE(PyTuple_GET_ITEM(modules, 0))->tp_name
                          : "?";
    PyObject *text = fqn != NULL && PyUnicode_GET_LENGTH(fqn) > 0
                         ? PyUnicode_FromFormat("module '%U' (%s)", fqn, cls)
                         : PyUnicode_FromFormat("the root module (%s)", cls);
    Py_DECREF(modules);
    return text;
}

static int refuse(fcpy_state *self, const char *pass) {
    PyObject *module = describe(self);
    if (module != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "another thread is in the %s of %U already\n"
                     "A sharded model runs in one thread at a time, since its parameters are "
                     "gathered in place: let the threads take turns (a lock around forward and "
                     "backward), or give each a model of its own. Where the other thread has left "
                     "by an exception, call reset_iter_state() on the root first.",
                     pass, module);
        Py_DECREF(module);
    }
    return -1;
}

/* The graph of such a forward would go when torch itself has gone in parts: it ends the process. */
static int refuse_at_the_end(fcpy_state *self) {
    PyObject *module = describe(self);
    if (module != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "%U cannot be trained while the interpreter shuts down\n"
            "Train before that, in a function of atexit for example, and not in __del__ of "
            "an object that outlives the program.",
            module);
        Py_DECREF(module);
    }
    return -1;
}

/* fsdp_c/state.py decides. */
static int check_modes(fcpy_state *self) {
    PyObject *none = PyObject_CallMethod((PyObject *)self, "_check_modes", NULL);
    Py_XDECREF(none);
    return none != NULL ? 0 : -1;
}

int fcpy_admit_forward(fcpy_state *self) {
    const unsigned long me = PyThread_get_thread_ident();
    fcpy_iteration *it = (fcpy_iteration *)self->iteration;
    const bool inside = self->entering || self->core.training_state == FC_FORWARD;
    if (inside && self->thread != me && !fct_in_backward()) {
        return refuse(self, "forward");
    }
    if (it != NULL && it->core.callback_queued && it->backward_thread != me &&
        it->forward_thread != me && !fct_in_backward()) {
        return refuse(self, "backward");
    }
    const bool first = it != NULL && it->core.forward_root == NULL;
    if (first && fct_py_ending() && fct_grad_enabled()) {
        return refuse_at_the_end(self);
    }
    if (first && fct_watched() && check_modes(self) != 0) {
        return -1;
    }
    self->thread = me;
    if (first) {
        it->forward_thread = me;
    }
    return 0;
}

int fcpy_admit_backward(fcpy_state *self) {
    const unsigned long me = PyThread_get_thread_ident();
    fcpy_iteration *it = (fcpy_iteration *)self->iteration;
    const bool own_threads = self->core.comm->has_streams; /* of autograd, for the device */
    if (!own_threads && it->core.forward_root != NULL && it->forward_thread != me) {
        return refuse((fcpy_state *)it->core.forward_root->owner, "forward");
    }
    if (!own_threads && it->core.callback_queued && it->backward_thread != me) {
        return refuse(self, "backward");
    }
    if (!it->core.callback_queued) {
        it->backward_thread = me;
    }
    return 0;
}
