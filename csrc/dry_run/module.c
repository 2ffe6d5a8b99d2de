/* The extension module fsdp_c._dry_run: run(), and the type of its events. The module has no global
 * state beside the record of the running dry run (record.h). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "parse.h"

typedef struct fcd_module {
    PyTypeObject *event_type;
} fcd_module;

/* ---- results ---- */

static PyStructSequence_Field event_fields[] = {
    {"kind", "Operation of the core, such as 'alloc' or 'all_gather'."},
    {"call", "Index of the running call; -1: initialization of the model."},
    {"unit", "Index of the unit; -1: none."},
    {"stream", "Number of the stream; 0: the compute stream."},
    {"object", "Number of the storage, work or event; for 'register' the sharded state."},
    {"bytes", "Bytes that were allocated, freed, written or sent."},
    {"live", "For 'alloc' and 'free': bytes of the same purpose in use afterwards."},
    {"label", "Purpose of memory, name of a profiler range or of a parameter; None: no label."},
    {NULL, NULL},
};

static PyStructSequence_Desc event_description = {
    .name = "fsdp_c._dry_run.Event",
    .doc = "One event of a dry run.",
    .fields = event_fields,
    .n_in_sequence = 8,
};

static PyObject *make_event(PyTypeObject *type, const fcd_event *e) {
    PyObject *event = PyStructSequence_New(type);
    if (event == NULL) {
        return NULL;
    }
    PyObject *const values[] = {
        PyUnicode_InternFromString(fcd_kind_names[e->kind]),
        PyLong_FromLong(e->call),
        PyLong_FromLong(e->unit),
        PyLong_FromLong(e->stream),
        PyLong_FromLongLong(e->object),
        PyLong_FromLongLong(e->bytes),
        PyLong_FromLongLong(e->live),
        e->label != NULL ? PyUnicode_InternFromString(e->label) : Py_NewRef(Py_None),
    };
    bool complete = true;
    for (Py_ssize_t i = 0; i < (Py_ssize_t)(sizeof values / sizeof values[0]); i++) {
        PyStructSequence_SetItem(event, i, values[i]);
        complete = complete && values[i] != NULL;
    }
    if (!complete) {
        Py_CLEAR(event);
    }
    return event;
}

static PyObject *make_events(PyTypeObject *type, const fcd_record *r) {
    PyObject *list = PyList_New((Py_ssize_t)r->count);
    for (size_t i = 0; list != NULL && i < r->count; i++) {
        PyObject *event = make_event(type, &r->events[i]);
        if (event == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, event);
    }
    return list;
}

/* ---- run ---- */

static void raise_status(fc_status status, const char *message) {
    PyObject *type = status == FC_EVALUE    ? PyExc_ValueError
                     : status == FC_ENOMEM  ? PyExc_MemoryError
                     : status == FC_EASSERT ? PyExc_AssertionError
                                            : PyExc_RuntimeError;
    PyErr_SetString(type, message);
}

/* Initializes the model and runs the calls. Each storage has an `alloc` call, so there are at most
 * as many storages as calls. Returns 0, or -1 with an exception. */
static int run_model(fcd_model *m, const fcd_parsed *p) {
    char message[sizeof m->error.message + 64];
    fc_status status = fcd_model_init(m, &p->description, p->call_count);
    if (status != FC_OK) {
        raise_status(status, m->error.message);
        return -1;
    }
    for (size_t i = 0; i < p->call_count; i++) {
        fcd_current_record->call = (int32_t)i;
        status = fcd_model_call(m, &p->calls[i]);
        if (status != FC_OK) {
            (void)snprintf(message, sizeof message, "calls[%zu] (%s): %s", i,
                           fcd_call_names[p->calls[i].kind], m->error.message);
            raise_status(status, message);
            return -1;
        }
    }
    if (fcd_current_record->failed) {
        (void)PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Runs a parsed description. Returns (events, peak), or NULL with an exception. */
static PyObject *run_parsed(PyTypeObject *type, const fcd_parsed *p) {
    fcd_record record;
    fcd_model model;
    PyObject *events = NULL;
    PyObject *result = NULL;
    fcd_record_init(&record, p->description.streams);
    if (run_model(&model, p) == 0) {
        events = make_events(type, &record);
    }
    record.closed = true;
    fcd_model_fini(&model);
    if (events != NULL && fcd_record_objects(&record) > 0) {
        PyErr_Format(PyExc_SystemError, "fsdp_c: a dry run leaves %zu objects",
                     fcd_record_objects(&record));
    } else if (events != NULL) {
        result = Py_BuildValue("(OL)", events, (long long)record.device_peak);
    }
    Py_XDECREF(events);
    fcd_record_fini(&record);
    return result;
}

static PyObject *module_run(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"units", "states", "calls", "streams", NULL};
    const fcd_module *mod = (const fcd_module *)PyModule_GetState(module);
    PyObject *units = NULL;
    PyObject *states = NULL;
    PyObject *calls = NULL;
    int streams = 0;
    fcd_parsed parsed;
    PyObject *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|$p:run", names, &PyList_Type, &units,
                                     &PyList_Type, &states, &PyList_Type, &calls, &streams)) {
        return NULL;
    }
    if (fcd_current_record != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "run: a dry run is running in this thread");
        return NULL;
    }
    if (fcd_parse(units, states, calls, streams != 0, &parsed) == 0) {
        result = run_parsed(mod->event_type, &parsed);
    }
    fcd_parsed_fini(&parsed);
    return result;
}

/* ---- module ---- */

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))module_run, METH_VARARGS | METH_KEYWORDS,
     "run(units, states, calls, *, streams=False)\n--\n\n"
     "Runs the calls on a model without memory. Returns its events, and the peak of device memory\n"
     "in bytes. Raises ValueError with the name of the item if the description is invalid."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    fcd_module *mod = (fcd_module *)PyModule_GetState(module);
    mod->event_type = PyStructSequence_NewType(&event_description);
    return mod->event_type != NULL
               ? PyModule_AddObjectRef(module, "Event", (PyObject *)mod->event_type)
               : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(((fcd_module *)PyModule_GetState(module))->event_type);
    return 0;
}

static int module_clear(PyObject *module) {
    Py_CLEAR(((fcd_module *)PyModule_GetState(module))->event_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fsdp_c._dry_run",
    .m_doc = "Runs fsdp_c's state machine on sizes only, and returns its events.",
    .m_size = sizeof(fcd_module),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__dry_run(void);

PyMODINIT_FUNC PyInit__dry_run(void) {
    return PyModuleDef_Init(&definition);
}
