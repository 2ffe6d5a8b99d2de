/* Gradient clipping in three functions, which are called in this order (fsdp_c/clip.py and
 * fsdp_c/_runtime/torch_clipping.py). clip_collect lists the local gradients. For contiguous
 * float32 tensors on the CPU, clip_norm computes their 2-norm over all ranks and clip_scale scales
 * them. torch's operators process all other gradients.
 *
 * The functions keep no state. They check the extent of a tensor against its storage, then take its
 * address and use it at once, with the GIL held. clip_norm is called only if no dispatch mode is
 * active: Python code of a mode could free the tensors before their use. */
#include "clip.h"

#include "../bridge/pyobject.h"
#include "../kernels/kernels.h"
#include "../kernels/norm.h"
#include "dtensor.h"

#include <math.h>

/* ---- collecting ---- */

/* The sharding of a gradient. Kinds are equal if the types of their placements are equal. */
typedef struct kind {
    PyObject *mesh;       /* NULL: plain tensors */
    PyObject *placements; /* tuple */
} kind;

static void kind_clear(kind *k) {
    Py_CLEAR(k->mesh);
    Py_CLEAR(k->placements);
}

static bool kind_equal(const kind *a, const kind *b) {
    if (a->mesh != b->mesh) {
        return false;
    }
    if (a->placements == b->placements) {
        return true;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(a->placements);
    if (count != PyTuple_GET_SIZE(b->placements)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (Py_TYPE(PyTuple_GET_ITEM(a->placements, i)) !=
            Py_TYPE(PyTuple_GET_ITEM(b->placements, i))) {
            return false;
        }
    }
    return true;
}

/* Sets *out to the kind of a gradient, with new references. Both fields are NULL for a plain
 * tensor. */
static int read_kind(const fcpy_module *mod, PyObject *grad, kind *out) {
    out->mesh = out->placements = NULL;
    const int is_dtensor = PyObject_IsInstance(grad, mod->bound.dtensor_class);
    if (is_dtensor <= 0) {
        return is_dtensor;
    }
    PyObject *spec = fcpy_dtensor_spec(mod, grad);
    if (spec == NULL) {
        return -1;
    }
    out->mesh = PyObject_GetAttr(spec, mod->names.mesh);
    out->placements = out->mesh == NULL ? NULL : PyObject_GetAttr(spec, mod->names.placements);
    Py_DECREF(spec);
    if (out->placements == NULL || !PyTuple_Check(out->placements)) {
        if (out->placements != NULL) {
            PyErr_SetString(PyExc_TypeError, "placements of a DTensor should be a tuple");
        }
        kind_clear(out);
        return -1;
    }
    return 0;
}

/* Returns the local tensor of a gradient of kind `k`; new reference. */
static PyObject *local_tensor_of(const fcpy_module *mod, PyObject *grad, const kind *k) {
    return k->mesh != NULL ? fcpy_dtensor_local(mod, grad) : Py_NewRef(grad);
}

/* Returns the index of `key` in `kinds`, a list of (mesh, placements) tuples. Appends `key` if it
 * is new. Returns -1 with an exception on failure. There are few kinds, so a linear search is
 * fastest. */
static Py_ssize_t kind_index(PyObject *kinds, const kind *key) {
    const Py_ssize_t count = PyList_GET_SIZE(kinds);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GET_ITEM(kinds, i);
        kind entry = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
        if (entry.mesh == Py_None) {
            entry.mesh = entry.placements = NULL;
        }
        if (kind_equal(&entry, key)) {
            return i;
        }
    }
    PyObject *pair = PyTuple_Pack(2, key->mesh != NULL ? key->mesh : Py_None,
                                  key->placements != NULL ? key->placements : Py_None);
    const int failed = pair == NULL ? -1 : PyList_Append(kinds, pair);
    Py_XDECREF(pair);
    return failed ? -1 : count;
}

/* Appends the local tensor of a gradient to `locals`, and the index of its kind to `indices`.
 * Appends the kind to `kinds` if it is new. */
static int collect_gradient(const fcpy_module *mod, PyObject *grad, PyObject *locals,
                            PyObject *kinds, PyObject *indices) {
    int result = -1;
    kind grad_kind = {NULL, NULL};
    PyObject *local = NULL, *index = NULL;
    if (read_kind(mod, grad, &grad_kind) != 0) {
        goto done;
    }
    local = local_tensor_of(mod, grad, &grad_kind);
    const Py_ssize_t at = local == NULL ? -1 : kind_index(kinds, &grad_kind);
    index = at < 0 ? NULL : PyLong_FromSsize_t(at);
    if (index != NULL) {
        result = PyList_Append(locals, local) == 0 ? PyList_Append(indices, index) : -1;
    }
done:
    kind_clear(&grad_kind);
    Py_XDECREF(local);
    Py_XDECREF(index);
    return result;
}

