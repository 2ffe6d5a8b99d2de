/* The extension module: its functions and its state (types, interned names, bound Python
 * functions). Each import of the extension creates a module state. The records of collectives, the
 * files of signals (recorder.c) and the pool of buffers exist once per process. */
#include "../bridge/error.h"
#include "../bridge/pyobject.h"
#include "../core/plan.h"
#include "../kernels/kernels.h"
#include "../kernels/kernels_jit.h"
#include "../kernels/pool.h"
#include "clip.h"
#include "comm_context.h"
#include "dtensor.h"
#include "guard.h"
#include "hook.h"
#include "iteration_context.h"
#include "local_lists.h"
#include "objects.h"
#include "param.h"
#include "param_group.h"
#include "recorder.h"
#include "sequence.h"
#include "shard.h"
#include "state.h"
#include "transitions.h"

#include <string.h>

static fcpy_module *state_of(PyObject *module) {
    return (fcpy_module *)PyModule_GetState(module);
}

/* Returns an argument of bind(), borrowed, or NULL with TypeError if the argument is missing or has
 * the wrong type. */
static PyObject *bound_object(PyObject *kwargs, const char *name) {
    PyObject *value = PyDict_GetItemString(kwargs, name);
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "bind: missing %s", name);
    } else if (strcmp(name, "dtensor_class") == 0 && !PyType_Check(value)) {
        PyErr_Format(PyExc_TypeError, "bind: %s should be a type, not %R", name, value);
        value = NULL;
    }
    return value;
}

/* bind(**objects): stores the Python functions and classes that the extension calls outside of its
 * fast paths. */
static PyObject *module_bind(PyObject *module, PyObject *args, PyObject *kwargs) {
    fcpy_module *mod = state_of(module);
    if (PyTuple_GET_SIZE(args) != 0 || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "bind takes keyword arguments only");
        return NULL;
    }
#define FCPY_CHECK(name)                                                                           \
    if (bound_object(kwargs, #name) == NULL) {                                                     \
        return NULL;                                                                               \
    }
    FCPY_BOUND(FCPY_CHECK)
#undef FCPY_CHECK
#define FCPY_TAKE(name) Py_XSETREF(mod->bound.name, Py_NewRef(PyDict_GetItemString(kwargs, #name)));
    FCPY_BOUND(FCPY_TAKE)
#undef FCPY_TAKE
    fcpy_dtensor_find_slots(mod);
    mod->makes_dtensors = false;
    Py_RETURN_NONE;
}

static PyObject *module_make_dtensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    fcpy_module *mod = state_of(module);
    if (nargs != 2 || !fct_py_is_tensor(args[0])) {
        PyErr_SetString(PyExc_TypeError, "make_dtensors takes a tensor and a spec");
        return NULL;
    }
    if (mod->bound.dtensor_class == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "make_dtensors requires a call of bind before");
        return NULL;
    }
    mod->makes_dtensors = fcpy_dtensor_new_equals_torch(mod, args[0], args[1]);
    return PyBool_FromLong(mod->makes_dtensors);
}

static PyObject *module_fault_arm(PyObject *module, PyObject *arg) {
    (void)module;
    long long n = PyLong_AsLongLong(arg);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    fct_fault_arm(n);
    Py_RETURN_NONE;
}

static const char kernels_name[] = "fck_backend";

static PyObject *module_kernels(PyObject *module, PyObject *args) {
    (void)module;
    int type = FCK_DEVICE_CPU;
    if (!PyArg_ParseTuple(args, "|i:kernels", &type)) {
        return NULL;
    }
    const fck_backend *kernels = fck_backend_of(type);
    if (kernels == NULL) {
        PyErr_SetString(PyExc_ValueError, "fsdp_c has no kernels for this type of device");
        return NULL;
    }
    return PyCapsule_New((void *)(uintptr_t)kernels, kernels_name, NULL);
}

