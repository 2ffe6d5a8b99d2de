/* Deferred release. The core borrows pointers to groups, states, parameters and tensors, and calls
 * foreign code (modules' own __setattr__, users' hooks) while the core uses them. That code may
 * replace attributes. While any call is in progress, mod->deferred_decrefs keeps the former values.
 */
#include "deferred_decref.h"

#include "../bridge/error.h"

void fcpy_calls_enter(fcpy_module *mod) {
    mod->calls++;
}

void fcpy_calls_leave(fcpy_module *mod) {
    if (--mod->calls > 0 || mod->deferred_decrefs == NULL) {
        return;
    }
    PyObject *deferred_decrefs = mod->deferred_decrefs;
    mod->deferred_decrefs = NULL;
    void *error = fct_error_set_aside();
    Py_DECREF(deferred_decrefs);
    fct_error_put_back(error);
}

void fcpy_defer_decref(fcpy_module *mod, PyObject *obj) {
    if (obj == NULL) {
        return;
    }
    if (mod->calls > 0) {
        void *error = fct_error_set_aside();
        if (mod->deferred_decrefs == NULL) {
            mod->deferred_decrefs = PyList_New(0);
        }
        if (mod->deferred_decrefs == NULL || PyList_Append(mod->deferred_decrefs, obj) != 0) {
            Py_INCREF(obj); /* out of memory: the object leaks, because the core may use it */
        }
        fct_error_put_back(error);
    }
    Py_DECREF(obj);
}

void fcpy_replace(fcpy_module *mod, PyObject **slot, PyObject *value) {
    PyObject *old = *slot;
    Py_XINCREF(value);
    *slot = value;
    fcpy_defer_decref(mod, old);
}

/* If there is no memory for the capsule, the target of the pointer leaks. */
static void defer_pointer(fcpy_module *mod, void *pointer, const char *name,
                          PyCapsule_Destructor destructor) {
    void *error = fct_error_set_aside();
    fcpy_defer_decref(mod, PyCapsule_New(pointer, name, destructor));
    fct_error_put_back(error);
}

static void release_tensor(PyObject *capsule) {
    fct_tensor_release((fct_tensor *)PyCapsule_GetPointer(capsule, "tensor"));
}

void fcpy_hold_tensor(fcpy_module *mod, fct_tensor *tensor) {
    if (tensor != NULL && mod->calls > 0) {
        fct_tensor_retain(tensor);
        defer_pointer(mod, tensor, "tensor", release_tensor);
    }
}

static void free_block(PyObject *capsule) {
    free(PyCapsule_GetPointer(capsule, "block"));
}

void fcpy_defer_free(fcpy_module *mod, void *block) {
    if (block == NULL || mod->calls == 0) {
        free(block);
    } else {
        defer_pointer(mod, block, "block", free_block);
    }
}
