/* The slots of a Param: the (module, name) pairs under which modules hold the parameter. The Param
 * owns its slots. A registration in progress may use slots that are replaced, so their release is
 * deferred. */
#include "slots.h"

#include "attributes.h"
#include "deferred_decref.h"

/* Releases the slots when no call is in progress. */
static void defer_slots_free(fcpy_module *mod, fcpy_slot *slots, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        fcpy_defer_decref(mod, slots[i].module);
        fcpy_defer_decref(mod, slots[i].parameters);
        fcpy_defer_decref(mod, slots[i].name);
    }
    fcpy_defer_free(mod, slots);
}

static void replace_slots(fcpy_param *self, fcpy_slot *slots, Py_ssize_t count) {
    fcpy_slot *old_slots = self->slots;
    Py_ssize_t old_count = self->slot_count;
    self->slots = slots;
    self->slot_count = count;
    defer_slots_free(self->mod, old_slots, old_count);
}

void fcpy_slots_clear(fcpy_param *self) {
    replace_slots(self, NULL, 0);
}

/* Fills a slot from a (module, name) pair. If `direct` is true, the slot uses module._parameters,
 * else the module's __setattr__. */
static int fill_slot(fcpy_param *self, fcpy_slot *slot, PyObject *pair, bool direct) {
    PyObject *module = NULL;
    PyObject *name = NULL;
    if (!PyTuple_Check(pair)) {
        PyErr_SetString(PyExc_TypeError, "_set_slots expects (module, name) tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(pair, "OU", &module, &name)) {
        return -1;
    }
    if (direct) {
        slot->parameters = PyObject_GetAttr(module, self->mod->names._parameters);
        if (slot->parameters == NULL) {
            return -1;
        }
        if (!PyDict_Check(slot->parameters)) {
            Py_CLEAR(slot->parameters);
        }
    }
    if (slot->parameters == NULL) {
        slot->module = PyWeakref_NewRef(module, NULL);
        if (slot->module == NULL) {
            return -1;
        }
    }
    Py_INCREF(name);
    slot->name = name;
    PyUnicode_InternInPlace(&slot->name);
    return 0;
}

/* Returns new slots of `pairs`, or NULL with an exception. May run foreign code. */
static fcpy_slot *make_slots(fcpy_param *self, PyObject *pairs, PyObject *direct) {
    Py_ssize_t count = PyTuple_GET_SIZE(pairs);
    fcpy_slot *slots = (fcpy_slot *)calloc((size_t)(count > 0 ? count : 1), sizeof *slots);
    if (slots == NULL) {
        return (fcpy_slot *)PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (fill_slot(self, &slots[i], PyTuple_GET_ITEM(pairs, i),
                      PyTuple_GET_ITEM(direct, i) == Py_True) != 0) {
            defer_slots_free(self->mod, slots, i + 1);
            return NULL;
        }
    }
    return slots;
}

PyObject *fcpy_slots_set(PyObject *obj, PyObject *args) {
    fcpy_param *self = (fcpy_param *)obj;
    PyObject *lists[2] = {NULL, NULL};
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &lists[0], &PyList_Type, &lists[1])) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *pairs = PyList_AsTuple(lists[0]);
    PyObject *direct = PyList_AsTuple(lists[1]);
    if (pairs == NULL || direct == NULL) {
        goto done;
    }
    if (PyTuple_GET_SIZE(direct) != PyTuple_GET_SIZE(pairs)) {
        PyErr_SetString(PyExc_ValueError, "_set_slots expects one flag per slot");
        goto done;
    }
    fcpy_slot *slots = make_slots(self, pairs, direct);
    if (slots != NULL) {
        replace_slots(self, slots, PyTuple_GET_SIZE(pairs));
        result = fcpy_or_none(NULL);
    }
done:
    Py_XDECREF(pairs);
    Py_XDECREF(direct);
    return result;
}

int fcpy_slots_register(const fcpy_param *self, PyObject *param) {
    if (param == NULL) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: no parameter to register");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->slot_count; i++) {
        const fcpy_slot *slot = &self->slots[i];
        if (slot->parameters != NULL) {
            if (PyDict_SetItem(slot->parameters, slot->name, param) != 0) {
                return -1;
            }
            continue;
        }
        PyObject *module = fcpy_weak_target(slot->module);
        if (module != NULL) { /* the module was not freed */
            const int failed = PyObject_SetAttr(module, slot->name, param);
            Py_DECREF(module);
            if (failed) {
                return -1;
            }
        }
    }
    return 0;
}
