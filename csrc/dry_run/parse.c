/* Parses the description of a dry run: units and states from dicts, with one table of keys per
 * struct, and calls from tuples. The fcd_parsed owns the arrays and borrows the strings from the
 * Python objects. The keys are listed in fsdp_c/_dry_run.pyi. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "parse.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "../core/dtype.h"

typedef struct fcd_block {
    struct fcd_block *next;
} fcd_block;

/* Returns zeroed memory that fcd_parsed_fini() frees, or NULL with MemoryError. */
static void *allocate(fcd_parsed *p, size_t count, size_t size) {
    fcd_block *block = count < SIZE_MAX / (2 * size)
                           ? (fcd_block *)calloc(1, sizeof *block + (count + 1) * size)
                           : NULL;
    if (block == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    block->next = p->blocks;
    p->blocks = block;
    return block + 1;
}

void fcd_parsed_fini(fcd_parsed *p) {
    while (p->blocks != NULL) {
        fcd_block *next = p->blocks->next;
        free(p->blocks);
        p->blocks = next;
    }
    free(p->calls);
    memset(p, 0, sizeof *p);
}

/* ---- values ---- */

/* INT32_LIST: any numbers; the length is a size_t. SIZES: int64 numbers of at least 0; the length
 * is the int32 number of dimensions. */
typedef enum field_kind { INT32, INT64, BOOLEAN, DTYPE, TEXT, INT32_LIST, SIZES } field_kind;

typedef struct field {
    const char *key;
    field_kind kind;
    bool required;
    size_t offset;       /* offset of the member in the struct */
    size_t count_offset; /* offset of the length of a list */
} field;

static int set_value_error(const char *path, const char *key, const char *expected,
                           PyObject *value) {
    PyErr_Format(PyExc_ValueError, "%s.%s: %R; expected %s", path, key, value, expected);
    return -1;
}

/* Reads an int in [min, max]. Returns -1 without an exception if `value` is not such an int. */
static int read_int(PyObject *value, int64_t min, int64_t max, int64_t *out) {
    int overflow = 0;
    if (!PyLong_CheckExact(value)) {
        return -1;
    }
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0 || number < min || number > max) {
        return -1;
    }
    *out = number;
    return 0;
}

static int read_dtype(PyObject *value, fct_dtype *out) {
    const char *text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8(value) : NULL;
    if (value == Py_None) {
        *out = FCT_NO_DTYPE;
        return 0;
    }
    for (fct_dtype dtype = 0; text != NULL && dtype < 64; dtype++) {
        if (fc_dtype_size(dtype) > 0 && strcmp(fc_dtype_name(dtype), text) == 0) {
            *out = dtype;
            return 0;
        }
    }
    PyErr_Clear();
    return -1;
}

/* Reads a list or tuple of ints to a new array, which `p` owns. Returns -1 on failure, with an
 * exception only if there is no memory. */
static int read_list(fcd_parsed *p, const field *f, PyObject *value, char *out) {
    const bool is_int64 = f->kind == SIZES;
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) {
        return -1;
    }
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    void *array = allocate(p, (size_t)count, is_int64 ? sizeof(int64_t) : sizeof(int32_t));
    if (array == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t number = 0;
        if (read_int(PySequence_Fast_GET_ITEM(value, i), is_int64 ? 0 : INT32_MIN,
                     is_int64 ? INT64_MAX : INT32_MAX, &number) != 0) {
            return -1;
        }
        if (is_int64) {
            ((int64_t *)array)[i] = number;
        } else {
            ((int32_t *)array)[i] = (int32_t)number;
        }
    }
    memcpy(out + f->offset, (const void *)&array, sizeof array);
    if (is_int64) { /* fcd_param_description.sizes; its length is the int32 ndim */
        *(int32_t *)(void *)(out + f->count_offset) = (int32_t)count;
    } else {
        *(size_t *)(void *)(out + f->count_offset) = (size_t)count;
    }
    return 0;
}

