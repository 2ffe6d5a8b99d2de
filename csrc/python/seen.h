/* What the guard remembers: parts of the objects and of the module state (guard.c fills them). */
#ifndef FSDP_C_PYTHON_SEEN_H
#define FSDP_C_PYTHON_SEEN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* What was found at one object, and the version tags it was found under. */
typedef struct fcpy_seen {
    uint64_t type_tag;
    uint64_t dict_tag;
    uint32_t bits;
} fcpy_seen;

enum { FCPY_MAX_PLACES = 8 };

/* Watched objects of one kind and the tags they were last read under. */
typedef struct fcpy_places {
    PyObject *objects[FCPY_MAX_PLACES]; /* borrowed from the entries */
    uint64_t tags[FCPY_MAX_PLACES];
    size_t count;
} fcpy_places;

/* In the module state. */
typedef struct fcpy_guard {
    PyObject *group_methods; /* tuples: what should be found under each name, see guard.c */
    PyObject *state_methods;
    PyObject *entries; /* tuple of (place, name, expected, also, bits), see guard.c */
    fcpy_places dicts;
    fcpy_places types;
    uint32_t bits;       /* of all entries but the log's */
    PyObject *log_cache; /* the logger's dict of levels that are on */
    PyObject *log_enabled;
    uint64_t log_tag;
    bool log;
} fcpy_guard;

#endif
