/* The records of collectives (core/recorder.h) for Python. */
#ifndef FSDP_C_PYTHON_RECORDER_H
#define FSDP_C_PYTHON_RECORDER_H

#include "objects.h"

/* _C.recorder_read(count) -> (now, bytes): up to `count` records, newest first, and the time of
 * their clock in nanoseconds. */
PyObject *fcpy_recorder_read(PyObject *module, PyObject *count);
/* _C.recorder_write(path, header): writes header and records to a file. */
PyObject *fcpy_recorder_write(PyObject *module, PyObject *args);
/* _C.recorder_write_on_signal(signum, path, header): writes the file when the signal arrives. */
PyObject *fcpy_recorder_write_on_signal(PyObject *module, PyObject *args);

#endif