static PyObject *module_simulate_kernels(PyObject *module, PyObject *arg) {
    (void)module;
    const void *kernels = arg == Py_None ? NULL : PyCapsule_GetPointer(arg, kernels_name);
    if (kernels == NULL && PyErr_Occurred()) {
        return NULL;
    }
    fck_set_simulated_backend((const fck_backend *)kernels);
    Py_RETURN_NONE;
}

static PyObject *module_use_jit(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *names[] = {"launch", "moves",   "casts",      "checksums",  "capture",
                            "bind",   "context", "many_moves", "many_casts", NULL};
    unsigned long long values[9] = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$KKKKKKKKK:use_jit", names, &values[0],
                                     &values[1], &values[2], &values[3], &values[4], &values[5],
                                     &values[6], &values[7], &values[8])) {
        return NULL;
    }
    const fck_jit_functions functions = {.launch = (fck_launch)(uintptr_t)values[0],
                                         .moves = (void *)(uintptr_t)values[1],
                                         .casts = (void *)(uintptr_t)values[2],
                                         .checksums = (void *)(uintptr_t)values[3],
                                         .capture = (fck_capture_query)(uintptr_t)values[4],
                                         .bind = (fck_bind)(uintptr_t)values[5],
                                         .context = (void *)(uintptr_t)values[6],
                                         .many_moves = (void *)(uintptr_t)values[7],
                                         .many_casts = (void *)(uintptr_t)values[8]};
    if (functions.launch == NULL) {
        fck_set_cuda_backend(NULL);
    } else if (functions.moves == NULL || functions.casts == NULL || functions.checksums == NULL ||
               functions.capture == NULL) {
        return PyErr_Format(PyExc_ValueError, "use_jit expects the addresses of all kernels");
    } else {
        fck_set_cuda_backend(fck_jit(&functions));
    }
    Py_RETURN_NONE;
}

static PyObject *module_hide_kernels(PyObject *module, PyObject *arg) {
    (void)module;
    int on = PyObject_IsTrue(arg);
    if (on < 0) {
        return NULL;
    }
    fck_hide_backends(on);
    Py_RETURN_NONE;
}

static PyObject *module_kernels_of(PyObject *module, PyObject *arg) {
    (void)module;
    fct_device device;
    if (fct_py_device(arg, &device) != 0) {
        return NULL;
    }
    const fck_backend *kernels = fck_backend_of(device.type);
    return PyUnicode_FromString(kernels != NULL ? kernels->name : "torch");
}

static PyObject *module_shm_group(PyObject *module, PyObject *group) {
    (void)module;
    PyObject *shm_group = NULL;
    fct_pg *pg = NULL;
    if (fct_py_pg(group, &pg) != 0) {
        return NULL;
    }
    const fct_device cpu = {FCT_DEVICE_CPU, -1};
    const fct_transport *transport = fct_transport_select(pg, cpu, FCT_USE_QUERY);
    if (transport == &fct_pg_transport) {
        shm_group = Py_NewRef(Py_None);
    } else if (transport != NULL && fct_py_shm_group(pg, &shm_group) != 0) {
        shm_group = NULL;
    }
    fct_pg_release(pg);
    return shm_group;
}

static const char shm_scope_name[] = "fsdp_c._C.shm";

static PyObject *module_enter_shm(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *group = NULL;
    int use = 0;
    long long bytes = 0;
    void *entered = NULL;
    if (!PyArg_ParseTuple(args, "OiL:enter_shm", &group, &use, &bytes)) {
        return NULL;
    }
    if (use < FCT_USE_GATHER || use > FCT_USE_ALL_REDUCE) {
        return PyErr_Format(PyExc_ValueError, "enter_shm expects a use from 0 to 2, got %d", use);
    }
    if (bytes < 0) {
        return PyErr_Format(PyExc_ValueError, "enter_shm expects nbytes of at least 0, got %lld",
                            bytes);
    }
    fct_pg *pg = NULL;
    if (fct_py_pg(group, &pg) != 0) {
        return NULL;
    }
    const int status = fct_transport_enter(pg, (fct_use)use, bytes, &entered);
    fct_pg_release(pg);
    if (status != 0) {
        return NULL;
    }
    if (entered == NULL) {
        Py_RETURN_NONE;
    }
    PyObject *capsule = PyCapsule_New(entered, shm_scope_name, NULL);
    if (capsule == NULL) {
        fct_pg_leave_shm(entered);
    }
    return capsule;
}

