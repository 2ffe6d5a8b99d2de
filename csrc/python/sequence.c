/* The collectives of a process group's own backend, for Python; see sequence.h. */
#include "sequence.h"

#include "../core/process_group.h"
#include <stdlib.h>
#include <string.h>

/* Writes a new reference to the handle of a process group, and borrows its negotiation. Returns -1
 * with a Python exception on failure. */
static int find_group(const char *name, fct_pg **pg, shm_negotiation **negotiation) {
    if (fct_pg_resolve(name, pg) != 0) {
        return -1;
    }
    *negotiation = fct_negotiation_find(*pg);
    if (*negotiation == NULL) {
        PyErr_Format(PyExc_ValueError, "process group '%s' compares no collectives", name);
        fct_pg_release(*pg);
        return -1;
    }
    return 0;
}

/* Returns a tuple of the number of the first entry, and the entries as bytes. */
static PyObject *build_entries(uint64_t first, const op_entry *entries, size_t count) {
    return Py_BuildValue("Ky#", (unsigned long long)first, (const char *)entries,
                         (Py_ssize_t)(count * sizeof *entries));
}

PyObject *fcpy_collective_entries(PyObject *module, PyObject *arg) {
    (void)module;
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    uint64_t first = 0;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL || find_group(name, &pg, &n) != 0) {
        return NULL;
    }
    op_entry *entries = (op_entry *)calloc(OP_ENTRIES + 1, sizeof *entries);
    PyObject *result = NULL;
    if (entries == NULL) {
        (void)PyErr_NoMemory();
    } else {
        const size_t count = shm_negotiation_copy_entries(n, entries, &first);
        result = build_entries(first, entries, count);
    }
    free(entries);
    fct_pg_release(pg);
    return result;
}

PyObject *fcpy_label_blocks(PyObject *module, PyObject *arg) {
    (void)module;
    op_label_block list[OP_LABEL_BLOCKS_KEPT];
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL || find_group(name, &pg, &n) != 0) {
        return NULL;
    }
    const size_t count = op_label_blocks_copy(shm_negotiation_blocks(n), list);
    fct_pg_release(pg);
    PyObject *result = PyList_New(0);
    for (size_t i = 0; result != NULL && i < count; i++) {
        PyObject *item =
            Py_BuildValue("KKK", (unsigned long long)list[i].first,
                          (unsigned long long)list[i].count, (unsigned long long)list[i].hash);
        if (item == NULL || PyList_Append(result, item) != 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(item);
    }
    return result;
}

/* Parses the name of a process group and the number of a collective; see find_group. */
static int parse_number(PyObject *args, fct_pg **pg, shm_negotiation **negotiation,
                        unsigned long long *number) {
    const char *name = NULL;
    return PyArg_ParseTuple(args, "sK", &name, number) ? find_group(name, pg, negotiation) : -1;
}

PyObject *fcpy_collective_signature(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long number = 0;
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    if (parse_number(args, &pg, &n, &number) != 0) {
        return NULL;
    }
    const uint64_t signature = shm_negotiation_signature_at(n, number);
    fct_pg_release(pg);
    return PyLong_FromUnsignedLongLong(signature);
}

PyObject *fcpy_checksum_intervals(PyObject *module, PyObject *arg) {
    (void)module;
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL || find_group(name, &pg, &n) != 0) {
        return NULL;
    }
    const op_checksums *checksums = shm_negotiation_device_checksums(n);
    PyObject *result = PyList_New(0);
    for (size_t i = 0; result != NULL && op_checksums_interval(checksums, i) != NULL; i++) {
        const op_interval *interval = op_checksums_interval(checksums, i);
        PyObject *item = Py_BuildValue("KK", (unsigned long long)interval->number,
                                       (unsigned long long)interval->hash);
        if (item == NULL || PyList_Append(result, item) != 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(item);
    }
    fct_pg_release(pg);
    return result;
}

PyObject *fcpy_checksum_entries(PyObject *module, PyObject *args) {
    (void)module;
    enum { CAPACITY = 2048 };
    unsigned long long number = 0;
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    if (parse_number(args, &pg, &n, &number) != 0) {
        return NULL;
    }
    op_entry *entries = (op_entry *)calloc(CAPACITY, sizeof *entries);
    PyObject *result = NULL;
    if (entries == NULL) {
        (void)PyErr_NoMemory();
    } else {
        const size_t count =
            op_checksums_copy(shm_negotiation_device_checksums(n), number, entries, CAPACITY);
        result = build_entries(0, entries, count);
    }
    free(entries);
    fct_pg_release(pg);
    return result;
}

PyObject *fcpy_collective_difference(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long first[2];
    Py_buffer bytes[2];
    op_entry_list lists[2];
    fct_difference difference;
    int issued = 0;
    if (!PyArg_ParseTuple(args, "(LKy*)(LKy*)p:collective_difference", &lists[0].rank, &first[0],
                          &bytes[0], &lists[1].rank, &first[1], &bytes[1], &issued)) {
        return NULL;
    }
    PyObject *result = NULL;
    for (int i = 0; i < 2; i++) {
        lists[i].first = first[i];
        lists[i].count = (size_t)bytes[i].len / sizeof(op_entry);
        lists[i].entries = bytes[i].buf;
    }
    if (bytes[0].len % (Py_ssize_t)sizeof(op_entry) != 0 ||
        bytes[1].len % (Py_ssize_t)sizeof(op_entry) != 0) {
        PyErr_SetString(PyExc_ValueError, "collective_difference expects entries of collectives");
    } else {
        op_entries_describe_difference(&lists[0], &lists[1], issued != 0, &difference);
        result =
            PyUnicode_DecodeUTF8(difference.text, (Py_ssize_t)strlen(difference.text), "replace");
    }
    PyBuffer_Release(&bytes[0]);
    PyBuffer_Release(&bytes[1]);
    return result;
}

PyObject *fcpy_stop_collectives(PyObject *module, PyObject *args) {
    (void)module;
    const char *name = NULL, *text = NULL;
    fct_pg *pg = NULL;
    shm_negotiation *n = NULL;
    if (!PyArg_ParseTuple(args, "ss:stop_collectives", &name, &text) ||
        find_group(name, &pg, &n) != 0) {
        return NULL;
    }
    const int status = shm_negotiation_stop(n, pg, text);
    fct_pg_release(pg);
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

/* The departure handler (op_departure_handler): calls wait_for_departures() of
 * _runtime/departures.py. If that function returns, the other ranks issue the collective, so
 * *is_certain is true. A returned exception is raised, and this rank does not issue it yet. */
static int wait_for_departures(fct_pg *pg, uint64_t number, uint64_t signature,
                               const op_entry *entry, bool *is_certain) {
    PyObject *module = PyImport_ImportModule("fsdp_c._runtime.departures");
    PyObject *result =
        module == NULL
            ? NULL
            : PyObject_CallMethod(module, "wait_for_departures", "sKKy#", fct_pg_name(pg),
                                  (unsigned long long)number, (unsigned long long)signature,
                                  (const char *)entry, (Py_ssize_t)sizeof *entry);
    const int status = result == Py_None ? 0 : -1;
    *is_certain = result != NULL;
    if (result != NULL && status != 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(result), result);
    }
    Py_XDECREF(result);
    Py_XDECREF(module);
    return status;
}

void fcpy_set_departure_handler(void) {
    op_sequence_set_handler(wait_for_departures);
}
