/* Disables dynamo for the code that a hook calls. While torch.compile runs a frame on this thread,
 * dynamo would compile every Python function that the hook calls, even those of fsdp_c. */
#include "dynamo.h"

#include "../bridge/error.h"

PyObject *fcpy_dynamo_pause(fcpy_module *mod) {
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    if (_PyInterpreterState_GetEvalFrameFunc(interpreter) == _PyEval_EvalFrameDefault) {
        return NULL; /* dynamo is not active: the usual case */
    }
    PyObject *callback = PyObject_CallOneArg(mod->bound.set_eval_frame, Py_None);
    if (callback == NULL) {
        PyErr_Clear();
    }
    return callback;
}

void fcpy_dynamo_resume(fcpy_module *mod, PyObject *callback) {
    if (callback == NULL) {
        return;
    }
    void *error = fct_error_set_aside();
    PyObject *none = PyObject_CallOneArg(mod->bound.set_eval_frame, callback);
    Py_XDECREF(none);
    Py_DECREF(callback);
    fct_error_put_back(error);
}
