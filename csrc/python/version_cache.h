/* Cached results of the guard, embedded in the objects and in the module state. guard.c fills
 * them. */
#ifndef FSDP_C_PYTHON_VERSION_CACHE_H
#define FSDP_C_PYTHON_VERSION_CACHE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* The overrides of one object, and the version tags of its type and dict at the time of the read.
 */
typedef struct fcpy_version_cache {
    uint64_t type_tag;
    uint64_t dict_tag;
    uint32_t bits;
} fcpy_version_cache;

enum { FCPY_MAX_PLACES = 20 };

/* The dicts and types whose attributes the guard watches ("places"), and their version tags at the
 * latest read. */
typedef struct fcpy_places {
    PyObject *objects[FCPY_MAX_PLACES]; /* borrowed from fcpy_guard.entries */
    uint64_t tags[FCPY_MAX_PLACES];
    size_t count;
} fcpy_places;

/* The guard's part of the module state. */
typedef struct fcpy_guard {
    PyObject *group_methods; /* tuple of the expected methods, see guard.c */
    PyObject *state_methods;
    PyObject *entries; /* tuple of (place, name, expected, also, bits), see guard.c */
    fcpy_places places;
    uint32_t bits;         /* FCPY_CALL_* of the entries that were patched at the latest read */
    PyObject *log_cache;   /* the logger's dict of enabled levels */
    PyObject *log_enabled; /* function: whether debug logging is enabled */
    uint64_t log_tag;      /* version tag of log_cache at the latest read */
    bool log;              /* debug logging of torch's logger was enabled at the latest read */
} fcpy_guard;

#endif
