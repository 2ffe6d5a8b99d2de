/* Whether a parameter's shard is still the one that the core has, with the values it had.
 *
 * Users may put another local tensor into the sharded parameter (`_local_tensor`, its `.data`, a
 * swap of tensors). What was there when the core was given the shard is noted with the Param:
 * before each gather it is compared, pointers only. Values are compared by their version counter,
 * which optimizers leave as it is: here their steps are counted. Owns nothing beyond that note. */
#include "shard.h"

Py_ssize_t fcpy_shard_local_offset(const fcpy_module *mod) {
    PyObject *found =
        _PyType_Lookup((PyTypeObject *)mod->bound.dtensor_class, mod->names._local_tensor);
    return found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)
               ? ((PyMemberDescrObject *)found)->d_member->offset
               : -1;
}

/* _local_tensor of a sharded parameter, borrowed; NULL where it has to be looked for. */
static PyObject *local_of(const fcpy_module *mod, PyObject *param) {
    if (param == NULL || mod->local_offset < 0 || !fcpy_is_dtensor(mod, param)) {
        return NULL;
    }
    return *(PyObject **)(void *)((char *)param + mod->local_offset);
}

static bool is_seen(const fcpy_param *self) {
    PyObject *local = local_of(self->mod, self->sharded_param);
    return local != NULL && local == self->seen.local &&
           fct_py_storage(local) == self->seen.storage &&
           fct_py_storage(self->sharded_param) == self->seen.wrapper;
}

int fcpy_shard_follow(void *param) {
    fcpy_param *self = (fcpy_param *)param;
    if (is_seen(self)) {
        return 0;
    }
    PyObject *result = PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._follow_shard);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

PyObject *fcpy_shard_note(PyObject *param, PyObject *unused) {
    (void)unused;
    fcpy_param *self = (fcpy_param *)param;
    PyObject *local = local_of(self->mod, self->sharded_param);
    if (!fct_py_is_tensor(local)) {
        local = NULL;
    }
    Py_XINCREF(local);
    Py_XSETREF(self->seen.local, local);
    self->seen.storage = local != NULL ? fct_py_storage(local) : NULL;
    self->seen.wrapper = local != NULL ? fct_py_storage(self->sharded_param) : NULL;
    Py_RETURN_NONE;
}

/* Bumps the version counter of a DTensor's local tensor; other parameters count by themselves. */
static int count_write(const fcpy_module *mod, PyObject *param) {
    if (!fcpy_is_dtensor(mod, param)) {
        return 0;
    }
    PyObject *local = Py_XNewRef(local_of(mod, param));
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

/* count_write() for all params of one of an optimizer's groups. */
static int count_group(const fcpy_module *mod, PyObject *group) {
    PyObject *params = PyObject_GetItem(group, mod->names.params);
    PyObject *each = params != NULL ? PyObject_GetIter(params) : NULL;
    PyObject *param = NULL;
    int failed = each == NULL ? -1 : 0;
    while (failed == 0 && (param = PyIter_Next(each)) != NULL) {
        failed = count_write(mod, param);
        Py_DECREF(param);
    }
    Py_XDECREF(each);
    Py_XDECREF(params);
    return failed != 0 || PyErr_Occurred() ? -1 : 0;
}

PyObject *fcpy_count_step(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "count_step: an optimizer was expected");
        return NULL;
    }
    PyObject *groups = PyObject_GetAttr(args[0], mod->names.param_groups);
    PyObject *each = groups != NULL ? PyObject_GetIter(groups) : NULL;
    PyObject *group = NULL;
    int failed = each == NULL ? -1 : 0;
    while (failed == 0 && (group = PyIter_Next(each)) != NULL) {
        failed = count_group(mod, group);
        Py_DECREF(group);
    }
    Py_XDECREF(each);
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