static const char *const expectations[] = {
    [INT32] = "an int",
    [INT64] = "an int",
    [BOOLEAN] = "True or False",
    [DTYPE] = "the name of a dtype, such as 'torch.float32'",
    [TEXT] = "a str",
    [INT32_LIST] = "a list of ints",
    [SIZES] = "a list of sizes, which are at least 0",
};

static int read_field(fcd_parsed *p, const field *f, PyObject *value, char *out, const char *path) {
    void *target = out + f->offset;
    int64_t number = 0;
    int result = -1;
    switch (f->kind) {
    case INT32:
        result = read_int(value, INT32_MIN, INT32_MAX, &number);
        *(int32_t *)target = (int32_t)number;
        break;
    case INT64:
        result = read_int(value, INT64_MIN, INT64_MAX, &number);
        *(int64_t *)target = number;
        break;
    case BOOLEAN:
        result = PyBool_Check(value) ? 0 : -1;
        *(bool *)target = value == Py_True;
        break;
    case DTYPE:
        result = read_dtype(value, (fct_dtype *)target);
        break;
    case TEXT: {
        const char *text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8(value) : NULL;
        PyErr_Clear();
        memcpy(target, (const void *)&text, sizeof text);
        result = text != NULL ? 0 : -1;
        break;
    }
    default:
        result = read_list(p, f, value, out);
    }
    if (result != 0 && !PyErr_Occurred()) {
        return set_value_error(path, f->key, expectations[f->kind], value);
    }
    return result;
}

/* ---- structs ---- */

static int check_keys(const field *fields, size_t count, PyObject *dict, const char *extra_key,
                      const char *path) {
    Py_ssize_t position = 0;
    PyObject *key = NULL;
    while (PyDict_Next(dict, &position, &key, NULL)) {
        bool known = PyUnicode_CheckExact(key) && extra_key != NULL &&
                     PyUnicode_CompareWithASCIIString(key, extra_key) == 0;
        for (size_t i = 0; !known && PyUnicode_CheckExact(key) && i < count; i++) {
            known = PyUnicode_CompareWithASCIIString(key, fields[i].key) == 0;
        }
        if (!known) {
            PyErr_Format(PyExc_ValueError, "%s: unknown key %R", path, key);
            return -1;
        }
    }
    return 0;
}

/* Reads the values of a dict to the struct `out`. A missing key leaves the previous value, which is
 * the default. `extra_key` is one more allowed key, which the caller reads. */
static int read_fields(fcd_parsed *p, const field *fields, size_t count, PyObject *dict,
                       const char *extra_key, void *out, const char *path) {
    if (!PyDict_CheckExact(dict)) {
        PyErr_Format(PyExc_ValueError, "%s: %R; expected a dict", path, dict);
        return -1;
    }
    if (check_keys(fields, count, dict, extra_key, path) != 0) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *value = PyDict_GetItemString(dict, fields[i].key);
        if (value == NULL && fields[i].required) {
            PyErr_Format(PyExc_ValueError, "%s.%s: missing", path, fields[i].key);
            return -1;
        }
        if (value != NULL && read_field(p, &fields[i], value, (char *)out, path) != 0) {
            return -1;
        }
    }
    return 0;
}

