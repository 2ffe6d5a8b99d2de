/* Functions over Python's error indicator, for csrc/core, which does not include Python.h. Also
 * translates C++ exceptions to Python errors, and owns the fault counter, which is thread-local. */
#include "error.h"

#include "gil.hpp"

#include <torch/csrc/Exceptions.h>

namespace {

thread_local int64_t faults_left = 0;

/* Copies the attributes that `to` does not have, such as error_code of torch.AcceleratorError, and
 * notes. Without memory there is no copy. */
void copy_attributes(PyObject *from, PyObject *to) {
    PyObject *source = PyObject_GenericGetDict(from, nullptr);
    PyObject *target = source != nullptr ? PyObject_GenericGetDict(to, nullptr) : nullptr;
    if (target == nullptr || PyDict_Merge(target, source, /*override=*/0) != 0) {
        PyErr_Clear();
    }
    Py_XDECREF(source);
    Py_XDECREF(target);
}

} // namespace

namespace fct {

void fault_point(const char *function) {
    if (C10_LIKELY(faults_left == 0)) {
        return;
    }
    if (--faults_left == 0) {
        throw std::runtime_error(std::string("injected fault in ") + function);
    }
}

int set_error() noexcept {
    const HeldGil held;
    try {
        torch::translate_exception_to_python(std::current_exception());
    } catch (...) { /* the exception is not a std::exception */
        PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
    }
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "a C++ exception left no Python error");
    }
    return -1;
}

void throw_python_error() {
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "a callback failed without setting an exception");
    }
    python_error error;
    error.persist();
    throw std::move(error);
}

} // namespace fct

extern "C" {

void fct_fault_arm(int64_t n) {
    faults_left = n > 0 ? n : 0;
}

int64_t fct_fault_left(void) {
    return faults_left;
}

int fct_fault(const char *function) {
    return fct::guarded(function, [] {});
}

void fct_error_no_memory(void) {
    const fct::HeldGil held;
    (void)PyErr_NoMemory();
}

void fct_error_runtime(const char *text) {
    const fct::HeldGil held;
    PyErr_Format(PyExc_RuntimeError, "%s", text); // replaces invalid UTF-8
}

void *fct_error_set_aside(void) {
    const fct::HeldGil held;
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
    const fct::HeldGil held;
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
    const fct::HeldGil held;
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) {
        return;
    }
    auto *cause = static_cast<PyObject *>(fct_error_set_aside());
    PyObject *message = PyUnicode_FromFormat("%s: %S", text, cause);
    PyObject *error = nullptr;
    if (message != nullptr) {
        error = PyObject_CallOneArg(reinterpret_cast<PyObject *>(Py_TYPE(cause)), message);
        Py_DECREF(message);
    }
    /* If the type's constructor needs other arguments, the exception stays unchanged. */
    if (error == nullptr || !PyExceptionInstance_Check(error)) {
        Py_XDECREF(error);
        fct_error_put_back(cause);
        return;
    }
    copy_attributes(cause, error);
    PyException_SetCause(error, cause); // steals
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error)), error);
    Py_DECREF(error);
}

} // extern "C"
