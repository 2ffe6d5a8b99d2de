/* The work of a state's hooks during a training step: before and after forward, at the first
 * gradient of an output, in the post-backward node and at the end of backward. Each hook is one C
 * call, without Python frames unless methods are overridden. An overridden or patched method is
 * called where torch would call it. Overridden methods of a group are detected before each call of
 * a transition that reaches the group (transitions.h). */
#include "step.h"

#include <time.h>

#include "../bridge/pyobject.h"
#include "attributes.h"
#include "check_initialized.h"
#include "check_thread.h"
#include "deferred_decref.h"
#include "dynamo.h"
#include "freed_modules.h"
#include "guard.h"
#include "transitions.h"
#include "tree.h"

static fcpy_group *group_at(const fcpy_state *self, size_t index) {
    return (fcpy_group *)self->core.groups[index]->base.owner;
}

/* ---- callbacks of autograd ---- */

/* Calls `run` with dynamo disabled, because the backward may be part of a compiled function.
 * autograd calls fcpy_param_grad_arrived and the functions call_*. Each function call_* passes the
 * function run_* of the same name. */
static int run_untraced(fcpy_module *mod, int (*run)(void *owner), void *owner) {
    PyObject *dynamo_callback = fcpy_dynamo_pause(mod);
    fcpy_calls_enter(mod);
    int result = run(owner);
    fcpy_calls_leave(mod);
    fcpy_dynamo_resume(mod, dynamo_callback);
    return result;
}

/* Clears, for all states of the root, the sets of modules that have not run in this forward. */
static int reset_modules_to_run(const fcpy_state *self) {
    PyObject *states = ((fcpy_iteration *)self->iteration)->all_states;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(states); i++) {
        if (PySet_Clear(((fcpy_state *)PyTuple_GET_ITEM(states, i))->modules_to_run) != 0) {
            return -1;
        }
    }
    return 0;
}

int fcpy_state_reset(fcpy_state *self) {
    if (reset_modules_to_run(self) != 0) {
        return -1;
    }
    fcpy_state_refresh_iteration(self);
    return fcpy_state_check_status(self, fc_state_reset(&self->core));
}

int fcpy_state_end_backward(fcpy_state *self) {
    fcpy_log(self->mod, Py_None, "root_post_backward");
    /* Calls of single modules after the forward have filled the sets again. */
    if (reset_modules_to_run(self) != 0) {
        return -1;
    }
    fcpy_state_refresh_iteration(self);
    void *range = fct_profile_enter("FSDP::root_post_backward_callback");
    fc_status status = fc_iteration_end_backward(self->core.iteration, self->core.comm);
    fct_profile_exit(range);
    return fcpy_state_check_status(self, status);
}

static int run_end_backward(void *owner) {
    fcpy_state *self = (fcpy_state *)owner;
    fcpy_state_refresh(self);
    if ((self->replaced & FCPY_STATE_END) != 0) {
        return fcpy_drop_result(
            PyObject_CallMethod((PyObject *)owner, "_root_post_backward_final_callback", NULL));
    }
    return fcpy_state_end_backward(self);
}

static int call_end_backward(void *owner) {
    return run_untraced(((fcpy_state *)owner)->mod, run_end_backward, owner);
}

/* The iteration counts the end-of-backward callbacks that autograd holds. autograd releases a
 * callback after the call, or when autograd abandons the backward. */
static void retain_end_callback(void *owner) {
    fcpy_iteration *iteration = (fcpy_iteration *)((fcpy_state *)owner)->iteration;
    iteration->core.callbacks++;
    iteration->was_awaited = false;
    fcpy_retain(owner);
}

static void release_end_callback(void *owner) {
    fcpy_iteration *iteration = (fcpy_iteration *)((fcpy_state *)owner)->iteration;
    /* The iteration is NULL after the garbage collector has cleared the state. callbacks is 0 if
     * the iteration was replaced after retain_end_callback. */
    if (iteration != NULL && iteration->core.callbacks > 0) {
        iteration->core.callbacks--;
    }
    fcpy_release(owner);
}

int fcpy_state_pre_backward(fcpy_state *self) {
    const fct_hook at_end = {self, call_end_backward, retain_end_callback, release_end_callback};
    if (fcpy_check_backward_thread(self) != 0) {
        return -1;
    }
    fcpy_state_refresh(self);
    if ((self->replaced & FCPY_STATE_QUEUE_END) != 0) {
        self->core.training_state = FC_PRE_BACKWARD;
        if (fcpy_drop_result(PyObject_CallMethod(
                (PyObject *)self, "_register_root_post_backward_final_callback", NULL)) != 0) {
            return -1;
        }
    }
    fcpy_state_refresh_pre_backward(self);
    return fcpy_state_check_status(self, fc_state_pre_backward(&self->core, &at_end));
}