static PyObject *module_set_gradient_all_reduce(PyObject *module, PyObject *value) {
    (void)module;
    const int gradients = PyObject_IsTrue(value);
    return gradients < 0 ? NULL : PyBool_FromLong(fct_set_gradient_all_reduce(gradients != 0));
}

static PyObject *module_leave_shm(PyObject *module, PyObject *capsule) {
    (void)module;
    if (capsule == Py_None) {
        Py_RETURN_NONE;
    }
    void *entered = PyCapsule_GetPointer(capsule, shm_scope_name);
    if (entered == NULL || PyCapsule_SetName(capsule, "left") != 0) { /* a second call fails */
        return NULL;
    }
    fct_pg_leave_shm(entered);
    Py_RETURN_NONE;
}

static PyObject *module_pause_shm(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *group = NULL;
    int paused = 0;
    fct_pg *pg = NULL;
    if (!PyArg_ParseTuple(args, "Op:pause_shm", &group, &paused) || fct_py_pg(group, &pg) != 0) {
        return NULL;
    }
    const int status = fct_transport_pause(pg, paused != 0);
    fct_pg_release(pg);
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *module_memory(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    const fck_pool_facts f = fck_pool_stats();
    return Py_BuildValue("{sKsKsKsKsK}", "used", f.used_bytes, "cached", f.cached_bytes, "peak",
                         f.peak_bytes, "taken", f.taken, "mapped", f.mapped);
}

static PyObject *module_trim_memory(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    fck_pool_trim();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"bind", (PyCFunction)(void (*)(void))module_bind, METH_VARARGS | METH_KEYWORDS,
     "bind(**objects): stores the Python functions and classes that the extension calls."},
    {"clip_collect", (PyCFunction)(void (*)(void))fcpy_clip_collect, METH_FASTCALL,
     "clip_collect(tensors, are_params): returns (local gradients, kinds, index of each gradient's "
     "kind). A kind is (mesh, placements), or (None, None) for plain tensors. If are_params is "
     "true, tensors are parameters, and parameters without gradient are skipped. Otherwise tensors "
     "are gradients."},
    {"clip_norm", (PyCFunction)(void (*)(void))fcpy_clip_norm, METH_FASTCALL,
     "clip_norm(gradients, indices, groups): returns the total 2-norm over all ranks of local "
     "gradients. Returns None if the list is empty or a gradient is not contiguous float32 on the "
     "CPU. groups has (names of process groups, key) for each kind. Kinds with equal keys are "
     "reduced together."},
    {"clip_scale", (PyCFunction)(void (*)(void))fcpy_clip_scale, METH_FASTCALL,
     "clip_scale(gradients, max_norm, total, max_numel, all_or_none): scales local gradients. "
     "Returns (factor, gradients that were not scaled). Gradients are not scaled if they have more "
     "than max_numel elements, or are not contiguous float32 on the CPU. With all_or_none, scales "
     "nothing and returns None if a gradient is not contiguous float32 on the CPU."},
    {"bump_shard_versions", (PyCFunction)(void (*)(void))fcpy_bump_shard_versions, METH_FASTCALL,
     "bump_shard_versions(optimizer, args, kwargs): post-hook of optimizer.step(); bumps the "
     "version counters of the local tensors of its DTensors."},
    {"guard_bind", fcpy_guard_bind, METH_VARARGS,
     "guard_bind(group_methods, state_methods, entries, log_cache, log_enabled): stores the "
     "unpatched methods and functions of torch's classes and modules."},
    {"local_lists", (PyCFunction)(void (*)(void))fcpy_local_lists, METH_FASTCALL,
     "local_lists(lists, layout_cache, layouts_equal): returns new lists with local tensors in "
     "place of DTensors. The first list has the parameters. Returns None if the layout of an item "
     "differs from that of its parameter. layouts_equal(spec, spec) compares layouts; the dict "
     "layout_cache keeps its results."},
    {"local_group", (PyCFunction)(void (*)(void))fcpy_local_group, METH_FASTCALL,
     "local_group(params, state, keys, layout_cache, layouts_equal): converts the optimizer group "
     "like local_lists. Returns a tuple of lists: the parameters with gradients, their local "
     "tensors, the gradients, and state[param][key] for each key. For a key of None the list is "
     "empty. Returns None if a state is missing, a layout differs, or a parameter or "
     "gradient is complex or sparse."},
    {"kernels_of", module_kernels_of, METH_O,
     "kernels_of(device): returns the name of the kernels that pack and unpack on this "
     "torch.device: 'cpu', 'cuda', 'nvrtc', or 'torch' for torch's multi-tensor operations."},
    {"use_jit", (PyCFunction)(void (*)(void))module_use_jit, METH_VARARGS | METH_KEYWORDS,
     "use_jit(*, launch=0, moves=0, casts=0, checksums=0, capture=0, bind=0, context=0, "
     "many_moves=0, many_casts=0): sets the kernels of CUDA devices. launch and capture are the "
     "addresses of cuLaunchKernel and cuStreamIsCapturing. moves, casts and checksums are kernels "
     "that the driver has loaded; many_moves and many_casts are those for more than 78 tensors, or "
     "0. bind is the address of cuCtxSetCurrent, which makes context current in threads without a "
     "context. The addresses must stay valid. A launch of 0 removes the kernels."},
    {"shm_group", module_shm_group, METH_O,
     "shm_group(group): returns the ProcessGroup whose backend moves the data of a group "
     "through shared memory. Returns None if the group's own backend moves the data. All ranks "
     "must call it at the same point."},
    {"enter_shm", module_enter_shm, METH_VARARGS,
     "enter_shm(group, use, nbytes): begins a section in which the group's collectives use "
     "shared memory, if the ranks have agreed on it. use is 0 for gathers, 1 for reduce-scatters, "
     "2 for this thread's all-reduces of gradients. nbytes is the size of this rank's input, 0: "
     "unknown. Returns the argument for leave_shm."},
    {"set_gradient_all_reduce", module_set_gradient_all_reduce, METH_O,
     "set_gradient_all_reduce(enabled): sets whether the all-reduces of this thread reduce buffers "
     "of gradients. Returns the previous value."},
    {"leave_shm", module_leave_shm, METH_O,
     "leave_shm(entered): ends the section that enter_shm began."},
    {"pause_shm", module_pause_shm, METH_VARARGS,
     "pause_shm(group, paused): sets whether the group's own backend moves the data although "
     "shared memory is available."},
    {"memory", module_memory, METH_NOARGS,
     "memory(): returns statistics of the pool of CPU buffers: bytes in use, bytes cached, the "
     "peak of bytes in use over the last iterations, blocks taken, blocks mapped by the system."},
    {"trim_memory", module_trim_memory, METH_NOARGS,
     "trim_memory(): returns the cached buffers of the pool to the system."},
    {"make_dtensors", (PyCFunction)(void (*)(void))module_make_dtensors, METH_FASTCALL,
     "make_dtensors(local, spec): makes a DTensor of the two in the extension and with torch's "
     "function. Returns whether they are equal. If so, the extension makes all later DTensors."},
    {"recorder_read", fcpy_recorder_read, METH_O,
     "recorder_read(count): returns the time in nanoseconds, and the records of the last "
     "collectives and of older ones that a thread waits for, as bytes, newest first; see "
     "core/recorder.h."},
    {"recorder_write", fcpy_recorder_write, METH_VARARGS,
     "recorder_write(path, header): writes header and records to a file."},
    {"recorder_write_on_signal", fcpy_recorder_write_on_signal, METH_VARARGS,
     "recorder_write_on_signal(signum, path, header): writes the file when the signal arrives, and "
     "then runs the previous action of the signal."},
    {"collective_entries", fcpy_collective_entries, METH_O,
     "collective_entries(group): returns the number of the first of the latest collectives over "
     "the process group's own backend, and their entries as bytes; see transport/agreement.h."},
    {"collective_signature", fcpy_collective_signature, METH_VARARGS,
     "collective_signature(group, number): returns the signature of a collective, 0 if unknown."},
    {"checksum_intervals", fcpy_checksum_intervals, METH_O,
     "checksum_intervals(group): returns the latest intervals of checksums on a device with "
     "streams, as (number, hash); a hash of 0: unknown."},
    {"checksum_entries", fcpy_checksum_entries, METH_VARARGS,
     "checksum_entries(group, number): returns 0 and the first 2048 checksums of an interval, in "
     "the format of collective_entries."},
    {"label_blocks", fcpy_label_blocks, METH_O,
     "label_blocks(group): returns the hashes of blocks of labels as tuples (number of the first "
     "collective, number of collectives, hash); see transport/label_blocks.h."},
    {"collective_difference", fcpy_collective_difference, METH_VARARGS,
     "collective_difference((rank, first, entries), (rank, first, entries), issued): describes the "
     "first collective that differs between two ranks. `issued`: all of them were issued."},
    {"stop_collectives", fcpy_stop_collectives, METH_VARARGS,
     "stop_collectives(group, text): waits for collectives of the process group's own backend, and "
     "later collectives, raise RuntimeError(text)."},
    {"has_memory", fcpy_has_memory, METH_O,
     "has_memory(tensor): returns whether the tensor is dense and has memory of its own, unlike a "
     "wrapper of other tensors."},
    {NULL, NULL, 0, NULL},
};