/* Appends all gradients. `items` are gradients, or parameters if `are_params` is true. Skips
 * parameters without gradient. A method of a tensor subclass may change the list during the loop.
 */
static int collect_gradients(const fcpy_module *mod, PyObject *items, bool are_params,
                             PyObject *locals, PyObject *kinds, PyObject *indices) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(items, i));
        PyObject *grad = are_params ? fcpy_grad_of(mod, item) : Py_NewRef(item);
        Py_DECREF(item);
        const int failed =
            grad == NULL ||
            (grad != Py_None && collect_gradient(mod, grad, locals, kinds, indices) != 0);
        Py_XDECREF(grad);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

PyObject *fcpy_clip_collect(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "clip_collect expects a list of tensors and a bool");
        return NULL;
    }
    const int are_params = PyObject_IsTrue(args[1]);
    if (are_params < 0) {
        return NULL;
    }
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    if (fcpy_check_bound(mod) != 0) {
        return NULL;
    }
    PyObject *locals = PyList_New(0), *kinds = PyList_New(0), *indices = PyList_New(0);
    PyObject *result = NULL;
    if (locals != NULL && kinds != NULL && indices != NULL &&
        collect_gradients(mod, args[0], are_params != 0, locals, kinds, indices) == 0) {
        result = PyTuple_Pack(3, locals, kinds, indices);
    }
    Py_XDECREF(locals);
    Py_XDECREF(kinds);
    Py_XDECREF(indices);
    return result;
}

/* ---- norms ---- */

/* Sets *out to the elements of a tensor. Returns false if the kernels cannot process them: they
 * need contiguous float32 in host memory. */
static bool get_floats(fct_tensor *tensor, fck_floats *out) {
    fct_facts facts;
    if (tensor == NULL) {
        return false;
    }
    fct_tensor_facts(tensor, &facts);
    out->values = (float *)facts.data;
    out->count = facts.numel;
    if (facts.device.type != FCT_DEVICE_CPU || facts.dtype != FCK_FLOAT32 || !facts.strided ||
        !facts.contiguous) {
        return false;
    }
    return facts.numel == 0 ||
           (facts.data != NULL && facts.offset_bytes >= 0 &&
            facts.numel <= (facts.storage_bytes - facts.offset_bytes) / facts.itemsize);
}

/* Sums `values` over the ranks of a process group, in place. */
static int all_reduce(const char *group, fct_tensor *values) {
    fct_pg *pg = NULL;
    fct_work *work = NULL;
    if (fct_pg_resolve(group, &pg) != 0) {
        return -1;
    }
    int failed = fct_sum_over_ranks(pg, values, &work);
    if (!failed && work != NULL) {
        failed = fct_work_wait(work);
    }
    fct_work_release(work);
    fct_pg_release(pg);
    return failed;
}

/* Computes square roots in place, with the operator that torch uses. On some processors (AMD) the
 * roots of MKL differ from sqrtf in the last bit. */
static int compute_square_roots(fct_tensor *values) {
    PyObject *tensor = NULL;
    if (fct_py_from_tensor(values, &tensor) != 0) {
        return -1;
    }
    PyObject *roots = PyObject_CallMethod(tensor, "pow_", "d", 0.5);
    Py_DECREF(tensor);
    Py_XDECREF(roots);
    return roots == NULL ? -1 : 0;
}

/* Replaces local norms by the norms of whole gradients: squares them, sums over the ranks, and
 * takes square roots. */
static int reduce_norms(PyObject *groups, fct_tensor *buffer, const fck_floats *norms) {
    for (int64_t i = 0; i < norms->count; i++) {
        norms->values[i] *= norms->values[i];
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); i++) {
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(groups, i));
        if (name == NULL || all_reduce(name, buffer) != 0) {
            return -1;
        }
    }
    return compute_square_roots(buffer);
}

