/* The callbacks of the core (core/callbacks.h), for a Param and for a ParamGroup. Every callback
 * runs with the GIL held. */
#include "callbacks.h"

#include "../bridge/pyobject.h"
#include "attributes.h"
#include "deferred_decref.h"
#include "dtensor.h"
#include "extension.h"
#include "shard.h"
#include "slots.h"
#include "step.h"
#include "transitions.h"

/* Calls self.name(tensor). Returns a new reference, or NULL with an exception. */
static PyObject *call_with_tensor(PyObject *self, PyObject *name, fct_tensor *handle) {
    PyObject *tensor = NULL;
    if (fct_py_from_tensor(handle, &tensor) != 0) {
        return NULL;
    }
    PyObject *result = PyObject_CallMethodOneArg(self, name, tensor);
    Py_DECREF(tensor);
    return result;
}

/* ---- a parameter ---- */

static int callback_make_unsharded(void *owner, fct_tensor *flat, fct_tensor **unsharded) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *param = call_with_tensor((PyObject *)self, self->mod->names._make_unsharded, flat);
    if (param == NULL) {
        return -1;
    }
    fct_tensor *handle = fct_py_tensor(param);
    if (handle == NULL) {
        PyErr_SetString(PyExc_TypeError, "_make_unsharded must return a tensor");
        Py_DECREF(param);
        return -1;
    }
    Py_XSETREF(self->unsharded_param, param);
    *unsharded = handle;
    return 0;
}

static int callback_make_post_forward(void *owner, fct_tensor *data) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *param = NULL;
    if (data != NULL) {
        param = call_with_tensor((PyObject *)self, self->mod->names._make_post_forward, data);
        if (param == NULL) {
            return -1;
        }
    }
    PyObject *old = self->post_forward_param;
    self->post_forward_param = param;
    fcpy_defer_decref(self->mod, old);
    return 0;
}

static PyObject *param_of_state(const fcpy_param *self, fc_sharded_state target) {
    if (target == FC_UNSHARDED) {
        return self->unsharded_param;
    }
    return target == FC_SHARDED ? self->sharded_param : self->post_forward_param;
}

static int callback_swap(void *owner, fc_sharded_state target) {
    const fcpy_param *self = (fcpy_param *)owner;
    return fcpy_slots_register(self, param_of_state(self, target));
}

/* Calls the overridden method. While it runs, fsdp_c's methods act on this parameter only. */
static int callback_swap_by_override(void *owner, fc_sharded_state target) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *name = target == FC_SHARDED     ? self->mod->names.to_sharded
                     : target == FC_UNSHARDED ? self->mod->names.to_unsharded
                                              : self->mod->names.to_sharded_post_forward;
    self->swapping = true;
    PyObject *result = PyObject_CallMethodNoArgs((PyObject *)self, name);
    self->swapping = false;
    return fcpy_drop_result(result);
}

