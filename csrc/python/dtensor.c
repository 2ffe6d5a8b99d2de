/* Implements dtensor.h. DTensor stores its fields in slots (__slots__). If a release of torch does
 * not, fields are read by name and torch makes new objects. */
#include "dtensor.h"

#include "../bridge/pyobject.h"

bool fcpy_is_dtensor(const fcpy_module *mod, PyObject *obj) {
    return PyObject_TypeCheck(obj, (PyTypeObject *)mod->bound.dtensor_class);
}

bool fcpy_is_base_tensor(const fcpy_module *mod, PyObject *obj) {
    return Py_TYPE(obj) == ((PyTypeObject *)mod->bound.dtensor_class)->tp_base;
}

static Py_ssize_t slot_offset(const fcpy_module *mod, PyObject *name) {
    PyObject *descriptor = _PyType_Lookup((PyTypeObject *)mod->bound.dtensor_class, name);
    return descriptor != NULL && Py_IS_TYPE(descriptor, &PyMemberDescr_Type)
               ? ((PyMemberDescrObject *)descriptor)->d_member->offset
               : -1;
}

void fcpy_dtensor_find_slots(fcpy_module *mod) {
    mod->local_offset = slot_offset(mod, mod->names._local_tensor);
    mod->spec_offset = slot_offset(mod, mod->names._spec);
}

static PyObject *read_slot(PyObject *obj, Py_ssize_t offset) {
    return *(PyObject **)(void *)((char *)obj + offset);
}

/* Stores a new reference in the empty slot of a new object. */
static void fill_slot(PyObject *obj, Py_ssize_t offset, PyObject *value) {
    *(PyObject **)(void *)((char *)obj + offset) = Py_NewRef(value);
}

PyObject *fcpy_dtensor_peek(const fcpy_module *mod, PyObject *obj) {
    const bool readable = obj != NULL && mod->bound.dtensor_class != NULL && mod->local_offset >= 0;
    return readable && fcpy_is_dtensor(mod, obj) ? read_slot(obj, mod->local_offset) : NULL;
}

/* Reads the attribute by name for subclasses, which may define it differently. */
static PyObject *get_field(const fcpy_module *mod, PyObject *obj, Py_ssize_t offset,
                           PyObject *name) {
    const bool plain = offset >= 0 && (PyObject *)Py_TYPE(obj) == mod->bound.dtensor_class;
    PyObject *value = plain ? read_slot(obj, offset) : NULL;
    return value != NULL ? Py_NewRef(value) : PyObject_GetAttr(obj, name);
}

PyObject *fcpy_dtensor_local(const fcpy_module *mod, PyObject *obj) {
    return get_field(mod, obj, mod->local_offset, mod->names._local_tensor);
}

PyObject *fcpy_dtensor_spec(const fcpy_module *mod, PyObject *obj) {
    return get_field(mod, obj, mod->spec_offset, mod->names._spec);
}

PyObject *fcpy_grad_of(const fcpy_module *mod, PyObject *param) {
    PyObject *grad = NULL;
    if ((PyObject *)Py_TYPE(param) != mod->bound.dtensor_class) {
        return PyObject_GetAttr(param, mod->names.grad);
    }
    return fct_py_grad(param, &grad) == 0 ? grad : NULL;
}

enum { MAX_DIMS = 8 }; /* DTensors with more dims are made by torch's constructor */

/* Converts a tuple of plain, non-negative ints. Returns their count, or -1 without an exception for
 * any other object. */
static int64_t parse_ints(PyObject *tuple, int64_t *values) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_DIMS) {
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

/* Calls parse_ints for the attribute `name` of obj. Never raises: torch's constructor reports
 * errors. */
static int64_t parse_ints_of(PyObject *obj, PyObject *name, int64_t *values) {
    PyObject *tuple = PyObject_GetAttr(obj, name);
    const int64_t count = tuple != NULL ? parse_ints(tuple, values) : -1;
    Py_XDECREF(tuple);
    PyErr_Clear();
    return count;
}

/* Does the work of torch's constructor without its argument parser and its attribute lookups.
 * Leaves *dtensor NULL if torch's constructor has to make the object. */
static int try_make_dtensor(const fcpy_module *mod, PyObject *local, PyObject *spec,
                            PyObject **dtensor) {
    int64_t sizes[MAX_DIMS];
    int64_t strides[MAX_DIMS];
    const fct_tensor *tensor = fcpy_is_base_tensor(mod, local) ? fct_py_tensor(local) : NULL;
    if (tensor == NULL) { /* a subclass may override its layout */
        return 0;
    }
    PyObject *meta = PyObject_GetAttr(spec, mod->names.tensor_meta);
    if (meta == NULL) {
        PyErr_Clear();
        return 0;
    }
    const int64_t dims = parse_ints_of(meta, mod->names.shape, sizes);
    const bool readable = dims >= 0 && parse_ints_of(meta, mod->names.stride, strides) == dims;
    Py_DECREF(meta);
    if (readable &&
        fct_py_wrapper(tensor, mod->bound.dtensor_class, sizes, strides, dims, dtensor) != 0) {
        return -1;
    }
    if (*dtensor != NULL) {
        fill_slot(*dtensor, mod->spec_offset, spec);
        fill_slot(*dtensor, mod->local_offset, local);
    }
    return 0;
}

static PyObject *make_with_torch(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *const args[] = {mod->bound.dtensor_class, local, spec, Py_False};
    return PyObject_Vectorcall(mod->bound.dtensor_new, args, 3, mod->no_grad_kwnames);
}

PyObject *fcpy_dtensor_new(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *dtensor = NULL;
    if (mod->makes_dtensors && try_make_dtensor(mod, local, spec, &dtensor) != 0) {
        return NULL;
    }
    return dtensor != NULL ? dtensor : make_with_torch(mod, local, spec);
}

bool fcpy_dtensor_new_equals_torch(const fcpy_module *mod, PyObject *local, PyObject *spec) {
    PyObject *from_torch = NULL;
    PyObject *from_extension = NULL;
    if (mod->local_offset >= 0 && mod->spec_offset >= 0 &&
        PyCFunction_Check(mod->bound.dtensor_new) &&
        try_make_dtensor(mod, local, spec, &from_extension) == 0 && from_extension != NULL) {
        from_torch = make_with_torch(mod, local, spec);
    }
    const bool equal = from_torch != NULL &&
                       fct_tensor_is_like(fct_py_tensor(from_extension), fct_py_tensor(from_torch));
    Py_XDECREF(from_extension);
    Py_XDECREF(from_torch);
    PyErr_Clear();
    return equal;
}
