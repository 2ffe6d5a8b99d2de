/* Traversal of forward arguments and outputs. C code handles the common cases: args and kwargs
 * whose items are tensors and plain scalars, and an output that is one tensor or scalar. Bound
 * Python functions traverse all other structures. They also cast tensor subclasses, and all tensors
 * while a function mode is active. */
#include "tree.h"

#include "../bridge/pyobject.h"
#include "attributes.h"

enum { MAX_FLAT = 64 }; /* tensors in args and kwargs */

/* The chosen tensors of flat args and kwargs: none of their items is a container. All references
 * are borrowed from args and kwargs. */
typedef struct fcpy_flat {
    PyObject *tensors[MAX_FLAT];
    PyObject *keys[MAX_FLAT];       /* keys in kwargs; NULL for tensors of args */
    Py_ssize_t positions[MAX_FLAT]; /* positions in args */
    Py_ssize_t count;
} fcpy_flat;

/* Kinds of items. Only Python code can traverse a container. */
typedef enum item_kind { CONTAINER, SCALAR, TENSOR } item_kind;

static item_kind kind_of(PyObject *item) {
    if (item == Py_None || PyBool_Check(item) || PyLong_CheckExact(item) ||
        PyFloat_CheckExact(item) || PyUnicode_CheckExact(item)) {
        return SCALAR;
    }
    return fct_py_is_tensor(item) ? TENSOR : CONTAINER;
}

static bool requires_grad(PyObject *tensor) {
    return fct_tensor_requires_grad(fct_py_tensor(tensor));
}

/* Whether the tensor has a floating-point dtype other than `excluded`. */
static bool is_floating(PyObject *tensor, fct_dtype excluded) {
    fct_facts facts;
    fct_tensor_facts(fct_py_tensor(tensor), &facts);
    return facts.dtype != excluded && fct_dtype_is_floating(facts.dtype);
}

/* ---- flat args and kwargs: collect the chosen tensors, then replace them ---- */

typedef bool (*choose_fn)(PyObject *tensor, fct_dtype dtype);

static bool choose_grad(PyObject *tensor, fct_dtype dtype) {
    (void)dtype;
    return requires_grad(tensor);
}

/* Adds the item if it is a chosen tensor. Returns false if the item is a container, or if there are
 * MAX_FLAT tensors already. */
static bool collect_item(PyObject *item, PyObject *key, Py_ssize_t position, choose_fn choose,
                         fct_dtype dtype, fcpy_flat *flat) {
    item_kind kind = kind_of(item);
    if (kind == CONTAINER || flat->count == MAX_FLAT) {
        return false;
    }
    if (kind == TENSOR && choose(item, dtype)) {
        flat->tensors[flat->count] = item;
        flat->keys[flat->count] = key;
        flat->positions[flat->count++] = position;
    }
    return true;
}

/* Collects the chosen tensors of args, then of kwargs. Returns false if args and kwargs are not
 * flat, or if they have more than MAX_FLAT tensors. */
static bool collect_flat(PyObject *args, PyObject *kwargs, choose_fn choose, fct_dtype dtype,
                         fcpy_flat *flat) {
    flat->count = 0;
    if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (!collect_item(PyTuple_GET_ITEM(args, i), NULL, i, choose, dtype, flat)) {
            return false;
        }
    }
    PyObject *key = NULL;
    PyObject *item = NULL;
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &key, &item)) {
        if (!collect_item(item, key, 0, choose, dtype, flat)) {
            return false;
        }
    }
    return true;
}

/* Replaces args and kwargs by copies. Python code that runs before replace_flat() may change the
 * caller's kwargs, but not the copies. */
static int copy_flat(PyObject **args, PyObject **kwargs) {
    const Py_ssize_t count = PyTuple_GET_SIZE(*args);
    PyObject *new_args = PyTuple_New(count);
    PyObject *new_kwargs = new_args != NULL ? PyDict_Copy(*kwargs) : NULL;
    if (new_kwargs == NULL) {
        Py_XDECREF(new_args);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyTuple_SET_ITEM(new_args, i, Py_NewRef(PyTuple_GET_ITEM(*args, i)));
    }
    Py_SETREF(*args, new_args);
    Py_SETREF(*kwargs, new_kwargs);
    return 0;
}