/* Allocates a tensor for `count` norms. *norms points to its elements. */
static int allocate_norms(int64_t count, fct_tensor **buffer, fck_floats *norms) {
    const fct_device cpu = {FCT_DEVICE_CPU, -1};
    if (fct_tensor_empty(count, FCK_FLOAT32, cpu, buffer) != 0) {
        return -1;
    }
    if (!get_floats(*buffer, norms)) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: a new tensor has no memory");
        fct_tensor_release(*buffer);
        return -1;
    }
    return 0;
}

/* The arguments of clip_norm. Each function below processes all gradients, so that the memory
 * latencies of different gradients overlap. Each kind has a key: clip_norm reduces the norms of
 * kinds with equal keys together. */
typedef struct gradients {
    PyObject *tensors;        /* list of local gradients; borrowed */
    PyObject *groups;         /* for each kind: (names of process groups, key); owned */
    fck_floats *arrays;       /* the elements of each tensor */
    Py_ssize_t *merged_kinds; /* for each tensor: the first kind with the key of its kind */
    Py_ssize_t count;
} gradients;

/* Returns the first kind whose key equals that of kind `k`, or -1 with an exception. */
static Py_ssize_t find_kind_of_equal_key(PyObject *groups, Py_ssize_t k) {
    PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(groups, k), 1);
    for (Py_ssize_t i = 0; i < k; i++) {
        PyObject *entry = PyTuple_GET_ITEM(PyList_GET_ITEM(groups, i), 1);
        const int equal = PyObject_RichCompareBool(entry, key, Py_EQ);
        if (equal != 0) {
            return equal > 0 ? i : -1;
        }
    }
    return k;
}

static int check_groups(PyObject *groups) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
        PyObject *pair = PyList_GET_ITEM(groups, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !PyTuple_Check(PyTuple_GET_ITEM(pair, 0))) {
            PyErr_SetString(PyExc_TypeError,
                            "clip_norm expects groups as (names of process groups, key)");
            return -1;
        }
    }
    return 0;
}

/* Fills g->merged_kinds from the index of each tensor's kind. */
static int fill_merged_kinds(gradients *g, PyObject *kind_indices) {
    const Py_ssize_t kinds = PyList_GET_SIZE(g->groups);
    for (Py_ssize_t i = 0; i < g->count; i++) {
        const Py_ssize_t k = PyLong_AsSsize_t(PyList_GET_ITEM(kind_indices, i));
        if (k == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (k < 0 || k >= kinds) {
            PyErr_Format(PyExc_IndexError, "clip_norm: kind %zd; expected 0 to %zd", k, kinds - 1);
            return -1;
        }
        g->merged_kinds[i] = k;
    }
    for (Py_ssize_t k = 1; k < kinds; k++) {
        const Py_ssize_t first = find_kind_of_equal_key(g->groups, k);
        if (first < 0) {
            return -1;
        }
        for (Py_ssize_t i = 0; first != k && i < g->count; i++) {
            g->merged_kinds[i] = g->merged_kinds[i] == k ? first : g->merged_kinds[i];
        }
    }
    return 0;
}

/* Stores the addresses of all gradients. No Python code may run before their use. Returns false if
 * a gradient is not contiguous float32 on the CPU. */
static bool store_addresses(gradients *g) {
    if (g->count > PyList_GET_SIZE(g->tensors)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < g->count; i++) {
        if (!get_floats(fct_py_tensor(PyList_GET_ITEM(g->tensors, i)), &g->arrays[i])) {
            return false;
        }
    }
    return true;
}

/* Reduces the norms of the gradients that are sharded over the groups of kind `k`, with one
 * collective for each process group. */
static int reduce_kind(const gradients *g, Py_ssize_t k, fct_tensor *buffer,
                       const fck_floats *norms) {
    PyObject *names = PyTuple_GET_ITEM(PyList_GET_ITEM(g->groups, k), 0);
    int64_t count = 0;
    for (Py_ssize_t i = 0; i < g->count; i++) {
        count += g->merged_kinds[i] == k;
    }
    if (PyTuple_GET_SIZE(names) == 0 || count == 0) {
        return 0;
    }
    if (count == norms->count) {
        return reduce_norms(names, buffer, norms);
    }
    fct_tensor *selected_buffer = NULL;
    fck_floats selected;
    if (allocate_norms(count, &selected_buffer, &selected) != 0) {
        return -1;
    }
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < g->count; i++) {
        if (g->merged_kinds[i] == k) {
            selected.values[at++] = norms->values[i];
        }
    }
    const int failed = reduce_norms(names, selected_buffer, &selected);
    at = 0;
    for (Py_ssize_t i = 0; i < g->count && !failed; i++) {
        if (g->merged_kinds[i] == k) {
            norms->values[i] = selected.values[at++];
        }
    }
    fct_tensor_release(selected_buffer);
    return failed;
}

