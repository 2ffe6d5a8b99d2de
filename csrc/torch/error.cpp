// Python's error indicator, for csrc/core, which does not include Python.h.
#include <torch/csrc/python_headers.h>

#include "torch_abi.h"

extern "C" {

void *fct_error_set_aside(void) {
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = nullptr;
    PyObject *value = nullptr;
    PyObject *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == nullptr) {
        return nullptr;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) {
        PyException_SetTraceback(value, traceback);
        Py_DECREF(traceback);
    }
    Py_DECREF(type);
    return value;
#endif
}

void fct_error_put_back(void *error) {
    auto *value = static_cast<PyObject *>(error);
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(value); // NULL clears
#else
    if (value == nullptr) {
        PyErr_Clear();
        return;
    }
    auto *type = reinterpret_cast<PyObject *>(Py_TYPE(value));
    Py_INCREF(type);
    PyErr_Restore(type, value, PyException_GetTraceback(value));
#endif
}

void fct_error_explain(const char *text) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) {
        return;
    }
    auto *cause = static_cast<PyObject *>(fct_error_set_aside());
    PyObject *explained = PyUnicode_FromFormat("%s: %S", text, cause);
    PyObject *error = nullptr;
    if (explained != nullptr) {
        error = PyObject_CallOneArg(reinterpret_cast<PyObject *>(Py_TYPE(cause)), explained);
        Py_DECREF(explained);
    }
    /* The type needs other arguments: the exception stays as it was. */
    if (error == nullptr || !PyExceptionInstance_Check(error)) {
        Py_XDECREF(error);
        fct_error_put_back(cause);
        return;
    }
    PyException_SetCause(error, cause); // steals
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error)), error);
    Py_DECREF(error);
}

} // extern "C"