/* Replaces the chosen tensors in the copies of copy_flat() by `replacements` (borrowed). */
static int replace_flat(PyObject *args, PyObject *kwargs, const fcpy_flat *flat,
                        PyObject *const *replacements) {
    for (Py_ssize_t i = 0; i < flat->count; i++) {
        PyObject *new_item = Py_NewRef(replacements[i]);
        if (flat->keys[i] == NULL) {
            PyObject *old_item = PyTuple_GET_ITEM(args, flat->positions[i]);
            PyTuple_SET_ITEM(args, flat->positions[i], new_item);
            Py_DECREF(old_item);
            continue;
        }
        const int failed = PyDict_SetItem(kwargs, flat->keys[i], new_item);
        Py_DECREF(new_item);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

static void clear_all(PyObject **objects, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_CLEAR(objects[i]);
    }
}

int fcpy_unpack_pair(PyObject *pair, PyObject **args, PyObject **kwargs) {
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple (args, kwargs)");
        Py_DECREF(pair);
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        PyObject **target = i == 0 ? args : kwargs;
        PyObject *item = PyTuple_GET_ITEM(pair, i);
        Py_INCREF(item);
        Py_SETREF(*target, item);
    }
    Py_DECREF(pair);
    return 0;
}

PyObject *fcpy_pack_pair(int failed, PyObject *args, PyObject *kwargs) {
    PyObject *pair = failed ? NULL : PyTuple_Pack(2, args, kwargs);
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return pair;
}

/* ---- casts ---- */

static PyObject *cast_tensor(PyObject *tensor, fct_dtype dtype) {
    fct_tensor *cast = NULL;
    PyObject *result = NULL;
    if (fct_cast_differentiable(fct_py_tensor(tensor), dtype, &cast) != 0) {
        return NULL;
    }
    if (fct_py_from_tensor(cast, &result) != 0) {
        result = NULL;
    }
    fct_tensor_release(cast);
    return result;
}

/* Calls the bound cast_tree(dtype, obj), which traverses every kind of container. */
static PyObject *cast_with_python(fcpy_module *mod, fct_dtype dtype, PyObject *obj) {
    PyObject *py_dtype = fcpy_dtype_object(dtype);
    if (py_dtype == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_CallFunctionObjArgs(mod->bound.cast_tree, py_dtype, obj, NULL);
    Py_DECREF(py_dtype);
    return result;
}

/* Whether a cast need not call Tensor.to(), which subclasses and function modes may replace. */
static bool can_cast(PyObject *tensor) {
    return fct_py_is_exact_tensor(tensor) && !fct_has_function_mode();
}

static bool can_cast_all(const fcpy_flat *flat) {
    Py_ssize_t i = 0;
    while (i < flat->count && can_cast(flat->tensors[i])) {
        i++;
    }
    return i == flat->count;
}

int fcpy_cast_inputs(fcpy_module *mod, fct_dtype dtype, PyObject **args, PyObject **kwargs) {
    fcpy_flat flat;
    PyObject *replacements[MAX_FLAT] = {NULL};
    if (!collect_flat(*args, *kwargs, is_floating, dtype, &flat) || !can_cast_all(&flat)) {
        PyObject *pair = PyTuple_Pack(2, *args, *kwargs);
        PyObject *cast = pair != NULL ? cast_with_python(mod, dtype, pair) : NULL;
        Py_XDECREF(pair);
        return fcpy_unpack_pair(cast, args, kwargs);
    }
    if (flat.count == 0) {
        return 0;
    }
    if (copy_flat(args, kwargs) != 0) {
        return -1;
    }
    int result = -1;
    for (Py_ssize_t i = 0; i < flat.count; i++) {
        replacements[i] = cast_tensor(flat.tensors[i], dtype);
        if (replacements[i] == NULL) {
            goto done;
        }
    }
    result = replace_flat(*args, *kwargs, &flat, replacements);
done:
    clear_all(replacements, flat.count);
    return result;
}

PyObject *fcpy_cast_output(fcpy_module *mod, fct_dtype dtype, PyObject *output) {
    const item_kind kind = kind_of(output);
    const bool casts = kind == TENSOR && is_floating(output, dtype);
    if (kind == CONTAINER || (casts && !can_cast(output))) {
        return cast_with_python(mod, dtype, output);
    }
    if (casts) {
        return cast_tensor(output, dtype);
    }
    Py_INCREF(output);
    return output;
}

/* ---- the post-backward node ---- */

/* Passes `count` tensors through one node. Stores new references in `outputs`. */
static int pass_through_node(const fct_hook *hook, PyObject *const *tensors, Py_ssize_t count,
                             PyObject **outputs) {
    int result = -1;
    fct_tensor **in = (fct_tensor **)PyMem_Calloc(2 * (size_t)count, sizeof *in);
    if (in == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    fct_tensor **out = in + count;
    for (Py_ssize_t i = 0; i < count; i++) {
        in[i] = fct_py_tensor(tensors[i]);
        if (in[i] == NULL) {
            PyErr_SetString(PyExc_TypeError, "a tensor was expected");
            goto done;
        }
    }
    if (fct_autograd_node(in, (size_t)count, hook, out) != 0) {
        goto done;
    }
    result = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (result == 0 && fct_py_from_tensor(out[i], &outputs[i]) != 0) {
            result = -1;
        }
        fct_tensor_release(out[i]);
    }
    if (result != 0) {
        clear_all(outputs, count);
    }
done:
    PyMem_Free((void *)in);
    return result;
}

/* Returns a new tuple of the tensors that require grad in `obj`, of any structure. */
static PyObject *collect_tensors(fcpy_module *mod, PyObject *obj) {
    PyObject *tensors = PyObject_CallOneArg(mod->bound.collect_grad_tensors, obj);
    if (tensors != NULL && !PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "collect_grad_tensors must return a tuple");
        Py_CLEAR(tensors);
    }
    return tensors;
}

