/* The records of collectives (core/recorder.h): module functions, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_RECORDER_H
#define FSDP_C_PYTHON_RECORDER_H

#include "objects.h"

PyObject *fcpy_recorder_read(PyObject *module, PyObject *count);
PyObject *fcpy_recorder_write(PyObject *module, PyObject *args);
PyObject *fcpy_recorder_write_on_signal(PyObject *module, PyObject *args);

#endif
