/* The collectives of a process group's own backend, for Python; see transport/sequence.h.
 * departures.py, comparison_requests.py and label_comparison.py of fsdp_c/_runtime call these
 * functions. Process groups are given by name. */
#ifndef FSDP_C_PYTHON_SEQUENCE_H
#define FSDP_C_PYTHON_SEQUENCE_H

#include "objects.h"

PyObject *fcpy_collective_entries(PyObject *module, PyObject *name);
PyObject *fcpy_collective_signature(PyObject *module, PyObject *args);
PyObject *fcpy_label_blocks(PyObject *module, PyObject *arg);
PyObject *fcpy_checksum_intervals(PyObject *module, PyObject *name);
PyObject *fcpy_checksum_entries(PyObject *module, PyObject *args);
PyObject *fcpy_collective_difference(PyObject *module, PyObject *args);
PyObject *fcpy_stop_collectives(PyObject *module, PyObject *args);
/* Makes wait_for_departures() of departures.py the departure handler of this process. */
void fcpy_set_departure_handler(void);

#endif