static int insert_with_python(fcpy_module *mod, const fct_hook *hook, PyObject **args,
                              PyObject **kwargs) {
    int result = -1;
    PyObject *list = NULL;
    PyObject *iterator = NULL;
    PyObject *pair = PyTuple_Pack(2, *args, *kwargs);
    PyObject *tensors = pair != NULL ? collect_tensors(mod, pair) : NULL;
    if (tensors == NULL) {
        goto done;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    if (count == 0) {
        result = 0;
        goto done;
    }
    list = PyList_New(count); /* pass_through_node() fills in the items */
    if (list == NULL || pass_through_node(hook, &PyTuple_GET_ITEM(tensors, 0), count,
                                          &PyList_GET_ITEM(list, 0)) != 0) {
        goto done;
    }
    iterator = PyObject_GetIter(list);
    if (iterator != NULL) {
        result = fcpy_unpack_pair(
            PyObject_CallFunctionObjArgs(mod->bound.replace_grad_tensors, pair, iterator, NULL),
            args, kwargs);
    }
done:
    Py_XDECREF(iterator);
    Py_XDECREF(list);
    Py_XDECREF(tensors);
    Py_XDECREF(pair);
    return result;
}

int fcpy_insert_node(fcpy_module *mod, const fct_hook *hook, PyObject **args, PyObject **kwargs) {
    fcpy_flat flat;
    PyObject *replacements[MAX_FLAT] = {NULL};
    if (!collect_flat(*args, *kwargs, choose_grad, FCT_NO_DTYPE, &flat)) {
        return insert_with_python(mod, hook, args, kwargs);
    }
    if (flat.count == 0) {
        return 0;
    }
    if (copy_flat(args, kwargs) != 0 ||
        pass_through_node(hook, flat.tensors, flat.count, replacements) != 0) {
        return -1;
    }
    int result = replace_flat(*args, *kwargs, &flat, replacements);
    clear_all(replacements, flat.count);
    return result;
}

/* ---- pre-backward hooks on outputs ---- */

static int register_hook(fcpy_module *mod, PyObject *state, const fct_hook *hook,
                         PyObject *tensor) {
    fct_tensor *handle = fct_py_tensor(tensor);
    if (fct_tensor_is_view(handle)) {
        PyObject *warned = PyObject_CallOneArg(mod->bound.warn_view_output, state);
        if (warned == NULL) {
            return -1;
        }
        Py_DECREF(warned);
    }
    return fct_autograd_on_grad(handle, hook);
}

int fcpy_hook_outputs(fcpy_module *mod, PyObject *state, const fct_hook *hook, PyObject *output) {
    item_kind kind = kind_of(output);
    if (kind != CONTAINER) {
        return kind == TENSOR && requires_grad(output) ? register_hook(mod, state, hook, output)
                                                       : 0;
    }
    PyObject *tensors = collect_tensors(mod, output);
    if (tensors == NULL) {
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(tensors); i++) {
        result = register_hook(mod, state, hook, PyTuple_GET_ITEM(tensors, i));
    }
    Py_DECREF(tensors);
    return result;
}
