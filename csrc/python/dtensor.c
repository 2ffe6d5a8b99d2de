/* DTensor objects; see dtensor.h. DTensor's fields are slots of the class; where one day they are
 * not, they are asked for by name, and torch makes new objects. Owns nothing. */
#include "dtensor.h"

bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj) {
    return PyObject_TypeCheck(obj, (PyTypeObject *)mod->bound.dtensor_class);
}

bool fcpy_is_plain_tensor(const fcpy_module *mod, PyObject *obj) {
    return Py_TYPE(obj) == ((PyTypeObject *)mod->bound.dtensor_class)->tp_base;
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

/* Into the empty slot of a new object. */
static void put(PyObject *obj, Py_ssize_t offset, PyObject *value) {
    *(PyObject **)(void *)((char *)obj + offset) = Py_NewRef(value);
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

enum { MOST_DIMS = 8 }; /* with more torch makes it */

/* A tuple of plain ints as numbers; their count, -1 (no exception) where it is something else. */
static int64_t numbers(PyObject *tuple, int64_t *values) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MOST_DIMS) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        int overflow = 0;
        values[i] = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
        if (values[i] < 0 || overflow != 0) {
            return -1;
        }
    }
    return PyTuple_GET_SIZE(tuple);
}

/* obj.name as numbers likewise. What cannot be read torch's function will say. */
static int64_t numbers_of(PyObject *obj, PyObject *name, int64_t *values) {
    PyObject *tuple = PyObject_GetAttr(obj, name);
    const int64_t count = tuple != NULL ? numbers(tuple, values) : -1;
    Py_XDECREF(tuple);
    PyErr_Clear();
    return count;
}

/* What torch's function does, without its parser and its look-ups by name. *made NULL: torch has
 * to do it. */
static int make(const fcpy_module *mod, PyObject *local, PyObject *spec, PyObject **made) {
    int64_t sizes[MOST_DIMS];
    int64_t strides[MOST_DIMS];
    const fct_tensor *tensor = fcpy_is_plain_tensor(mod, local) ? fct_py_tensor(local) : NULL;
    if (tensor == NULL) { /* a subclass may answer for its layout itself */
        return 0;
    }
    PyObject *meta = PyObject_GetAttr(spec, mod->names.tensor_meta);
    if (meta == NULL) {
        PyErr_Clear();
        return 0;
    }
    const int64_t dims = numbers_of(meta, mod->names.shape, sizes);
    const bool known = dims >= 0 && numbers_of(meta, mod->names.stride, strides) == dims;
    Py_DECREF(meta);
    if (known &&
        fct_py_wrapper(tensor, mod->bound.dtensor_class, sizes, strides, dims, made) != 0) {
        return -1;
    }
    if (*made != NULL) {
        put(*made, mod->spec_offset, spec);
        put(*made, mod->local_offset, local);
    }
    return 0;
}

static PyObject *made_by_torch(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *const args[] = {mod->bound.dtensor_class, local, spec, Py_False};
    return PyObject_Vectorcall(mod->bound.dtensor_new, args, 3, mod->no_grad_kwnames);
}

PyObject *fcpy_dtensor_new(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *made = NULL;
    if (mod->makes_dtensors && make(mod, local, spec, &made) != 0) {
        return NULL;
    }
    return made != NULL ? made : made_by_torch(mod, local, spec);
}

bool fcpy_dtensor_try(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *torchs = NULL;
    PyObject *ours = NULL;
    if (mod->local_offset >= 0 && mod->spec_offset >= 0 &&
        PyCFunction_Check(mod->bound.dtensor_new) && make(mod, local, spec, &ours) == 0 &&
        ours != NULL) {
        torchs = made_by_torch(mod, local, spec);
    }
    const bool alike =
        torchs != NULL && fct_tensor_is_like(fct_py_tensor(ours), fct_py_tensor(torchs));
    Py_XDECREF(ours);
    Py_XDECREF(torchs);
    PyErr_Clear();
    return alike;
}