static int run_pre_backward(void *owner) {
    return fcpy_state_pre_backward((fcpy_state *)owner);
}

static int call_pre_backward(void *owner) {
    return run_untraced(((fcpy_state *)owner)->mod, run_pre_backward, owner);
}

/* Returns a new tuple of the gradients that pass through the running node. */
static PyObject *current_grads(void) {
    size_t count = 0;
    fct_tensor *const *grads = fct_autograd_node_grads(&count);
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *grad = NULL;
        if (fct_py_from_tensor(grads[i], &grad) != 0) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, grad);
    }
    return tuple;
}

/* Runs a patched backward of torch's node: node_backward(group, grads) calls it and returns the
 * gradients that replace `grads`. */
static int run_patched_node(fcpy_group *group) {
    int result = -1;
    PyObject *grads = current_grads();
    PyObject *new_grads = grads != NULL
                              ? PyObject_CallFunctionObjArgs(group->mod->bound.node_backward,
                                                             (PyObject *)group, grads, NULL)
                              : NULL;
    if (new_grads == NULL) {
        goto done;
    }
    if (!PyTuple_Check(new_grads) || PyTuple_GET_SIZE(new_grads) != PyTuple_GET_SIZE(grads)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "RegisterPostBackwardFunction.backward must return None and one gradient "
                        "for each gradient that it receives");
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(new_grads); i++) {
        fct_tensor *grad = fct_py_tensor(PyTuple_GET_ITEM(new_grads, i));
        if (grad != NULL) {
            fct_autograd_node_set_grad((size_t)i, grad);
        }
    }
    result = 0;
done:
    Py_XDECREF(grads);
    Py_XDECREF(new_grads);
    return result;
}

/* Double backward: a backward enters the graph that an earlier backward has recorded between the
 * gradients of the group's outputs and of its inputs. */
static int enter_double_backward(fcpy_state *self) {
    const fct_hook at_end = {self, call_end_backward, retain_end_callback, release_end_callback};
    if (!fcpy_state_check_initialized(self) || fcpy_check_backward_thread(self) != 0) {
        return -1;
    }
    fcpy_state_refresh_groups(self);
    return fcpy_state_check_status(self, fc_state_pre_double_backward(&self->core, &at_end));
}

static int run_pre_double_backward(void *owner) {
    fcpy_state *unit = fcpy_group_unit((fcpy_group *)owner);
    const int result = unit != NULL ? enter_double_backward(unit) : 0; /* NULL: it was freed */
    Py_XDECREF(unit);
    return result;
}

static int call_pre_double_backward(void *owner) {
    return run_untraced(((fcpy_group *)owner)->mod, run_pre_double_backward, owner);
}

/* In a backward with create_graph, the gradients that leave the group are outputs of a new graph. A
 * later backward enters that graph there and needs the parameters again. */
static int hook_recorded_grads(fcpy_group *group) {
    const fct_hook hook = {group, call_pre_double_backward, fcpy_retain, fcpy_release};
    size_t count = 0;
    fct_tensor *const *grads = fct_autograd_node_grads(&count);
    for (size_t i = 0; group->unit != NULL && i < count; i++) {
        if (fct_tensor_requires_grad(grads[i]) && fct_autograd_on_grad(grads[i], &hook) != 0) {
            return -1;
        }
    }
    return 0;
}

static int run_post_backward(void *owner) {
    fcpy_group *group = (fcpy_group *)owner;
    int result = 0;
    fcpy_group_refresh(group);
    if ((group->replaced & FCPY_CALL_NODE) != 0) {
        result = run_patched_node(group);
    } else {
        result = fcpy_group_check_status(group, fc_group_leave_backward(&group->core));
    }
    fcpy_state *unit = result == 0 ? fcpy_group_unit(group) : NULL;
    if (unit != NULL) {
        fc_status status = unit->core.iteration != NULL
                               ? fc_state_post_backward(&unit->core, &group->core)
                               : FC_OK;
        result = fcpy_group_check_status(group, status);
        Py_DECREF(unit);
    }
    return result == 0 && fct_grad_enabled() ? hook_recorded_grads(group) : result;
}

static int call_post_backward(void *owner) {
    return run_untraced(((fcpy_group *)owner)->mod, run_post_backward, owner);
}