/* grad._local_tensor += local */
static int add_to_grad(fcpy_param *self, const fct_tensor *local) {
    int result = -1;
    PyObject *target = NULL;
    PyObject *grad = PyObject_GetAttr(self->sharded_param, self->mod->names.grad);
    if (grad == NULL) {
        return -1;
    }
    const int is_dtensor = PyObject_IsInstance(grad, self->mod->bound.dtensor_class);
    if (is_dtensor <= 0) {
        if (is_dtensor == 0) {
            PyErr_Format(PyExc_AssertionError,
                         "Expected fsdp_param.sharded_param.grad to be DTensor, got %R",
                         (PyObject *)Py_TYPE(grad));
        }
        goto done;
    }
    target = PyObject_GetAttr(grad, self->mod->names._local_tensor);
    fct_tensor *handle = target != NULL ? fct_py_tensor(target) : NULL;
    if (handle == NULL) {
        if (target != NULL) {
            PyErr_SetString(PyExc_TypeError, "_local_tensor of the gradient must be a tensor");
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
    if (self->spec == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: no _sharding_spec for the gradient");
        return -1;
    }
    if (fct_py_from_tensor(local, &tensor) != 0) {
        return -1;
    }
    PyObject *grad = self->core.overrides_grad_dtype
                         ? PyObject_CallMethodOneArg((PyObject *)self,
                                                     self->mod->names.to_sharded_dtensor, tensor)
                         : fcpy_dtensor_new(self->mod, tensor, self->spec);
    Py_DECREF(tensor);
    if (grad == NULL) {
        return -1;
    }
    int result = fct_py_set_grad(self->sharded_param, grad);
    Py_DECREF(grad);
    return result;
}

/* Returns a new reference to the dict of post-accumulate-grad hooks, or NULL without an exception
 * if there are no hooks. */
static PyObject *accumulate_hooks_of(const fcpy_param *self) {
    if (self->sharded_param == NULL) {
        return NULL;
    }
    PyObject *hooks = NULL;
    if ((PyObject *)Py_TYPE(self->sharded_param) == self->mod->bound.dtensor_class) {
        hooks = Py_XNewRef(fct_py_grad_hooks(self->sharded_param));
    } else {
        hooks = PyObject_GetAttr(self->sharded_param, self->mod->names._post_accumulate_grad_hooks);
    }
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
    PyObject *hooks = accumulate_hooks_of(self);
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

/* Returns the tensor that the parameter object wraps now. The handle is not cached, because
 * swap_tensors may replace the tensor and requires that no other reference exists. */
static fct_tensor *sharded_handle(const fcpy_param *self) {
    return self->sharded_param != NULL ? fct_py_tensor(self->sharded_param) : NULL;
}

static bool callback_requires_grad(void *owner) {
    const fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL && fct_tensor_requires_grad(sharded);
}

static int callback_set_requires_grad(void *owner, bool value) {
    fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL ? fct_tensor_set_requires_grad(sharded, value) : 0;
}

static uint32_t callback_shard_version(void *owner) {
    const fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL ? fct_tensor_version(sharded) : 0;
}

static int callback_set_sharded_grad(void *owner, fct_tensor *local) {
    fcpy_param *self = (fcpy_param *)owner;
    const fct_tensor *sharded = sharded_handle(self);
    if (sharded == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: no sharded parameter for the gradient");
        return -1;
    }
    int failed = fct_grad_has(sharded) ? add_to_grad(self, local) : set_new_grad(self, local);
    return failed ? -1 : run_hooks(self);
}

static bool callback_has_grad(void *owner) {
    const fct_tensor *sharded = sharded_handle((const fcpy_param *)owner);
    return sharded != NULL && fct_grad_has(sharded);
}

static bool callback_needs_grad_now(void *owner) {
    PyObject *hooks = accumulate_hooks_of((const fcpy_param *)owner);
    bool has_hooks = hooks != NULL;
    Py_XDECREF(hooks);
    return has_hooks;
}

static int callback_unwrap_grad(void *owner, fct_tensor *grad, fct_tensor **local) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *inner =
        call_with_tensor((PyObject *)self, self->mod->names._get_grad_inner_tensor, grad);
    fct_tensor *handle = inner != NULL ? fct_py_tensor(inner) : NULL;
    if (handle == NULL) {
        if (inner != NULL) {
            PyErr_SetString(PyExc_TypeError, "_get_grad_inner_tensor must return a tensor");
        }
        Py_XDECREF(inner);
        return -1;
    }
    fct_tensor_retain(handle);
    *local = handle;
    Py_DECREF(inner);
    return 0;
}

static int callback_accumulate_grad(void *owner) {
    fcpy_param *self = (fcpy_param *)owner;
    return fcpy_drop_result(PyObject_CallMethodNoArgs(
        (PyObject *)self, self->mod->names.accumulate_unsharded_grad_if_needed));
}

static int callback_to_accumulated_grad(void *owner) {
    fcpy_param *self = (fcpy_param *)owner;
    return fcpy_drop_result(PyObject_CallMethodNoArgs(
        (PyObject *)self, self->mod->names.to_accumulated_grad_if_needed));
}

static int callback_collect_grad(void *owner, fct_tensor **local) {
    fcpy_param *self = (fcpy_param *)owner;
    PyObject *grad = PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._collect_grad);
    fct_tensor *handle = grad != NULL ? fct_py_tensor(grad) : NULL;
    if (handle == NULL && grad != Py_None) {
        if (grad != NULL) {
            PyErr_Format(PyExc_TypeError, "the gradient of parameter '%s' is no tensor but %R",
                         self->core.name != NULL ? self->core.name : "?",
                         (PyObject *)Py_TYPE(grad));
        }
        Py_XDECREF(grad);
        return -1;
    }
    if (handle != NULL) {
        fct_tensor_retain(handle);
    }
    *local = handle;
    Py_DECREF(grad);
    return 0;
}

static void callback_free_unsharded(void *owner) {
    fcpy_param *self = (fcpy_param *)owner;
    fcpy_call_and_report((PyObject *)self, self->mod->names.free_unsharded_param);
}

/* ---- a group ---- */

static int callback_reduce_hook(void *owner, fct_tensor *output) {
    fcpy_group *self = (fcpy_group *)owner;
    return fcpy_drop_result(
        call_with_tensor((PyObject *)self, self->mod->names._run_reduce_hook, output));
}

/* Ranks have different plans, so the process group is not used: the method reads the plans from the
 * store of the process group. */
static int callback_raise_plan_difference(void *owner, const char *process_group,
                                          const fct_plan_result *result) {
    fcpy_group *self = (fcpy_group *)owner;
    (void)fcpy_drop_result(PyObject_CallMethod(
        (PyObject *)self, "_raise_plan_difference", "sLKK", process_group, (long long)result->rank,
        (unsigned long long)result->hashes[0], (unsigned long long)result->hashes[1]));
    return -1;
}

static int callback_gather(void *owner, bool async_op, bool overlaps) {
    fcpy_group *self = (fcpy_group *)owner;
    return fcpy_drop_result(PyObject_CallMethodObjArgs(
        (PyObject *)self, self->mod->names._fallback_gather, async_op ? Py_True : Py_False,
        overlaps ? Py_True : Py_False, NULL));
}

static int check_unsharded(const fcpy_group *self) {
    for (size_t i = 0; i < self->core.base.count; i++) {
        if (self->core.base.params[i]->unsharded == NULL) {
            PyErr_SetString(PyExc_RuntimeError,
                            "the gather did not set _unsharded_param of a parameter");
            return -1;
        }
    }
    return 0;
}

static int callback_copy_out(void *owner, fct_tensor **buffer) {
    fcpy_group *self = (fcpy_group *)owner;
    PyObject *result =
        PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._fallback_copy_out);
    if (result == NULL || check_unsharded(self) != 0) {
        Py_XDECREF(result);
        return -1;
    }
    *buffer = fct_py_tensor(result);
    if (*buffer != NULL) {
        fct_tensor_retain(*buffer);
    }
    Py_DECREF(result);
    return 0;
}

