/* The compatibility guard: detects patched or overridden methods and functions.
 *
 * Libraries and torch's own tests replace methods of FSDP2's classes, attributes of single groups
 * and functions of its modules. Every hook checks for replacements, so the result is cached with
 * the version tags of the types and dicts that it was read from. CPython changes the tag of a type
 * or dict whenever the type or dict changes. With equal tags the cached result is valid; otherwise
 * all watched names are read again.
 *
 * Owns the watched objects and their expected values, in the module state (fcpy_guard). Tags of
 * dicts exist up to Python 3.13; without them every check reads the names. */
#include "guard.h"

#include "../bridge/error.h"

/* ---- version tags; 0: unknown, the cached result is not valid ---- */

static uint64_t dict_tag(PyObject *dict) {
    if (dict == NULL) {
        return 1; /* no dict: all tags of dicts are greater */
    }
#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag + 1;
#pragma GCC diagnostic pop
#else
    return 0;
#endif
}

static uint64_t type_tag(PyTypeObject *type) {
#if PY_VERSION_HEX < 0x030C0000
    if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
        return 0;
    }
#endif
    return type->tp_version_tag;
}

static bool is_current(const fcpy_version_cache *cache, PyTypeObject *type, PyObject *dict) {
    uint64_t of_type = type_tag(type);
    uint64_t of_dict = dict_tag(dict);
    return of_type == cache->type_tag && of_type != 0 && of_dict == cache->dict_tag && of_dict != 0;
}

/* ---- methods of groups and states ---- */

typedef struct fcpy_method {
    const char *name;
    uint32_t bit;
} fcpy_method;

#define FCPY_ENTRY(name, bit) {#name, bit},
static const fcpy_method group_table[] = {FCPY_GROUP_METHODS(FCPY_ENTRY)};
static const fcpy_method state_table[] = {FCPY_STATE_METHODS(FCPY_ENTRY)};
#undef FCPY_ENTRY

const char *fcpy_group_method(uint32_t bit) {
    for (size_t i = 0; i < sizeof group_table / sizeof group_table[0]; i++) {
        if (group_table[i].bit == bit) {
            return group_table[i].name;
        }
    }
    return NULL;
}

/* Whether the attribute is the method itself, bound to the object. Some programs read a method and
 * assign it back. */
static bool is_own_method(PyObject *value, PyObject *obj, PyObject *expected) {
    return PyMethod_Check(value) && PyMethod_GET_SELF(value) == obj &&
           PyMethod_GET_FUNCTION(value) == expected;
}

/* Whether the type has the attribute `expected` under the name. For None: whether it has no such
 * attribute. */
static bool type_has(PyTypeObject *type, PyObject *name, PyObject *expected) {
    PyObject *value = _PyType_Lookup(type, name);
    return value == expected || (value == NULL && expected == Py_None);
}

/* Returns the item of a dict, borrowed, or NULL. `dict` may be NULL. A user's key may raise when it
 * is compared with the name: the exception is dropped. */
static PyObject *find_item(PyObject *dict, PyObject *name) {
    PyObject *item = dict != NULL ? PyDict_GetItemWithError(dict, name) : NULL;
    if (item == NULL) {
        PyErr_Clear();
    }
    return item;
}

/* Returns the bits of the methods that are replaced on the object, on its type or on torch's class.
 * `expected` is (torch's class, (name, descriptor, function), ...) in the order of the table. The
 * type should have the descriptor (fsdp_c/_compat/guard.py), torch's class the function. None
 * stands for a method that this torch does not have. */
static uint32_t find_overrides(PyObject *obj, PyObject *dict, const fcpy_method *table,
                               PyObject *expected) {
    uint32_t bits = 0;
    PyTypeObject *torch_class = (PyTypeObject *)PyTuple_GET_ITEM(expected, 0);
    for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(expected); i++) {
        PyObject *method = PyTuple_GET_ITEM(expected, i);
        PyObject *name = PyTuple_GET_ITEM(method, 0);
        PyObject *function = PyTuple_GET_ITEM(method, 2);
        PyObject *attribute = find_item(dict, name);
        bool same = attribute != NULL ? is_own_method(attribute, obj, function)
                                      : type_has(Py_TYPE(obj), name, PyTuple_GET_ITEM(method, 1)) &&
                                            type_has(torch_class, name, function);
        bits |= same ? 0 : table[i - 1].bit;
    }
    return bits;
}

static uint32_t overrides_of(PyObject *obj, PyObject *dict, fcpy_version_cache *cache,
                             const fcpy_method *table, PyObject *expected) {
    if (is_current(cache, Py_TYPE(obj), dict)) {
        return cache->bits;
    }
    if (expected == NULL) {
        return 0; /* before guard_bind() */
    }
    cache->bits = find_overrides(obj, dict, table, expected);
    cache->type_tag = type_tag(Py_TYPE(obj)); /* after the lookups, because they may assign a tag */
    cache->dict_tag = dict_tag(dict);
    return cache->bits;
}

