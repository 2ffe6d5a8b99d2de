/* Gradient clipping: a whole call for what is usual (float32 on the CPU, 2-norm), and the
 * collecting of gradients for everything else, which fsdp_c/clip.py does.
 *
 * Nothing here keeps state. A raw pointer is taken from a tensor and used at once, with the GIL
 * held, after its extent was checked against its storage. */
#include "clip.h"

#include "../kernels/kernels.h"
#include "../kernels/norm.h"
#include "dtensor.h"

#include <math.h>

/* How gradients are placed: the same mesh and the same kinds of placement are one kind. */
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

/* The kind of a DTensor, with new references; both fields NULL for a plain tensor. */
static int kind_of(const fcpy_module *mod, PyObject *grad, kind *out) {
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

/* The local tensor of a gradient of that kind, new reference. */
static PyObject *local_of(const fcpy_module *mod, PyObject *grad, const kind *k) {
    return k->mesh != NULL ? fcpy_dtensor_local(mod, grad) : Py_NewRef(grad);
}

/* The position of `wanted` among `kinds` (a list of (mesh, placements) tuples), to which it is
 * added where it is new; -1 with an exception. Kinds are few: a search is cheapest. */
static Py_ssize_t kind_index(PyObject *kinds, const kind *wanted) {
    const Py_ssize_t count = PyList_GET_SIZE(kinds);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GET_ITEM(kinds, i);
        kind known = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
        if (known.mesh == Py_None) {
            known.mesh = known.placements = NULL;
        }
        if (kind_equal(&known, wanted)) {
            return i;
        }
    }
    PyObject *pair = PyTuple_Pack(2, wanted->mesh != NULL ? wanted->mesh : Py_None,
                                  wanted->placements != NULL ? wanted->placements : Py_None);
    const int failed = pair == NULL ? -1 : PyList_Append(kinds, pair);
    Py_XDECREF(pair);
    return failed ? -1 : count;
}

/* Appends one parameter's gradient to the three lists; nothing where it has none. */
static int collect_one(const fcpy_module *mod, PyObject *param, PyObject *locals, PyObject *kinds,
                       PyObject *indices) {
    int result = -1;
    kind found = {NULL, NULL};
    PyObject *local = NULL, *index = NULL;
    PyObject *grad = fcpy_grad_of(mod, param);
    if (grad == NULL) {
        return -1;
    }
    if (grad == Py_None) {
        Py_DECREF(grad);
        return 0;
    }
    if (kind_of(mod, grad, &found) != 0) {
        goto done;
    }
    local = local_of(mod, grad, &found);
    const Py_ssize_t position = local == NULL ? -1 : kind_index(kinds, &found);
    if (position < 0 || (index = PyLong_FromSsize_t(position)) == NULL) {
        goto done;
    }
    if (PyList_Append(locals, local) == 0 && PyList_Append(indices, index) == 0) {
        result = 0;
    }
done:
    Py_XDECREF(index);
    Py_XDECREF(local);
    kind_clear(&found);
    Py_DECREF(grad);
    return result;
}

PyObject *fcpy_clip_collect(PyObject *module, PyObject *params) {
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    PyObject *locals = PyList_New(0), *kinds = PyList_New(0), *indices = PyList_New(0);
    PyObject *result = NULL;
    if (!PyList_Check(params)) {
        PyErr_SetString(PyExc_TypeError, "clip_collect expects a list of tensors");
        goto done;
    }
    if (locals == NULL || kinds == NULL || indices == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        if (collect_one(mod, PyList_GET_ITEM(params, i), locals, kinds, indices) != 0) {
            goto done;
        }
    }
    result = PyTuple_Pack(3, locals, kinds, indices);
done:
    Py_XDECREF(locals);
    Py_XDECREF(kinds);
    Py_XDECREF(indices);
    return result;
}

