/* Reading DTensor objects; see dtensor.h. DTensor's fields are slots of the class; where one day
 * they are not, they are asked for by name. Owns nothing. */
#include "dtensor.h"

bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj) {
    return PyObject_TypeCheck(obj, (PyTypeObject *)mod->bound.dtensor_class);
}

static Py_ssize_t offset_of(const fcpy_module *mod, PyObject *name) {
    PyObject *found = _PyType_Lookup((PyTypeObject *)mod->bound.dtensor_class, name);
    return found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)
               ? ((PyMemberDescrObject *)found)->d_member->offset
               : -1;
}

void fcpy_dtensor_find_slots(fcpy_module *mod) {
    mod->local_offset = offset_of(mod, mod->names._local_tensor);
    mod->spec_offset = offset_of(mod, mod->names._spec);
}

static PyObject *at(PyObject *obj, Py_ssize_t offset) {
    return *(PyObject **)(void *)((char *)obj + offset);
}

PyObject *fcpy_dtensor_peek(const fcpy_module *mod, PyObject *obj) {
    const bool known = obj != NULL && mod->bound.dtensor_class != NULL && mod->local_offset >= 0;
    return known && fcpy_is_dtensor(mod, obj) ? at(obj, mod->local_offset) : NULL;
}

/* A subclass may have an attribute of its own there. */
static PyObject *field(const fcpy_module *mod, PyObject *obj, Py_ssize_t offset, PyObject *name) {
    const bool plain = offset >= 0 && (PyObject *)Py_TYPE(obj) == mod->bound.dtensor_class;
    PyObject *value = plain ? at(obj, offset) : NULL;
    return value != NULL ? Py_NewRef(value) : PyObject_GetAttr(obj, name);
}

PyObject *fcpy_dtensor_local(const fcpy_module *mod, PyObject *obj) {
    return field(mod, obj, mod->local_offset, mod->names._local_tensor);
}

PyObject *fcpy_dtensor_spec(const fcpy_module *mod, PyObject *obj) {
    return field(mod, obj, mod->spec_offset, mod->names._spec);
}

PyObject *fcpy_grad_of(const fcpy_module *mod, PyObject *param) {
    PyObject *grad = NULL;
    if ((PyObject *)Py_TYPE(param) != mod->bound.dtensor_class) {
        return PyObject_GetAttr(param, mod->names.grad);
    }
    return fct_py_grad(param, &grad) == 0 ? grad : NULL;
}