uint32_t fcpy_group_overrides(fcpy_group *self) {
    return overrides_of((PyObject *)self, self->dict, &self->version_cache, group_table,
                        self->mod->guard.group_methods);
}

uint32_t fcpy_state_overrides(fcpy_state *self) {
    return overrides_of((PyObject *)self, self->dict, &self->version_cache, state_table,
                        self->mod->guard.state_methods);
}

/* ---- functions of torch's modules ---- */

/* An entry is (place, name, expected, also, bits). The place is a dict or a type. The bits are set
 * while it holds neither `expected` nor `also` under the name. */
static uint32_t entry_bits(PyObject *entry) {
    PyObject *place = PyTuple_GET_ITEM(entry, 0);
    PyObject *name = PyTuple_GET_ITEM(entry, 1);
    PyObject *value =
        PyType_Check(place) ? _PyType_Lookup((PyTypeObject *)place, name) : find_item(place, name);
    bool same = value == PyTuple_GET_ITEM(entry, 2) || value == PyTuple_GET_ITEM(entry, 3);
    return same ? 0 : (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(entry, 4));
}

static uint64_t place_tag(PyObject *place) {
    return PyType_Check(place) ? type_tag((PyTypeObject *)place) : dict_tag(place);
}

static uint32_t find_patches(fcpy_guard *guard) {
    guard->bits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->entries); i++) {
        guard->bits |= entry_bits(PyTuple_GET_ITEM(guard->entries, i));
    }
    for (size_t i = 0; i < guard->places.count; i++) {
        guard->places.tags[i] = place_tag(guard->places.objects[i]);
    }
    return guard->bits;
}

static uint32_t patch_bits(fcpy_guard *guard) {
    for (size_t i = 0; i < guard->places.count; i++) {
        uint64_t tag = place_tag(guard->places.objects[i]);
        if (tag != guard->places.tags[i] || tag == 0) {
            return find_patches(guard);
        }
    }
    return guard->bits;
}

/* ---- debug lines ---- */

/* A logger caches enabled levels in a dict, and logging clears the dict whenever any level changes.
 * So the cached answer is valid while the tag of the dict is unchanged. */
static bool is_logging(fcpy_guard *guard) {
    uint64_t tag = guard->log_cache != NULL ? dict_tag(guard->log_cache) : guard->log_tag;
    if (tag == guard->log_tag && tag != 0) {
        return guard->log;
    }
    if (guard->log_cache == NULL) {
        return false;
    }
    /* Clean-up code calls this function with an exception set. */
    void *error = fct_error_set_aside();
    PyObject *answer = PyObject_CallNoArgs(guard->log_enabled);
    guard->log = answer != NULL && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    fct_error_put_back(error);
    guard->log_tag = dict_tag(guard->log_cache); /* the call may have filled the dict */
    return guard->log;
}

void fcpy_log(fcpy_module *mod, PyObject *group, const char *label) {
    if (!is_logging(&mod->guard)) {
        return;
    }
    void *error = fct_error_set_aside();
    PyObject *line = PyObject_CallFunction(mod->bound.log_debug, "Os", group, label);
    Py_XDECREF(line);
    fct_error_put_back(error); /* a failed debug line is not an error */
}

void fcpy_guard_read(fcpy_guard *guard) {
    (void)patch_bits(guard);
    (void)is_logging(guard);
}

/* ---- binding ---- */

/* Checks that the tuple is (type, (name, descriptor, function) for each method of the table). */
static int check_methods(PyObject *tuple, size_t count) {
    bool fits = PyTuple_Check(tuple) && (size_t)PyTuple_GET_SIZE(tuple) == count + 1 &&
                PyType_Check(PyTuple_GET_ITEM(tuple, 0));
    for (size_t i = 1; fits && i <= count; i++) {
        PyObject *method = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
        fits = PyTuple_Check(method) && PyTuple_GET_SIZE(method) == 3;
    }
    if (!fits) {
        PyErr_SetString(
            PyExc_TypeError,
            "guard_bind expects torch's class, then (name, descriptor, function) for each method");
    }
    return fits ? 0 : -1;
}

/* Appends a place unless the table contains it. Returns -1 with ValueError if the table is full. */
static int add_place(fcpy_places *places, PyObject *object) {
    size_t at = 0;
    while (at < places->count && places->objects[at] != object) {
        at++;
    }
    if (at == FCPY_MAX_PLACES) {
        PyErr_SetString(PyExc_ValueError, "guard_bind: too many watched places");
        return -1;
    }
    places->objects[at] = object;
    places->tags[at] = 0;
    places->count += at == places->count ? 1 : 0;
    return 0;
}