/* The elements of a tensor that the kernels can work on: contiguous float32 in host memory. */
static bool floats_of(fct_tensor *tensor, fck_floats *out) {
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

/* Adds up what the ranks of one group have. */
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

/* Square roots in place, by the operator that torch takes them with: MKL's, on some machines (AMD),
 * are not those of sqrtf in the last bit. */
static int take_roots(fct_tensor *values) {
    PyObject *tensor = NULL;
    if (fct_py_from_tensor(values, &tensor) != 0) {
        return -1;
    }
    PyObject *roots = PyObject_CallMethod(tensor, "pow_", "d", 0.5);
    Py_DECREF(tensor);
    Py_XDECREF(roots);
    return roots == NULL ? -1 : 0;
}

/* Local norms to norms of whole gradients: squares, sums over the ranks, roots. */
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
    return take_roots(buffer);
}

/* A new tensor for so many norms, and its elements. */
static int norms_new(int64_t count, fct_tensor **buffer, fck_floats *norms) {
    const fct_device cpu = {FCT_DEVICE_CPU, -1};
    if (fct_tensor_empty(count, FCK_FLOAT32, cpu, buffer) != 0) {
        return -1;
    }
    if (!floats_of(*buffer, norms)) {
        PyErr_SetString(PyExc_SystemError, "fsdp_c: a new tensor has no memory");
        fct_tensor_release(*buffer);
        return -1;
    }
    return 0;
}

/* The gradients of one call. Each step goes over all of them before the next one begins: most of
 * its time is the wait for memory, and so the waits for one gradient and the next overlap. */
typedef struct gradients {
    PyObject **tensors; /* new references: the gradients, then their local tensors */
    fck_floats *arrays; /* their elements */
    Py_ssize_t *placed; /* their positions in `kinds` */
    Py_ssize_t count;
    PyObject *kinds;   /* list of (mesh, placements), in the order of the gradients; mostly one */
    PyObject *answers; /* for each kind: (names of groups, likeness); alike: the same object */
} gradients;

static void gradients_clear(gradients *g) {
    for (Py_ssize_t i = 0; i < g->count; i++) {
        Py_DECREF(g->tensors[i]);
    }
    PyMem_Free(g->tensors);
    PyMem_Free(g->arrays);
    PyMem_Free(g->placed);
    Py_XDECREF(g->kinds);
    Py_XDECREF(g->answers);
}

/* The gradients of those parameters that have one, or the gradients that are given themselves; -1
 * with an exception. */
static int gradients_take(const fcpy_module *mod, gradients *g, PyObject *given, bool are_params) {
    const Py_ssize_t n = PyList_GET_SIZE(given);
    g->tensors = PyMem_New(PyObject *, n > 0 ? n : 1);
    g->arrays = PyMem_New(fck_floats, n > 0 ? n : 1);
    g->placed = PyMem_New(Py_ssize_t, n > 0 ? n : 1);
    g->kinds = PyList_New(0);
    g->answers = PyList_New(0);
    if (g->tensors == NULL || g->arrays == NULL || g->placed == NULL || g->kinds == NULL ||
        g->answers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n && i < PyList_GET_SIZE(given); i++) {
        PyObject *item = PyList_GET_ITEM(given, i);
        PyObject *grad = are_params ? fcpy_grad_of(mod, item) : Py_NewRef(item);
        if (grad == NULL) {
            return -1;
        }
        if (grad == Py_None) {
            Py_DECREF(grad);
        } else {
            g->tensors[g->count++] = grad;
        }
    }
    return 0;
}

/* The local tensors in the place of the gradients, and how these are placed. */
static int gradients_unwrap(const fcpy_module *mod, gradients *g) {
    for (Py_ssize_t i = 0; i < g->count; i++) {
        kind found;
        if (kind_of(mod, g->tensors[i], &found) != 0) {
            return -1;
        }
        PyObject *local = local_of(mod, g->tensors[i], &found);
        g->placed[i] = local == NULL ? -1 : kind_index(g->kinds, &found);
        kind_clear(&found);
        if (g->placed[i] < 0) {
            Py_XDECREF(local);
            return -1;
        }
        Py_SETREF(g->tensors[i], local);
    }
    return 0;
}

/* What the answer (names of groups, likeness) for a kind stands for: the first answer of the same
 * likeness, or itself. Borrowed; NULL with an exception. */