static int run_reduce_buckets(void *owner) {
    fcpy_group *group = (fcpy_group *)owner;
    fcpy_group_refresh(group);
    return fcpy_group_check_status(group, fc_group_reduce_buckets(&group->core));
}

int fcpy_param_grad_arrived(void *owner) {
    fcpy_param *param = (fcpy_param *)owner;
    if (!fc_bucket_arrived(&param->core)) {
        return 0;
    }
    fcpy_group *group = (fcpy_group *)param->core.buckets->base->owner;
    Py_INCREF(group);
    int result = run_untraced(group->mod, run_reduce_buckets, group);
    Py_DECREF(group);
    return result;
}

/* ---- casts ---- */

static int cast_inputs(fcpy_state *self, PyObject **args, PyObject **kwargs) {
    if ((self->replaced & FCPY_STATE_CAST_INPUTS) != 0) {
        return fcpy_unpack_pair(
            PyObject_CallMethod((PyObject *)self, "_cast_forward_inputs", "OO", *args, *kwargs),
            args, kwargs);
    }
    if (self->input_dtype == FCT_NO_DTYPE) {
        return 0;
    }
    void *range = fct_profile_enter("FSDP::cast_forward_inputs");
    int result = fcpy_cast_inputs(self->mod, self->input_dtype, args, kwargs);
    fct_profile_exit(range);
    return result;
}

PyObject *fcpy_state_cast_output(fcpy_state *self, PyObject *output) {
    if ((self->replaced & FCPY_STATE_CAST_OUTPUT) != 0) {
        return PyObject_CallMethod((PyObject *)self, "_cast_output_dtype", "(O)", output);
    }
    if (self->output_dtype == FCT_NO_DTYPE) {
        Py_INCREF(output);
        return output;
    }
    void *range = fct_profile_enter("FSDP::cast_forward_outputs");
    PyObject *result = fcpy_cast_output(self->mod, self->output_dtype, output);
    fct_profile_exit(range);
    return result;
}

/* ---- before forward ---- */

/* Orders the gathers of this iteration after the optimizer's step: after the event that the user
 * has set for this iteration, else after all work of the compute stream. */
static int begin_iteration(fcpy_state *self) {
    fcpy_iteration *iteration = (fcpy_iteration *)self->iteration;
    bool after_compute = iteration->post_optim_event == NULL;
    if (!after_compute) {
        if (fcpy_drop_result(PyObject_CallMethodOneArg(self->comm, self->mod->names._gather_after,
                                                       iteration->post_optim_event)) != 0) {
            return -1;
        }
        Py_CLEAR(iteration->post_optim_event);
    }
    return fcpy_state_check_status(self, fc_state_begin_iteration(&self->core, after_compute));
}

int fcpy_state_begin_forward(fcpy_state *self, PyObject **args, PyObject **kwargs) {
    if (self->is_root == Py_None) {
        if (fcpy_drop_result(
                PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._lazy_init)) != 0) {
            return -1;
        }
    }
    if (self->core.iteration->forward_root != NULL) {
        return 0;
    }
    fcpy_log(self->mod, Py_None, "root_pre_forward");
    void *range = fct_profile_enter("FSDP::root_pre_forward");
    int result = begin_iteration(self);
    if (result == 0 && self->moves_inputs) {
        result = fcpy_unpack_pair(PyObject_CallMethodObjArgs((PyObject *)self,
                                                             self->mod->names._inputs_to_device,
                                                             *args, *kwargs, NULL),
                                  args, kwargs);
    }
    if (result != 0 && self->core.iteration->forward_root == &self->core) {
        self->core.iteration->forward_root = NULL; /* the next forward moves its inputs */
    }
    fct_profile_exit(range);
    return result;
}

static int begin_forward(fcpy_state *self, PyObject *module, PyObject **args, PyObject **kwargs) {
    if ((self->replaced & FCPY_STATE_ROOT_PRE_FORWARD) != 0) {
        return fcpy_unpack_pair(PyObject_CallMethod((PyObject *)self, "_root_pre_forward", "OOO",
                                                    module, *args, *kwargs),
                                args, kwargs);
    }
    return fcpy_state_begin_forward(self, args, kwargs);
}

int fcpy_group_insert_node(fcpy_group *self, PyObject **args, PyObject **kwargs) {
    if (fct_has_functorch() || (self->replaced & FCPY_CALL_NODE_CLASS) != 0) {
        return fcpy_unpack_pair(PyObject_CallFunctionObjArgs(self->mod->bound.insert_node,
                                                             (PyObject *)self, *args, *kwargs,
                                                             NULL),
                                args, kwargs);
    }
    const fct_hook hook = {self, call_post_backward, fcpy_retain, fcpy_release};
    return fct_grad_enabled() ? fcpy_insert_node(self->mod, &hook, args, kwargs) : 0;
}