static int collect_places(PyObject *entries, fcpy_places *places) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); i++) {
        PyObject *entry = PyTuple_GET_ITEM(entries, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 5 ||
            !PyLong_Check(PyTuple_GET_ITEM(entry, 4))) {
            PyErr_SetString(PyExc_TypeError, "guard_bind expects entries of (place, name, "
                                             "expected, also, bits)");
            return -1;
        }
        PyObject *place = PyTuple_GET_ITEM(entry, 0);
        if (!PyType_Check(place) && !PyDict_Check(place)) {
            PyErr_SetString(PyExc_TypeError,
                            "guard_bind: a watched place must be a type or a dict");
            return -1;
        }
        if (add_place(places, place) != 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *fcpy_guard_bind(PyObject *module, PyObject *args) {
    fcpy_guard *guard = &((fcpy_module *)PyModule_GetState(module))->guard;
    PyObject *group_methods = NULL;
    PyObject *state_methods = NULL;
    PyObject *entries = NULL;
    PyObject *log_cache = NULL;
    PyObject *log_enabled = NULL;
    fcpy_places places = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOO!O!O", &group_methods, &state_methods, &PyTuple_Type, &entries,
                          &PyDict_Type, &log_cache, &log_enabled) ||
        check_methods(group_methods, sizeof group_table / sizeof group_table[0]) != 0 ||
        check_methods(state_methods, sizeof state_table / sizeof state_table[0]) != 0 ||
        collect_places(entries, &places) != 0) {
        return NULL;
    }
    Py_XSETREF(guard->group_methods, Py_NewRef(group_methods));
    Py_XSETREF(guard->state_methods, Py_NewRef(state_methods));
    Py_XSETREF(guard->entries, Py_NewRef(entries));
    Py_XSETREF(guard->log_cache, Py_NewRef(log_cache));
    Py_XSETREF(guard->log_enabled, Py_NewRef(log_enabled));
    guard->places = places;
    guard->log_tag = 0;
    Py_RETURN_NONE;
}

static PyObject *names_of(const fcpy_method *table, size_t count) {
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_InternFromString(table[i].name);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return names;
}

int fcpy_guard_add_names(PyObject *module) {
    PyObject *group = names_of(group_table, sizeof group_table / sizeof group_table[0]);
    PyObject *state = names_of(state_table, sizeof state_table / sizeof state_table[0]);
    int result =
        group != NULL && state != NULL &&
                PyModule_AddObjectRef(module, "GROUP_METHODS", group) == 0 &&
                PyModule_AddObjectRef(module, "STATE_METHODS", state) == 0 &&
                PyModule_AddIntConstant(module, "CALL_GATHER", FCPY_CALL_GATHER) == 0 &&
                PyModule_AddIntConstant(module, "CALL_REDUCE", FCPY_CALL_REDUCE) == 0 &&
                PyModule_AddIntConstant(module, "CALL_MEMORY", FCPY_CALL_MEMORY) == 0 &&
                PyModule_AddIntConstant(module, "CALL_SWAP", FCPY_CALL_SWAP) == 0 &&
                PyModule_AddIntConstant(module, "CALL_GRADS", FCPY_CALL_GRADS) == 0 &&
                PyModule_AddIntConstant(module, "CALL_NODE_CLASS", FCPY_CALL_NODE_CLASS) == 0 &&
                PyModule_AddIntConstant(module, "CALL_NODE", FCPY_CALL_NODE) == 0
            ? 0
            : -1;
    Py_XDECREF(group);
    Py_XDECREF(state);
    return result;
}

/* ---- for tests and measurements ---- */

PyObject *fcpy_guard_overrides(PyObject *module, PyObject *obj) {
    fcpy_module *mod = (fcpy_module *)PyModule_GetState(module);
    if (PyObject_TypeCheck(obj, mod->group_type)) {
        return PyLong_FromUnsignedLong(fcpy_group_overrides((fcpy_group *)obj) |
                                       patch_bits(&mod->guard));
    }
    if (PyObject_TypeCheck(obj, mod->state_type)) {
        return PyLong_FromUnsignedLong(fcpy_state_overrides((fcpy_state *)obj));
    }
    PyErr_SetString(PyExc_TypeError, "overrides expects a ParamGroup or a State");
    return NULL;
}

/* ---- life ---- */

int fcpy_guard_traverse(fcpy_guard *guard, visitproc visit, void *arg) {
    Py_VISIT(guard->group_methods);
    Py_VISIT(guard->state_methods);
    Py_VISIT(guard->entries);
    Py_VISIT(guard->log_cache);
    Py_VISIT(guard->log_enabled);
    return 0;
}

void fcpy_guard_clear(fcpy_guard *guard) {
    guard->places.count = 0; /* the objects are borrowed from the entries */
    guard->bits = 0;
    Py_CLEAR(guard->group_methods);
    Py_CLEAR(guard->state_methods);
    Py_CLEAR(guard->entries);
    Py_CLEAR(guard->log_cache);
    Py_CLEAR(guard->log_enabled);
}