static PyObject *first_alike(PyObject *answers, PyObject *answer) {
    if (!PyTuple_Check(answer) || PyTuple_GET_SIZE(answer) != 2 ||
        !PyTuple_Check(PyTuple_GET_ITEM(answer, 0))) {
        PyErr_SetString(PyExc_TypeError, "clip expects (names of process groups, likeness)");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(answers); i++) {
        PyObject *known = PyList_GET_ITEM(answers, i);
        const int alike = PyObject_RichCompareBool(PyTuple_GET_ITEM(known, 1),
                                                   PyTuple_GET_ITEM(answer, 1), Py_EQ);
        if (alike != 0) {
            return alike > 0 ? known : NULL;
        }
    }
    return answer;
}

/* Asks for the groups of each kind. 1; 0 where there are none (pending sums); -1: an exception. */
static int gradients_ask(gradients *g, PyObject *groups_of) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(g->kinds); i++) {
        PyObject *pair = PyList_GET_ITEM(g->kinds, i);
        PyObject *answer = PyObject_CallFunctionObjArgs(groups_of, PyTuple_GET_ITEM(pair, 0),
                                                        PyTuple_GET_ITEM(pair, 1), NULL);
        int result = -1;
        if (answer == Py_None) {
            result = 0;
        } else if (answer != NULL) {
            PyObject *first = first_alike(g->answers, answer);
            result = first != NULL && PyList_Append(g->answers, first) == 0 ? 1 : -1;
        }
        Py_XDECREF(answer);
        if (result != 1) {
            return result;
        }
    }
    return 1;
}

/* Takes the addresses; no Python code may run until they are used. False where a gradient is not
 * for this path (another dtype or device). */
static bool gradients_address(gradients *g) {
    for (Py_ssize_t i = 0; i < g->count; i++) {
        if (!floats_of(fct_py_tensor(g->tensors[i]), &g->arrays[i])) {
            return false;
        }
    }
    return true;
}

/* Reduces those of the norms whose gradients are split over the groups of `answer`: one message. */
static int gradients_reduce(const gradients *g, PyObject *answer, fct_tensor *buffer,
                            const fck_floats *norms) {
    PyObject *groups = PyTuple_GET_ITEM(answer, 0);
    int64_t count = 0;
    for (Py_ssize_t i = 0; i < g->count; i++) {
        count += PyList_GET_ITEM(g->answers, g->placed[i]) == answer;
    }
    if (count == norms->count) {
        return reduce_norms(groups, buffer, norms);
    }
    fct_tensor *part = NULL;
    fck_floats some;
    if (norms_new(count, &part, &some) != 0) {
        return -1;
    }
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < g->count; i++) {
        if (PyList_GET_ITEM(g->answers, g->placed[i]) == answer) {
            some.values[at++] = norms->values[i];
        }
    }
    const int failed = reduce_norms(groups, part, &some);
    at = 0;
    for (Py_ssize_t i = 0; i < g->count && !failed; i++) {
        if (PyList_GET_ITEM(g->answers, g->placed[i]) == answer) {
            norms->values[i] = some.values[at++];
        }
    }
    fct_tensor_release(part);
    return failed;
}

/* Whether kind k was reduced together with one before it. */
static bool is_reduced(PyObject *answers, Py_ssize_t k) {
    for (Py_ssize_t i = 0; i < k; i++) {
        if (PyList_GET_ITEM(answers, i) == PyList_GET_ITEM(answers, k)) {
            return true;
        }
    }
    return false;
}

/* The total norm over all ranks. */
static int gradients_total(gradients *g, float *total) {
    fct_tensor *buffer = NULL;
    fck_floats norms;
    if (norms_new(g->count, &buffer, &norms) != 0) {
        return -1;
    }
    fck_norms(g->arrays, (size_t)g->count, norms.values);
    int failed = 0;
    for (Py_ssize_t k = 0; !failed && k < PyList_GET_SIZE(g->answers); k++) {
        PyObject *answer = PyList_GET_ITEM(g->answers, k);
        if (PyTuple_GET_SIZE(PyTuple_GET_ITEM(answer, 0)) > 0 && !is_reduced(g->answers, k)) {
            failed = gradients_reduce(g, answer, buffer, &norms);
        }
    }
    if (!failed) {
        fck_norms(&norms, 1, total);
    }
    fct_tensor_release(buffer);
    return failed;
}