static PyObject *module_set_min_owned_chunk_bytes(PyObject *self, PyObject *value) {
    (void)self;
    const long long bytes = PyLong_AsLongLong(value);
    if (bytes == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    fc_set_min_owned_chunk_bytes(bytes);
    Py_RETURN_NONE;
}

/* For tests and measurements, in the namespace _C._testing. */
static PyMethodDef testing_methods[] = {
    {"fault_arm", module_fault_arm, METH_O,
     "fault_arm(n): makes the n-th fallible call into torch from now on, on this thread, raise "
     "RuntimeError. 0 disarms the fault."},
    {"kernels", module_kernels, METH_VARARGS,
     "kernels(type=0): returns a capsule with the kernels (fck_backend in kernels.h) of a device "
     "type, given by torch's number. 0 is the CPU."},
    {"simulate_kernels", module_simulate_kernels, METH_O,
     "simulate_kernels(capsule or None): sets the kernels of all devices without kernels of their "
     "own. The capsule's memory must stay valid."},
    {"hide_kernels", module_hide_kernels, METH_O,
     "hide_kernels(on): sets whether torch's multi-tensor operations replace all kernels, in all "
     "threads."},
    {"set_min_owned_chunk_bytes", module_set_min_owned_chunk_bytes, METH_O,
     "set_min_owned_chunk_bytes(bytes): sets the size in bytes from which a parameter is a chunk "
     "of its own, in later plans. All ranks must use the same value."},
    {"overrides", fcpy_guard_overrides, METH_O,
     "overrides(group_or_state): returns the bits of the patched functions and overridden methods "
     "that concern the object; 0 if there are none."},
    {NULL, NULL, 0, NULL},
};

static int add_testing(PyObject *module) {
    PyObject *testing = PyModule_New("fsdp_c._C._testing");
    if (testing == NULL) {
        return -1;
    }
    int failed = 0;
    for (PyMethodDef *def = testing_methods; failed == 0 && def->ml_name != NULL; def++) {
        PyObject *function = PyCFunction_New(def, module); /* with the state of `module` */
        failed = function == NULL ? -1 : PyModule_AddObjectRef(testing, def->ml_name, function);
        Py_XDECREF(function);
    }
#ifdef NDEBUG
    PyObject *asserts = Py_False;
#else
    PyObject *asserts = Py_True;
#endif
    failed = failed != 0 ? failed : PyModule_AddObjectRef(testing, "assertions", asserts);
    failed = failed != 0 ? failed : PyModule_AddObjectRef(module, "_testing", testing);
    Py_DECREF(testing);
    return failed;
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) {
        return -1;
    }
    *slot = (PyTypeObject *)type;
    return PyModule_AddType(module, *slot);
}

