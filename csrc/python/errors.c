/* Converts a core status to the Python exception that core/status.h names. For FC_ERAISED the
 * exception is already set: csrc/bridge converts torch's C++ exceptions. */
#include "errors.h"

int fcpy_raise(fc_status status, const char *message) {
    PyObject *type = PyExc_RuntimeError;
    if (status == FC_ERAISED) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_SystemError, "fsdp_c: a call failed without an exception");
        }
        return -1;
    }
    if (status == FC_ENOMEM) {
        PyErr_NoMemory();
        return -1;
    }
    if (status == FC_EASSERT) {
        type = PyExc_AssertionError;
    } else if (status == FC_EVALUE) {
        type = PyExc_ValueError;
    }
    /* PyErr_Format replaces invalid UTF-8. PyErr_SetString would raise UnicodeDecodeError. */
    PyErr_Format(type, "%s",
                 message != NULL && message[0] != '\0' ? message : "fsdp_c: internal error");
    return -1;
}
