/* A parameter's shard: its creation from the whole parameter, and the check whether the core's
 * shard is still current.
 *
 * Users may replace the local tensor of the sharded parameter: through `_local_tensor`, `.data` or
 * swap_tensors. Therefore the Param records pointers to the tensors (fcpy_param.shard_identity)
 * when the core receives the shard. Each gather compares the pointers first. Version counters
 * detect changed values: the core's tensor shares the counter of the local tensor. DTensor's
 * operators do not bump the counter of the local tensor, so bump_shard_versions does after
 * optimizer.step().
 */
#include "shard.h"

#include "../bridge/pyobject.h"
#include "dtensor.h"

static bool is_shard_current(const fcpy_param *self) {
    PyObject *local = fcpy_dtensor_peek(self->mod, self->sharded_param);
    return local != NULL && local == self->shard_identity.local &&
           fct_py_storage(local) == self->shard_identity.storage &&
           fct_py_storage(self->sharded_param) == self->shard_identity.wrapper;
}

int fcpy_shard_refresh(void *param) {
    fcpy_param *self = (fcpy_param *)param;
    if (is_shard_current(self)) {
        return 0;
    }
    return fcpy_drop_result(
        PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._refresh_shard));
}

static void record_shard_identity(fcpy_param *self) {
    PyObject *local = fcpy_dtensor_peek(self->mod, self->sharded_param);
    if (!fct_py_is_tensor(local)) {
        local = NULL;
    }
    Py_XINCREF(local);
    Py_XSETREF(self->shard_identity.local, local);
    self->shard_identity.storage = local != NULL ? fct_py_storage(local) : NULL;
    self->shard_identity.wrapper = local != NULL ? fct_py_storage(self->sharded_param) : NULL;
    const fct_tensor *handle = local != NULL ? fct_py_tensor(local) : NULL;
    if (handle != NULL && self->core.sharded_data != NULL) {
        fct_tensor_share_version(self->core.sharded_data, handle);
    }
}

PyObject *fcpy_shard_note(PyObject *param, PyObject *unused) {
    (void)unused;
    record_shard_identity((fcpy_param *)param);
    Py_RETURN_NONE;
}

/* Returns `local` as a DTensor parameter; new reference, NULL with an exception. */
static PyObject *make_parameter(const fcpy_param *self, PyObject *local, bool requires_grad) {
    PyObject *param_object = fcpy_dtensor_new(self->mod, local, self->spec);
    if (param_object == NULL) {
        return NULL;
    }
    fct_tensor *handle = fct_py_tensor(param_object);
    if (handle == NULL || (requires_grad && fct_tensor_set_requires_grad(handle, true) != 0) ||
        PyObject_SetAttr(param_object, self->mod->names._is_param, Py_True) != 0) {
        Py_CLEAR(param_object);
    }
    return param_object;
}

/* Makes this rank's local tensor, and the 1-D tensor of its shard with padding, from `whole`. */
static int cut_shard(const fcpy_param *self, fct_tensor *whole, int dim, fct_tensor **local,
                     fct_tensor **flat) {
    const fc_layout *layout = &self->core.layout;
    const int64_t start = layout->rank * layout->chunk_rows;
    return fct_tensor_cut(whole, dim, start < layout->rows ? start : layout->rows,
                          layout->local_rows, layout->chunk_rows, local, flat);
}

PyObject *fcpy_shard_cut(PyObject *param, PyObject *args) {
    fcpy_param *self = (fcpy_param *)param;
    PyObject *whole = NULL;
    PyObject *local = NULL;
    int dim = 0;
    fct_tensor *handles[2] = {NULL, NULL};
    if (fcpy_check_bound(self->mod) != 0 || !PyArg_ParseTuple(args, "Oi", &whole, &dim)) {
        return NULL;
    }
    fct_tensor *tensor = fct_py_tensor(whole);
    if (tensor == NULL || self->spec == NULL || self->core.owner == NULL ||
        self->sharded_param != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "_cut requires a new Param with a spec");
        return NULL;
    }
    if (cut_shard(self, tensor, dim, &handles[0], &handles[1]) != 0) {
        return NULL;
    }
    PyObject *param_object = NULL;
    if (fct_py_from_tensor(handles[0], &local) == 0) {
        param_object = make_parameter(self, local, fct_tensor_requires_grad(tensor));
    }
    if (param_object != NULL) {
        Py_XSETREF(self->sharded_param, param_object);
        fc_param_set_sharded_data(&self->core, handles[1]);
        record_shard_identity(self);
    } else {
        Py_CLEAR(local);
    }
    fct_tensor_release(handles[0]);
    fct_tensor_release(handles[1]);
    return local;
}

/* Bumps the version counter of a DTensor's local tensor. Other parameters need no bump. */
static int bump_local(const fcpy_module *mod, PyObject *param) {
    if (!fcpy_is_dtensor(mod, param)) {
        return 0;
    }
    PyObject *local = Py_XNewRef(fcpy_dtensor_peek(mod, param));
    if (local == NULL && (local = PyObject_GetAttr(param, mod->names._local_tensor)) == NULL) {
        return -1;
    }
    fct_tensor *tensor = fct_py_tensor(local);
    if (tensor != NULL) {
        fct_tensor_bump(tensor);
    }
    Py_DECREF(local);
    return 0;
}

/* Calls bump_local for all params of an optimizer's param group. */
static int bump_group(const fcpy_module *mod, PyObject *group) {
    PyObject *params = PyObject_GetItem(group, mod->names.params);
    PyObject *iterator = params != NULL ? PyObject_GetIter(params) : NULL;
    PyObject *param = NULL;
    int failed = iterator == NULL ? -1 : 0;
    while (failed == 0 && (param = PyIter_Next(iterator)) != NULL) {
        failed = bump_local(mod, param);
        Py_DECREF(param);
    }
    Py_XDECREF(iterator);
    Py_XDECREF(params);
    return failed != 0 || PyErr_Occurred() ? -1 : 0;
}

PyObject *fcpy_bump_shard_versions(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (fcpy_check_bound(mod) != 0) {
        return NULL;
    }
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "bump_shard_versions: an optimizer was expected");
        return NULL;
    }
    PyObject *groups = PyObject_GetAttr(args[0], mod->names.param_groups);
    PyObject *iterator = groups != NULL ? PyObject_GetIter(groups) : NULL;
    PyObject *group = NULL;
    int failed = iterator == NULL ? -1 : 0;
    while (failed == 0 && (group = PyIter_Next(iterator)) != NULL) {
        failed = bump_group(mod, group);
        Py_DECREF(group);
    }
    Py_XDECREF(iterator);
    Py_XDECREF(groups);
    return failed != 0 || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyObject *fcpy_has_memory(PyObject *module, PyObject *obj) {
    (void)module;
    fct_facts facts;
    fct_tensor *tensor = fct_py_tensor(obj);
    if (tensor == NULL) {
        PyErr_SetString(PyExc_TypeError, "a tensor was expected");
        return NULL;
    }
    fct_tensor_facts(tensor, &facts);
    return PyBool_FromLong(facts.strided);
}