static int module_exec(PyObject *module) {
    fcpy_module *mod = state_of(module);
    memset(mod, 0, sizeof *mod);
#define FCPY_INTERN(name)                                                                          \
    mod->names.name = PyUnicode_InternFromString(#name);                                           \
    if (mod->names.name == NULL) {                                                                 \
        return -1;                                                                                 \
    }
    FCPY_NAMES(FCPY_INTERN)
#undef FCPY_INTERN
    mod->no_grad_kwnames = PyTuple_Pack(1, mod->names.requires_grad);
    if (mod->no_grad_kwnames == NULL || add_type(module, &fcpy_param_spec, &mod->param_type) != 0 ||
        add_type(module, &fcpy_comm_spec, &mod->comm_type) != 0 ||
        add_type(module, &fcpy_iteration_spec, &mod->iteration_type) != 0 ||
        add_type(module, &fcpy_group_spec, &mod->group_type) != 0 ||
        add_type(module, &fcpy_state_spec, &mod->state_type) != 0 ||
        add_type(module, &fcpy_hook_spec, &mod->hook_type) != 0 ||
        fcpy_guard_add_names(module) != 0 || add_testing(module) != 0 ||
        PyModule_AddIntConstant(module, "CUDA_KERNELS", fck_cuda_built()) != 0) {
        return -1;
    }
    fcpy_set_departure_handler();
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    fcpy_module *mod = state_of(module);
    Py_VISIT(mod->param_type);
    Py_VISIT(mod->comm_type);
    Py_VISIT(mod->iteration_type);
    Py_VISIT(mod->group_type);
    Py_VISIT(mod->state_type);
    Py_VISIT(mod->hook_type);
    Py_VISIT(mod->deferred_decrefs);
#define FCPY_VISIT(name) Py_VISIT(mod->bound.name);
    FCPY_BOUND(FCPY_VISIT)
#undef FCPY_VISIT
    return fcpy_guard_traverse(&mod->guard, visit, arg);
}

static int module_clear(PyObject *module) {
    fcpy_module *mod = state_of(module);
#define FCPY_CLEAR_BOUND(name) Py_CLEAR(mod->bound.name);
    FCPY_BOUND(FCPY_CLEAR_BOUND)
#undef FCPY_CLEAR_BOUND
#define FCPY_CLEAR_NAME(name) Py_CLEAR(mod->names.name);
    FCPY_NAMES(FCPY_CLEAR_NAME)
#undef FCPY_CLEAR_NAME
    fcpy_guard_clear(&mod->guard);
    Py_CLEAR(mod->no_grad_kwnames);
    Py_CLEAR(mod->deferred_decrefs);
    Py_CLEAR(mod->param_type);
    Py_CLEAR(mod->comm_type);
    Py_CLEAR(mod->iteration_type);
    Py_CLEAR(mod->group_type);
    Py_CLEAR(mod->state_type);
    Py_CLEAR(mod->hook_type);
    return 0;
}

static void module_free(void *module) {
    (void)module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* csrc/bridge and csrc/transport have state per process, and torch supports one interpreter. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = fcpy_module_name,
    .m_doc = "The C core of fsdp_c. Import fsdp_c, not this module.",
    .m_size = sizeof(fcpy_module),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void) {
    return PyModuleDef_Init(&module_def);
}
