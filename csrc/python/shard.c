/* Whether a parameter's shard is still the one that the core has.
 *
 * Users may put another local tensor into the sharded parameter (`_local_tensor`, its `.data`, a
 * swap of tensors). What was there when the core was given the shard is noted with the Param:
 * before each gather it is compared, pointers only. Owns nothing beyond that note. */
#include "objects.h"

Py_ssize_t fcpy_shard_local_offset(const fcpy_module *mod) {
    PyObject *found =
        _PyType_Lookup((PyTypeObject *)mod->bound.dtensor_class, mod->names._local_tensor);
    return found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)
               ? ((PyMemberDescrObject *)found)->d_member->offset
               : -1;
}

/* sharded_param._local_tensor, borrowed; NULL where it has to be looked for. */
static PyObject *local_of(const fcpy_param *self) {
    const fcpy_module *mod = self->mod;
    PyObject *param = self->sharded_param;
    if (param == NULL || mod->local_offset < 0 ||
        !PyObject_TypeCheck(param, (PyTypeObject *)mod->bound.dtensor_class)) {
        return NULL;
    }
    return *(PyObject **)(void *)((char *)param + mod->local_offset);
}

static bool is_seen(const fcpy_param *self) {
    PyObject *local = local_of(self);
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
    PyObject *local = local_of(self);
    if (!fct_py_is_tensor(local)) {
        local = NULL;
    }
    Py_XINCREF(local);
    Py_XSETREF(self->seen.local, local);
    self->seen.storage = local != NULL ? fct_py_storage(local) : NULL;
    self->seen.wrapper = local != NULL ? fct_py_storage(self->sharded_param) : NULL;
    Py_RETURN_NONE;
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
