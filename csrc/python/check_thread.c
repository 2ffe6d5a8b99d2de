/* Checks the calling thread before a state's forward or backward.
 *
 * A second thread would use the parameters that the first thread has gathered, and free them.
 * Therefore one thread at a time may be in the forward or backward of a state. Different threads
 * may use a state one after the other, and a forward may call other sharded modules from threads
 * that it starts. A call is refused only if the other thread uses the same state, or runs a
 * backward under the same root. Autograd's device threads recompute forwards and run hooks for the
 * thread that called backward. A backward runs while autograd holds its end-of-backward callback:
 * callback_counted is true, and the backward is not lost. Pipeline schedules set callback_queued
 * themselves, to prevent that callback.
 *
 * Tracers that run the model on tensors without memory are refused too, because the group would
 * keep the gathered fake tensors. All checks come before the state changes, so a refused call does
 * not affect the other thread. */
#include "check_thread.h"

#include "../bridge/pyobject.h"

/* Returns "module 'name' (Class)" for an error message; a new reference, or NULL with an
 * exception. */
static PyObject *describe_module(fcpy_state *self) {
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

static int raise_concurrent_use(fcpy_state *self, const char *pass) {
    PyObject *module = describe_module(self);
    if (module != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "another thread is in the %s of %U already\n"
                     "A sharded model runs in one thread at a time, because its parameters are "
                     "gathered in place. Take a lock around forward and backward, or use one model "
                     "per thread. If the other thread has left with an exception, call "
                     "reset_iter_state() on the root first.",
                     pass, module);
        Py_DECREF(module);
    }
    return -1;
}

/* Refuses a forward during interpreter shutdown. Its graph would be freed when torch is partly
 * destroyed, which ends the process. */
static int raise_interpreter_shutdown(fcpy_state *self) {
    PyObject *module = describe_module(self);
    if (module != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "%U cannot be trained while the interpreter shuts down\n"
            "Train before that, for example in an atexit function. Do not train in __del__ of "
            "an object that exists until interpreter shutdown.",
            module);
        Py_DECREF(module);
    }
    return -1;
}

/* Calls State._check_modes (fsdp_c/_runtime/state.py), which refuses tracers. */
static int check_modes(fcpy_state *self) {
    return fcpy_drop_result(PyObject_CallMethod((PyObject *)self, "_check_modes", NULL));
}

int fcpy_check_forward_thread(fcpy_state *self) {
    const unsigned long this_thread = PyThread_get_thread_ident();
    fcpy_iteration *iteration = (fcpy_iteration *)self->iteration;
    const bool in_forward = self->entering || self->core.training_state == FC_FORWARD;
    if (in_forward && self->thread != this_thread && !fct_in_backward()) {
        return raise_concurrent_use(self, "forward");
    }
    const bool in_backward = iteration != NULL && iteration->core.callback_counted &&
                             !fc_iteration_is_lost(&iteration->core);
    if (in_backward && iteration->backward_thread != this_thread &&
        iteration->forward_thread != this_thread && !fct_in_backward()) {
        return raise_concurrent_use(self, "backward");
    }
    const bool begins_iteration = iteration != NULL && iteration->core.forward_root == NULL;
    if (begins_iteration && fct_py_is_finalizing() && fct_grad_enabled()) {
        return raise_interpreter_shutdown(self);
    }
    if (begins_iteration && fct_has_observer() && check_modes(self) != 0) {
        return -1;
    }
    self->thread = this_thread;
    if (begins_iteration) {
        iteration->forward_thread = this_thread;
    }
    return 0;
}

int fcpy_check_backward_thread(fcpy_state *self) {
    const unsigned long this_thread = PyThread_get_thread_ident();
    fcpy_iteration *iteration = (fcpy_iteration *)self->iteration;
    /* Autograd runs this device's backward in its own threads. */
    const bool uses_device_threads = self->core.comm->has_streams;
    if (!uses_device_threads && iteration->core.forward_root != NULL &&
        iteration->forward_thread != this_thread) {
        return raise_concurrent_use((fcpy_state *)iteration->core.forward_root->owner, "forward");
    }
    if (!uses_device_threads && iteration->core.callback_counted &&
        iteration->backward_thread != this_thread) {
        return raise_concurrent_use(self, "backward");
    }
    if (!iteration->core.callback_counted) {
        iteration->backward_thread = this_thread;
    }
    return 0;
}