static void callback_drop_gather(void *owner) {
    fcpy_group *self = (fcpy_group *)owner;
    fcpy_call_and_report((PyObject *)self, self->mod->names._fallback_drop_gather);
}

static void callback_drop_reduce(void *owner) {
    fcpy_group *self = (fcpy_group *)owner;
    fcpy_call_and_report((PyObject *)self, self->mod->names._fallback_drop_reduce);
}

/* Makes two new lists: the parameters, and their gradients. Takes the gradients out of `grads`. */
static int make_reduce_lists(fc_param *const *params, fct_tensor **grads, size_t count,
                             PyObject **param_list, PyObject **grad_list) {
    PyObject *new_params = PyList_New((Py_ssize_t)count);
    PyObject *new_grads = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; new_params != NULL && new_grads != NULL && i < count; i++) {
        PyObject *param = (PyObject *)params[i]->owner;
        PyObject *grad = NULL;
        if (fct_py_from_tensor(grads[i], &grad) != 0) {
            Py_CLEAR(new_params);
            break;
        }
        fct_tensor_release(grads[i]); /* the list owns it now */
        grads[i] = NULL;
        Py_INCREF(param);
        PyList_SET_ITEM(new_params, (Py_ssize_t)i, param);
        PyList_SET_ITEM(new_grads, (Py_ssize_t)i, grad);
    }
    if (new_params == NULL || new_grads == NULL) {
        Py_XDECREF(new_params);
        Py_XDECREF(new_grads);
        return -1;
    }
    *param_list = new_params;
    *grad_list = new_grads;
    return 0;
}

static int callback_reduce(void *owner, fc_param *const *params, fct_tensor **grads, size_t count,
                           bool order_compute) {
    fcpy_group *self = (fcpy_group *)owner;
    PyObject *param_list = NULL;
    PyObject *grad_list = NULL;
    if (make_reduce_lists(params, grads, count, &param_list, &grad_list) != 0) {
        return -1;
    }
    PyObject *result =
        PyObject_CallMethodObjArgs((PyObject *)self, self->mod->names._fallback_reduce, param_list,
                                   grad_list, order_compute ? Py_True : Py_False, NULL);
    Py_DECREF(param_list);
    Py_DECREF(grad_list);
    return fcpy_drop_result(result);
}

static int callback_finalize(void *owner) {
    fcpy_group *self = (fcpy_group *)owner;
    return fcpy_drop_result(
        PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._fallback_finalize));
}

const fc_callbacks fcpy_callbacks = {
    .make_unsharded = callback_make_unsharded,
    .extend_inputs = fcpy_extend_inputs,
    .extend_unsharded = fcpy_extend_unsharded,
    .make_post_forward = callback_make_post_forward,
    .swap = callback_swap,
    .swap_by_method = callback_swap_by_override,
    .requires_grad = callback_requires_grad,
    .set_requires_grad = callback_set_requires_grad,
    .shard_version = callback_shard_version,
    .refresh_shard = fcpy_shard_refresh,
    .set_sharded_grad = callback_set_sharded_grad,
    .has_grad = callback_has_grad,
    .needs_grad_now = callback_needs_grad_now,
    .grad_arrived = fcpy_param_grad_arrived,
    .unwrap_grad = callback_unwrap_grad,
    .accumulate_grad = callback_accumulate_grad,
    .to_accumulated_grad = callback_to_accumulated_grad,
    .collect_grad = callback_collect_grad,
    .reduce_hook = callback_reduce_hook,
    .gather = callback_gather,
    .copy_out = callback_copy_out,
    .drop_gather = callback_drop_gather,
    .drop_reduce = callback_drop_reduce,
    .free_unsharded = callback_free_unsharded,
    .reduce = callback_reduce,
    .finalize = callback_finalize,
    .raise_plan_difference = callback_raise_plan_difference,
    .log = fcpy_callback_log,
};