#define FIELD(type, member, kind, required) {#member, kind, required, offsetof(type, member), 0}
#define LIST(type, member, count, kind, required)                                                  \
    {#member, kind, required, offsetof(type, member), offsetof(type, count)}
#define LENGTH(array) (sizeof(array) / sizeof *(array))

static const field param_fields[] = {
    FIELD(fcd_param_description, name, TEXT, true),
    LIST(fcd_param_description, sizes, ndim, SIZES, true),
    FIELD(fcd_param_description, dim, INT32, false),
    FIELD(fcd_param_description, dtype, DTYPE, true),
    FIELD(fcd_param_description, compute, DTYPE, false),
    FIELD(fcd_param_description, reduce, DTYPE, false),
    FIELD(fcd_param_description, requires_grad, BOOLEAN, false),
};

static const field unit_fields[] = {
    FIELD(fcd_unit_description, state, INT32, true),
    FIELD(fcd_unit_description, world, INT64, true),
    FIELD(fcd_unit_description, replicas, INT64, false),
    FIELD(fcd_unit_description, post_forward_world, INT64, false),
    FIELD(fcd_unit_description, reduce, DTYPE, false),
    FIELD(fcd_unit_description, bucket_bytes, INT64, false),
    FIELD(fcd_unit_description, max_input_buffers, INT64, false),
    FIELD(fcd_unit_description, reshard_after_forward, BOOLEAN, false),
    FIELD(fcd_unit_description, reshard_after_backward, BOOLEAN, false),
    FIELD(fcd_unit_description, unshard_in_backward, BOOLEAN, false),
    FIELD(fcd_unit_description, reduce_grads, BOOLEAN, false),
    FIELD(fcd_unit_description, all_reduce_grads, BOOLEAN, false),
    FIELD(fcd_unit_description, overlap, BOOLEAN, false),
    FIELD(fcd_unit_description, offload, BOOLEAN, false),
    FIELD(fcd_unit_description, pinned, BOOLEAN, false),
};

static const field state_fields[] = {
    FIELD(fcd_state_description, root, INT32, true),
    FIELD(fcd_state_description, modules, INT32, false),
    LIST(fcd_state_description, forward_prefetch, forward_count, INT32_LIST, false),
    LIST(fcd_state_description, backward_prefetch, backward_count, INT32_LIST, false),
};

static int read_param(fcd_parsed *p, PyObject *dict, fcd_param_description *out, const char *path) {
    *out = (fcd_param_description){.dtype = FCT_NO_DTYPE,
                                   .compute = FCT_NO_DTYPE,
                                   .reduce = FCT_NO_DTYPE,
                                   .requires_grad = true};
    if (read_fields(p, param_fields, LENGTH(param_fields), dict, NULL, out, path) != 0) {
        return -1;
    }
    if (out->dtype == FCT_NO_DTYPE) {
        return set_value_error(path, "dtype", expectations[DTYPE], Py_None);
    }
    out->compute = out->compute != FCT_NO_DTYPE ? out->compute : out->dtype;
    out->reduce = out->reduce != FCT_NO_DTYPE ? out->reduce : out->compute;
    return 0;
}

enum { PATH_LENGTH = 48, LONG_PATH_LENGTH = 96 };

static int read_unit(fcd_parsed *p, PyObject *dict, fcd_unit_description *out, const char *path) {
    char name[LONG_PATH_LENGTH];
    *out = (fcd_unit_description){.replicas = 1,
                                  .reduce = FCT_NO_DTYPE,
                                  .max_input_buffers = 1,
                                  .reshard_after_forward = true,
                                  .reshard_after_backward = true,
                                  .unshard_in_backward = true,
                                  .reduce_grads = true,
                                  .all_reduce_grads = true,
                                  .overlap = true,
                                  .pinned = true};
    if (read_fields(p, unit_fields, LENGTH(unit_fields), dict, "params", out, path) != 0) {
        return -1;
    }
    PyObject *params = PyDict_GetItemString(dict, "params");
    if (params == NULL) {
        PyErr_Format(PyExc_ValueError, "%s.params: missing", path);
        return -1;
    }
    if (!PyList_CheckExact(params)) {
        return set_value_error(path, "params", "a list of dicts", params);
    }
    out->count = (size_t)PyList_GET_SIZE(params);
    fcd_param_description *array = (fcd_param_description *)allocate(p, out->count, sizeof *array);
    out->params = array;
    for (size_t i = 0; array != NULL && i < out->count; i++) {
        (void)snprintf(name, sizeof name, "%.*s.params[%zu]", PATH_LENGTH - 1, path, i);
        if (read_param(p, PyList_GET_ITEM(params, (Py_ssize_t)i), &array[i], name) != 0) {
            return -1;
        }
    }
    return array != NULL ? 0 : -1;
}

static int read_state(fcd_parsed *p, PyObject *dict, fcd_state_description *out, const char *path) {
    *out = (fcd_state_description){.modules = 1};
    return read_fields(p, state_fields, LENGTH(state_fields), dict, NULL, out, path);
}

static int read_description(fcd_parsed *p, PyObject *units, PyObject *states) {
    char path[PATH_LENGTH];
    fcd_description *d = &p->description;
    d->unit_count = (size_t)PyList_GET_SIZE(units);
    d->state_count = (size_t)PyList_GET_SIZE(states);
    fcd_unit_description *u = (fcd_unit_description *)allocate(p, d->unit_count, sizeof *u);
    fcd_state_description *s =
        u != NULL ? (fcd_state_description *)allocate(p, d->state_count, sizeof *s) : NULL;
    if (s == NULL) {
        return -1;
    }
    d->units = u;
    d->states = s;
    for (size_t i = 0; i < d->unit_count; i++) {
        (void)snprintf(path, sizeof path, "units[%zu]", i);
        if (read_unit(p, PyList_GET_ITEM(units, (Py_ssize_t)i), &u[i], path) != 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < d->state_count; i++) {
        (void)snprintf(path, sizeof path, "states[%zu]", i);
        if (read_state(p, PyList_GET_ITEM(states, (Py_ssize_t)i), &s[i], path) != 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- calls ---- */

static int read_call(PyObject *tuple, fcd_call *out, Py_ssize_t index) {
    const Py_ssize_t length = PyTuple_CheckExact(tuple) ? PyTuple_GET_SIZE(tuple) : 0;
    PyObject *name = length > 0 ? PyTuple_GET_ITEM(tuple, 0) : NULL;
    size_t kind = 0;
    while (name != NULL && PyUnicode_CheckExact(name) && kind < FCD_CALL_COUNT &&
           PyUnicode_CompareWithASCIIString(name, fcd_call_names[kind]) != 0) {
        kind++;
    }
    if (name == NULL || !PyUnicode_CheckExact(name) || kind == FCD_CALL_COUNT) {
        PyErr_Format(PyExc_ValueError,
                     "calls[%zd]: %R; expected a tuple that begins with the name of a call", index,
                     tuple);
        return -1;
    }
    if (length - 1 != fcd_call_arguments[kind]) {
        PyErr_Format(PyExc_ValueError, "calls[%zd]: %zd arguments of '%s'; expected %d", index,
                     length - 1, fcd_call_names[kind], fcd_call_arguments[kind]);
        return -1;
    }
    out->kind = (fcd_call_kind)kind;
    for (Py_ssize_t i = 1; i < length; i++) {
        PyObject *value = PyTuple_GET_ITEM(tuple, i);
        if (read_int(value, INT64_MIN, INT64_MAX, &out->arguments[i - 1]) != 0) {
            PyErr_Format(PyExc_ValueError,
                         "calls[%zd]: argument %zd of '%s' is %R; expected an int", index, i,
                         fcd_call_names[kind], value);
            return -1;
        }
    }
    return 0;
}

static int read_calls(fcd_parsed *p, PyObject *calls) {
    p->call_count = (size_t)PyList_GET_SIZE(calls);
    p->calls = (fcd_call *)calloc(p->call_count + 1, sizeof *p->calls);
    if (p->calls == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); i++) {
        if (read_call(PyList_GET_ITEM(calls, i), &p->calls[i], i) != 0) {
            return -1;
        }
    }
    return 0;
}

int fcd_parse(PyObject *units, PyObject *states, PyObject *calls, bool streams, fcd_parsed *out) {
    fc_error error;
    memset(out, 0, sizeof *out);
    out->description.streams = streams;
    if (read_description(out, units, states) != 0 || read_calls(out, calls) != 0) {
        return -1;
    }
    if (fcd_description_check(&out->description, &error) != FC_OK) {
        PyErr_SetString(PyExc_ValueError, error.message);
        return -1;
    }
    return 0;
}