static int insert_node(fcpy_group *self, PyObject **args, PyObject **kwargs) {
    if ((self->replaced & FCPY_CALL_INSERT_NODE) != 0) {
        return fcpy_unpack_pair(PyObject_CallMethod((PyObject *)self,
                                                    "_register_post_backward_hook", "OO", *args,
                                                    *kwargs),
                                args, kwargs);
    }
    return fcpy_group_insert_node(self, args, kwargs);
}

int fcpy_group_pre_forward(fcpy_group *self, PyObject **args, PyObject **kwargs) {
    bool entering = false;
    if (fcpy_group_check_status(self, fc_group_pre_forward(&self->core, &entering)) != 0) {
        return -1;
    }
    return entering ? insert_node(self, args, kwargs) : 0;
}

static int enter_groups(fcpy_state *self, PyObject *module, PyObject **args, PyObject **kwargs) {
    fcpy_state_refresh_groups(self); /* after lazy init and the casts, which may run user code */
    for (size_t i = 0; i < self->core.group_count; i++) {
        fcpy_group *group = group_at(self, i);
        int failed = (group->replaced & FCPY_CALL_PRE_FORWARD) != 0
                         ? fcpy_unpack_pair(PyObject_CallMethod((PyObject *)group, "pre_forward",
                                                                "OOO", module, *args, *kwargs),
                                            args, kwargs)
                         : fcpy_group_pre_forward(group, args, kwargs);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* Waits up to 2 ms for autograd to release the callback of a failed backward. A device thread of
 * autograd reports the exception before it releases the callback, and may need the GIL to do so.
 * Waits once per backward, because the backward may still be running in another thread. */
static void await_autograd(fcpy_iteration *iteration) {
    const struct timespec interval = {0, 100000};
    iteration->was_awaited = true;
    for (int i = 0; i < 20 && iteration->core.callbacks > 0; i++) {
        PyThreadState *thread = PyEval_SaveThread();
        (void)nanosleep(&interval, NULL);
        PyEval_RestoreThread(thread);
    }
}

/* Whether the latest backward is lost: autograd has released its end-of-backward callback without
 * calling it, because the backward has raised. */
static bool follows_a_lost_backward(const fcpy_state *self) {
    fcpy_iteration *iteration = (fcpy_iteration *)self->iteration;
    if (!iteration->core.callback_counted || fct_in_backward()) {
        return false;
    }
    if (self->core.comm->has_streams && !iteration->was_awaited) {
        await_autograd(iteration);
    }
    return fc_iteration_is_lost(&iteration->core);
}

/* Resets the states after a backward that has raised. Without the reset, the states would treat
 * each later forward as a recomputation, and no gradients would be reduced again. */
static int recover_from_lost_backward(fcpy_state *self) {
    if (fcpy_drop_result(
            PyObject_CallOneArg(self->mod->bound.warn_lost_backward, (PyObject *)self)) != 0) {
        return -1;
    }
    return fcpy_state_reset(self);
}

int fcpy_state_pre_forward(fcpy_state *self, PyObject *module, PyObject **args, PyObject **kwargs) {
    if (!fcpy_state_check_initialized(self)) {
        return -1;
    }
    if (follows_a_lost_backward(self) && recover_from_lost_backward(self) != 0) {
        return -1;
    }
    fcpy_state_refresh(self);
    if (self->core.training_state == FC_PRE_BACKWARD) {
        fcpy_state_refresh_groups(self);
        return fcpy_state_check_status(self, fc_state_recompute(&self->core)) == 0
                   ? cast_inputs(self, args, kwargs)
                   : -1;
    }
    bool first = self->core.training_state != FC_FORWARD;
    self->core.training_state = FC_FORWARD;
    if (first && begin_forward(self, module, args, kwargs) != 0) {
        self->core.training_state = FC_IDLE; /* as before this forward */
        return -1;
    }
    if (cast_inputs(self, args, kwargs) != 0 || enter_groups(self, module, args, kwargs) != 0) {
        return -1;
    }
    if (first && self->core.forward_prefetch_count > 0) {
        fcpy_state_refresh_forward_prefetch(self);
        return fcpy_state_check_status(self, fc_state_forward_prefetch(&self->core));
    }
    return 0;
}

/* ---- after forward ---- */

/* Registers hooks on the outputs' gradients. Returns a new reference to `output`, or to the result
 * of an overridden method. */
static PyObject *hook_outputs(fcpy_state *self, PyObject *output) {
    const fct_hook hook = {self, call_pre_backward, fcpy_hook_retain, fcpy_hook_release};
    /* Within functorch's transforms, requires_grad of an output may be false although it has a
     * gradient. */
    if (fct_has_functorch() ||
        (self->replaced & (FCPY_STATE_HOOK_OUTPUT | FCPY_STATE_PRE_BACKWARD)) != 0) {
        self->hooks++; /* never decremented: Python's hook does not report that it is freed */
        return PyObject_CallMethod((PyObject *)self, "_register_pre_backward_hook", "(O)", output);
    }
    if (fct_grad_enabled() && fcpy_hook_outputs(self->mod, (PyObject *)self, &hook, output) != 0) {
        return NULL;
    }
    Py_INCREF(output);
    return output;
}

/* Runs post-forward of the state's groups. Steals output. Returns a new reference to `output`, or
 * to the result of an overridden method. */
static PyObject *leave_groups(fcpy_state *self, PyObject *module, PyObject *input,
                              PyObject *output) {
    fcpy_state_refresh_groups(self);
    for (size_t i = 0; output != NULL && i < self->core.group_count; i++) {
        fcpy_group *group = group_at(self, i);
        if ((group->replaced & FCPY_CALL_POST_FORWARD) != 0) {
            Py_SETREF(output, PyObject_CallMethod((PyObject *)group, "post_forward", "OOO", module,
                                                  input, output));
            continue;
        }
        if (fcpy_group_check_status(group, fc_group_post_forward(&group->core)) != 0) {
            Py_CLEAR(output);
        }
    }
    return output;
}

/* Runs leave_groups and hook_outputs. Steals output; returns a new reference. */
static PyObject *leave_forward(fcpy_state *self, PyObject *module, PyObject *input,
                               PyObject *output) {
    output = leave_groups(self, module, input, output);
    if (output == NULL) {
        return NULL;
    }
    Py_SETREF(output, hook_outputs(self, output));
    return output;
}

/* Ends the forward of a multi-module state of which some modules did not run, and casts the output.
 * Steals output; returns a new reference. */
static PyObject *complete_partial_forward(fcpy_state *state, PyObject *output) {
    fcpy_log(state->mod, Py_None, "force_complete_post_forward");
    fcpy_state_refresh(state);
    output = leave_forward(state, Py_None, Py_None, output);
    if (output == NULL) {
        return NULL;
    }
    state->core.training_state = FC_IDLE;
    Py_SETREF(output, fcpy_state_cast_output(state, output));
    if (output != NULL && PySet_Clear(state->modules_to_run) != 0) {
        Py_CLEAR(output);
    }
    return output;
}

/* Calls complete_partial_forward for all states with modules that did not run, except `root`, at
 * the end of the iteration's forward, innermost state first. Steals output. */
static PyObject *complete_partial_forwards(fcpy_state *root, PyObject *output) {
    if ((root->replaced & FCPY_STATE_COMPLETE) != 0) {
        root->core.training_state = FC_IDLE;
        Py_SETREF(output, PyObject_CallMethod((PyObject *)root, "_force_complete_incomplete_states",
                                              "(O)", output));
        return output;
    }
    PyObject *states = ((fcpy_iteration *)root->iteration)->all_states;
    for (Py_ssize_t i = PyTuple_GET_SIZE(states); output != NULL && i-- > 0;) {
        fcpy_state *state = (fcpy_state *)PyTuple_GET_ITEM(states, i);
        if (state != root && PySet_GET_SIZE(state->modules_to_run) > 0) {
            output = complete_partial_forward(state, output);
        }
    }
    return output;
}

PyObject *fcpy_state_post_forward(fcpy_state *self, PyObject *module, PyObject *input,
                                  PyObject *output) {
    if (!fcpy_state_check_initialized(self)) {
        return NULL;
    }
    fcpy_state_refresh(self);
    if (self->core.training_state == FC_PRE_BACKWARD) {
        return fcpy_state_cast_output(self, output);
    }
    Py_INCREF(output);
    output = leave_forward(self, module, input, output);
    if (output != NULL && self->core.iteration->forward_root == &self->core) {
        output = complete_partial_forwards(self, output);
    }
    if (output == NULL) {
        return NULL;
    }
    if (fcpy_state_check_status(self, fc_state_end_forward(&self->core)) != 0) {
        Py_DECREF(output);
        return NULL;
    }
    Py_SETREF(output, fcpy_state_cast_output(self, output));
    return output;
}
