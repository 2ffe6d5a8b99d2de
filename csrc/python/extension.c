/* All-gather extensions. A parameter's shard may be a tensor subclass that defines two hooks. The
 * first hook returns the inputs of the all-gather. The second makes the unsharded parameter from
 * the outputs of the all-gather. The Python subclass of Param calls the hooks, because it has the
 * code for their signatures. The core holds the tensors (core/extension.h); Python receives them as
 * new lists. */
#include "extension.h"

#include "../bridge/pyobject.h"
#include "deferred_decref.h"
#include "errors.h"

/* ---- lists ---- */

/* Converts a sequence of tensors to an array of handles. *handles is a new array (PyMem_Free); the
 * handles are borrowed from *items, a new reference. `raise` sets the exception for an item that is
 * not a tensor. */
static int parse_tensors(PyObject *value, void (*raise)(PyObject *item), PyObject **items,
                         fct_tensor ***handles) {
    PyObject *list = PySequence_List(value);
    if (list == NULL) {
        return -1;
    }
    const Py_ssize_t count = PyList_GET_SIZE(list);
    fct_tensor **array = PyMem_New(fct_tensor *, (size_t)count + 1);
    if (array == NULL) {
        PyErr_NoMemory();
        Py_DECREF(list);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        array[i] = fct_py_tensor(PyList_GET_ITEM(list, i));
        if (array[i] == NULL) {
            raise(PyList_GET_ITEM(list, i));
            PyMem_Free((void *)array);
            Py_DECREF(list);
            return -1;
        }
    }
    *items = list;
    *handles = array;
    return 0;
}

/* Calls `set` with the tensors of the sequence `value`. */
static fc_status set_tensors(fc_extension *e, PyObject *value, void (*raise)(PyObject *item),
                             fc_status (*set)(fc_extension *e, fct_tensor *const *tensors,
                                              size_t count)) {
    PyObject *items = NULL;
    fct_tensor **handles = NULL;
    if (parse_tensors(value, raise, &items, &handles) != 0) {
        return FC_ERAISED;
    }
    fc_status status = set(e, handles, (size_t)PyList_GET_SIZE(items));
    PyMem_Free((void *)handles);
    Py_DECREF(items);
    return status;
}

static PyObject *make_list(const fc_kept_tensor *entries, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *tensor = NULL;
        if (fct_py_from_tensor(entries[i].tensor, &tensor) != 0) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, tensor);
    }
    return list;
}

static void raise_invalid_output(PyObject *item) {
    (void)item;
    PyErr_SetString(PyExc_TypeError, "an item of all_gather_outputs must be a tensor");
}

static void raise_invalid_input(PyObject *item) {
    PyErr_Format(PyExc_TypeError, "an all-gather input must be a tensor, got %R", Py_TYPE(item));
}

/* Raises the same error as torch, which calls untyped_storage() on each item. */
static void raise_invalid_inner(PyObject *item) {
    PyErr_Format(PyExc_AttributeError, "'%s' object has no attribute 'untyped_storage'",
                 Py_TYPE(item)->tp_name);
}

/* ---- attributes ---- */

void fcpy_defer_outputs_release(fcpy_param *self) {
    const fc_extension *e = &self->core.extension;
    fcpy_hold_tensor(self->mod, self->core.flat);
    for (size_t i = 0; i < e->output_count; i++) {
        fcpy_hold_tensor(self->mod, e->outputs[i].tensor);
    }
    for (size_t i = 0; i < e->inner_count; i++) {
        fcpy_hold_tensor(self->mod, e->inner[i].tensor);
    }
}

PyObject *fcpy_get_outputs(PyObject *param, void *closure) {
    const fc_param *p = &((fcpy_param *)param)->core;
    const fc_kept_tensor flat = {.tensor = p->flat};
    (void)closure;
    return p->flat != NULL ? make_list(&flat, 1)
                           : make_list(p->extension.outputs, p->extension.output_count);
}

/* Whether `tensor` has the layout and dtype of the flat tensor that the core would have made. */
static bool is_flat(const fc_param *p, const fct_tensor *tensor) {
    fct_facts facts;
    fct_tensor_facts(tensor, &facts);
    return !p->extended && facts.strided && facts.contiguous && facts.offset_bytes == 0 &&
           facts.numel == p->flat_numel && facts.dtype == fc_param_compute_dtype(p);
}

/* Sets the outputs of a gather by Python code. A single output for which is_flat() is true becomes
 * the core's flat tensor. */
int fcpy_set_outputs(PyObject *param, PyObject *value, void *closure) {
    fcpy_param *self = (fcpy_param *)param;
    fc_param *p = &self->core;
    (void)closure;
    if (value == NULL || !PyList_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "all_gather_outputs must be a list of tensors");
        return -1;
    }
    fcpy_defer_outputs_release(self);
    fct_tensor *single =
        PyList_GET_SIZE(value) == 1 ? fct_py_tensor(PyList_GET_ITEM(value, 0)) : NULL;
    if (single != NULL && is_flat(p, single)) {
        fc_param_set_flat(p, single);
        fc_extension_release_outputs(&p->extension);
        return 0;
    }
    fc_status status =
        set_tensors(&p->extension, value, raise_invalid_output, fc_extension_set_outputs);
    if (status == FC_OK) {
        fc_param_set_flat(p, NULL);
    }
    return status == FC_OK ? 0 : fcpy_raise(status, NULL);
}

PyObject *fcpy_get_inner(PyObject *param, void *closure) {
    const fc_extension *e = &((fcpy_param *)param)->core.extension;
    (void)closure;
    return make_list(e->inner, e->inner_count);
}

int fcpy_set_inner(PyObject *param, PyObject *value, void *closure) {
    fcpy_param *self = (fcpy_param *)param;
    (void)closure;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_unsharded_inner_tensors cannot be deleted");
        return -1;
    }
    fcpy_defer_outputs_release(self);
    fc_status status =
        set_tensors(&self->core.extension, value, raise_invalid_inner, fc_extension_set_inner);
    return status == FC_OK ? 0 : fcpy_raise(status, NULL);
}

/* ---- hooks ---- */

fc_status fcpy_extend_inputs(void *param) {
    fcpy_param *self = (fcpy_param *)param;
    PyObject *inputs = PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._extend_inputs);
    if (inputs == NULL) {
        return FC_ERAISED;
    }
    fc_status status =
        set_tensors(&self->core.extension, inputs, raise_invalid_input, fc_extension_set_inputs);
    Py_DECREF(inputs);
    return status;
}

fc_status fcpy_extend_unsharded(void *param) {
    fcpy_param *self = (fcpy_param *)param;
    PyObject *result =
        PyObject_CallMethodNoArgs((PyObject *)self, self->mod->names._extend_unsharded);
    if (result == NULL) {
        return FC_ERAISED;
    }
    Py_DECREF(result);
    if (self->core.unsharded == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the gather did not set _unsharded_param of a "
                                            "parameter");
        return FC_ERAISED;
    }
    return FC_OK;
}