/* Scales the arrays of at most `largest` elements; new list of the other tensors. The addresses
 * are read again: another thread may have had the GIL during the collective. Backwards: the norms
 * have left the last arrays in the cache. */
static PyObject *gradients_scale(gradients *g, float factor, int64_t largest) {
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = g->count - 1; left != NULL && i >= 0; i--) {
        fct_tensor *tensor = fct_py_tensor(g->tensors[i]);
        if (floats_of(tensor, &g->arrays[i]) && g->arrays[i].count <= largest) {
            fck_scale(&g->arrays[i], factor);
            fct_tensor_bump(tensor);
        } else if (PyList_Append(left, g->tensors[i]) != 0) {
            Py_CLEAR(left);
        }
    }
    return left;
}

/* Everything up to the addresses. 1; 0: not for this path; -1: an exception. */
static int gradients_find(const fcpy_module *mod, gradients *g, PyObject *given, bool are_params,
                          PyObject *groups_of) {
    if (gradients_take(mod, g, given, are_params) != 0 || gradients_unwrap(mod, g) != 0) {
        return -1;
    }
    const int usable = gradients_ask(g, groups_of);
    return usable == 1 ? g->count > 0 && gradients_address(g) : usable;
}

/* torch's arithmetic: number / tensor is the tensor's reciprocal times the number. */
static float factor_for(double max_norm, float total) {
    const float factor = (1.0F / (total + 1e-6F)) * (float)max_norm;
    return factor > 1.0F ? 1.0F : factor; /* nan stays */
}

/* The total norm of g, then the scaling; (total, factor, tensors still to be scaled). */
static PyObject *gradients_clip(gradients *g, double max_norm, bool finite, int64_t largest) {
    float total;
    if (gradients_total(g, &total) != 0) {
        return NULL;
    }
    const float factor = factor_for(max_norm, total);
    const bool scales = factor != 1.0F && (isfinite(total) || !finite);
    PyObject *left = scales ? gradients_scale(g, factor, largest) : PyList_New(0);
    return left == NULL ? NULL : Py_BuildValue("ddN", (double)total, (double)factor, left);
}

PyObject *fcpy_clip(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "clip expects a list of tensors and four more arguments");
        return NULL;
    }
    const double max_norm = PyFloat_AsDouble(args[1]);
    const int finite = PyObject_IsTrue(args[2]);
    const long long largest = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    gradients g = {NULL, NULL, NULL, 0, NULL, NULL};
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    const int usable = gradients_find(mod, &g, args[0], true, args[4]);
    PyObject *result = NULL;
    if (usable == 1) {
        result = gradients_clip(&g, max_norm, finite, largest);
    } else if (usable == 0) {
        result = Py_NewRef(Py_None);
    }
    gradients_clear(&g);
    return result;
}

PyObject *fcpy_clip_total(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "clip_total expects a list of tensors and a function");
        return NULL;
    }
    gradients g = {NULL, NULL, NULL, 0, NULL, NULL};
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    const int usable = gradients_find(mod, &g, args[0], false, args[1]);
    PyObject *result = NULL;
    float total;
    if (usable == 0) {
        result = Py_NewRef(Py_None);
    } else if (usable == 1 && gradients_total(&g, &total) == 0) {
        result = PyFloat_FromDouble((double)total);
    }
    gradients_clear(&g);
    return result;
}

PyObject *fcpy_clip_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "clip_scale expects a list and four more arguments");
        return NULL;
    }
    const double max_norm = PyFloat_AsDouble(args[1]);
    const double total = PyFloat_AsDouble(args[2]);
    const long long largest = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    gradients g = {NULL, NULL, NULL, 0, NULL, NULL};
    const fcpy_module *mod = (const fcpy_module *)PyModule_GetState(module);
    const int usable = gradients_find(mod, &g, args[0], true, args[4]);
    PyObject *result = NULL;
    if (usable == 1) {
        const float factor = factor_for(max_norm, (float)total);
        PyObject *left = factor != 1.0F ? gradients_scale(&g, factor, largest) : PyList_New(0);
        result = left == NULL ? NULL : Py_BuildValue("dN", (double)factor, left);
    } else if (usable == 0) {
        result = Py_NewRef(Py_None);
    }
    gradients_clear(&g);
    return result;
}