/* Computes the total norm over all ranks. Requires a successful call of store_addresses() before,
 * and that no Python code runs in between, because such code may free the tensors. */
static int compute_total_norm(const gradients *g, float *total) {
    fct_tensor *buffer = NULL;
    fck_floats norms;
    if (allocate_norms(g->count, &buffer, &norms) != 0) {
        return -1;
    }
    fck_norms(g->arrays, (size_t)g->count, norms.values);
    int failed = 0;
    for (Py_ssize_t k = 0; !failed && k < PyList_GET_SIZE(g->groups); k++) {
        failed = reduce_kind(g, k, buffer, &norms);
    }
    if (!failed) {
        fck_norms(&norms, 1, total);
    }
    fct_tensor_release(buffer);
    return failed;
}

/* Returns a shallow copy, so that other code cannot change the list while a collective runs. */
static PyObject *copy_list(PyObject *list) {
    return PyList_GetSlice(list, 0, PyList_GET_SIZE(list));
}

PyObject *fcpy_clip_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 3 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
        PyErr_SetString(PyExc_TypeError, "clip_norm expects tensors, their kinds, and groups");
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(args[0]);
    gradients g = {args[0], copy_list(args[2]), PyMem_New(fck_floats, count + 1),
                   PyMem_New(Py_ssize_t, count + 1), count};
    PyObject *result = NULL;
    float total;
    if (g.groups == NULL || g.arrays == NULL || g.merged_kinds == NULL) {
        PyErr_NoMemory();
    } else if (check_groups(g.groups) == 0 && fill_merged_kinds(&g, args[1]) == 0) {
        if (count == 0 || !store_addresses(&g)) {
            result = Py_NewRef(Py_None);
        } else if (compute_total_norm(&g, &total) == 0) {
            result = PyFloat_FromDouble((double)total);
        }
    }
    Py_XDECREF(g.groups);
    PyMem_Free(g.arrays);
    PyMem_Free(g.merged_kinds);
    return result;
}

/* ---- scaling ---- */

/* Matches torch's arithmetic: torch computes number / tensor as the tensor's reciprocal times the
 * number. */
static float clip_factor(double max_norm, float total) {
    const float factor = (1.0F / (total + 1e-6F)) * (float)max_norm;
    return factor > 1.0F ? 1.0F : factor; /* NaN stays NaN */
}

/* Whether the kernels can process all tensors. */
static bool are_floats(PyObject *tensors) {
    fck_floats array;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        if (!get_floats(fct_py_tensor(PyList_GET_ITEM(tensors, i)), &array)) {
            return false;
        }
    }
    return true;
}

/* Scales the arrays of at most `max_numel` elements. Returns a new list of the other tensors. The
 * loop starts with the last array, because the norms have left the last arrays in the cache. */
static PyObject *scale_arrays(PyObject *tensors, float factor, int64_t max_numel) {
    PyObject *unscaled = PyList_New(0);
    for (Py_ssize_t i = PyList_GET_SIZE(tensors) - 1; unscaled != NULL && i >= 0; i--) {
        fct_tensor *tensor = fct_py_tensor(PyList_GET_ITEM(tensors, i));
        fck_floats array;
        if (get_floats(tensor, &array) && array.count <= max_numel) {
            fck_scale(&array, factor);
            fct_tensor_bump(tensor);
        } else if (PyList_Append(unscaled, PyList_GET_ITEM(tensors, i)) != 0) {
            Py_CLEAR(unscaled);
        }
    }
    return unscaled;
}

PyObject *fcpy_clip_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 5 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "clip_scale expects a list and four more arguments");
        return NULL;
    }
    const double max_norm = PyFloat_AsDouble(args[1]);
    const double total = PyErr_Occurred() ? 0.0 : PyFloat_AsDouble(args[2]);
    const long long max_numel = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[3]);
    const int all_or_none = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[4]);
    if (all_or_none < 0) {
        return NULL;
    }
    if (all_or_none && !are_floats(args[0])) {
        Py_RETURN_NONE;
    }
    const float factor = clip_factor(max_norm, (float)total);
    PyObject *unscaled = factor != 1.0F ? scale_arrays(args[0], factor, max_numel) : PyList_New(0);
    return unscaled == NULL ? NULL : Py_BuildValue("dN", (double)factor, unscaled);
}
