/* Checks whether an object is initialized, and sets the exceptions for uninitialized objects. The
 * pointers in its core struct are NULL before __init__, and after the garbage collector has cleared
 * the object. */
#include "check_initialized.h"

#include "../bridge/error.h"
#include "errors.h"
#include "freed_modules.h"

bool fcpy_group_check_initialized(const fcpy_group *self) {
    if (self->core.base.callbacks == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the parameter group is not initialized");
    }
    return self->core.base.callbacks != NULL;
}

static bool raise_no_attribute(const char *type, const char *attribute) {
    PyErr_Format(PyExc_AttributeError,
                 "'%s' object has no attribute '%s'\n"
                 "The root module has not run since fully_shard: call its forward, or unshard(), "
                 "first",
                 type, attribute);
    return false;
}

static bool context_has_run_lazy_init(const fcpy_group *self) {
    fcpy_state *unit = fcpy_group_unit(self);
    const bool unit_has_root = unit != NULL && unit->is_root != Py_None;
    Py_XDECREF(unit);
    return unit_has_root || ((const fcpy_comm *)self->comm)->initialized;
}

bool fcpy_group_check_context_attribute(const fcpy_group *self, const char *attribute) {
    return fcpy_group_check_initialized(self) &&
           (context_has_run_lazy_init(self) || raise_no_attribute("FSDPCommContext", attribute));
}

bool fcpy_group_check_param_attribute(const fcpy_group *self, const char *attribute) {
    if (!fcpy_group_check_initialized(self)) {
        return false;
    }
    const bool group_has_run_lazy_init =
        self->dict != NULL && PyDict_GetItemString(self->dict, "_reset_sharded_params") == Py_True;
    return group_has_run_lazy_init || context_has_run_lazy_init(self) ||
           raise_no_attribute("FSDPParam", attribute);
}

bool fcpy_state_check_context_attribute(const fcpy_state *self, const char *attribute) {
    return fcpy_state_check_initialized(self) &&
           (self->is_root != Py_None || raise_no_attribute("FSDPCommContext", attribute));
}

/* Calls handle_error() of _runtime/plan_hash.py with the pending exception, if it is a
 * RuntimeError. An exception of the call is dropped, except for KeyboardInterrupt and others that
 * are no Exception. */
static void handle_error(PyObject *owner) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return;
    }
    PyObject *error = (PyObject *)fct_error_set_aside();
    PyObject *module = PyImport_ImportModule("fsdp_c._runtime.plan_hash");
    PyObject *result =
        module == NULL ? NULL : PyObject_CallMethod(module, "handle_error", "OO", error, owner);
    Py_XDECREF(module);
    Py_XDECREF(result);
    if (result == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
        Py_DECREF(error);
        return;
    }
    fct_error_put_back(error);
}

static int check_status(PyObject *owner, const fc_comm_ctx *comm, fc_status status) {
    if (status == FC_OK) {
        return 0;
    }
    (void)fcpy_raise(status, comm != NULL ? comm->error.message : NULL);
    if (status == FC_ERAISED || status == FC_ESTATE) {
        handle_error(owner);
    }
    return -1;
}

int fcpy_group_check_status(const fcpy_group *self, fc_status status) {
    return check_status((PyObject *)self, self->core.base.comm, status);
}

int fcpy_group_check_device(const fc_comm_ctx *comm, fct_device device) {
    if (comm->device.type != device.type) {
        PyErr_SetString(PyExc_ValueError,
                        "the communication context is for another kind of device than the group");
        return -1;
    }
    return 0;
}

bool fcpy_state_check_initialized(const fcpy_state *self) {
    if (self->core.iteration != NULL && self->core.comm != NULL) {
        return true;
    }
    PyErr_SetString(PyExc_RuntimeError, "the FSDP state is not initialized");
    return false;
}

int fcpy_state_check_status(const fcpy_state *self, fc_status status) {
    return check_status((PyObject *)self, self->core.comm, status);
}
