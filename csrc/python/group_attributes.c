/* Getters and setters of the ParamGroup type. */
#include "group_attributes.h"

#include "../core/bucket.h"
#include "../core/unsharded.h"
#include "attributes.h"
#include "check_initialized.h"
#include "deferred_decref.h"
#include "errors.h"
#include "transitions.h"

#include <math.h>

static fcpy_group *as_group(PyObject *obj) {
    return (fcpy_group *)obj;
}

static PyObject *get_params(PyObject *obj, void *closure) {
    (void)closure;
    PyObject *params = as_group(obj)->params;
    return params != NULL ? PySequence_List(params) : PyList_New(0);
}

/* Always fails: the core's plans and the gradients in flight refer to the initial parameters. */
static int set_params(PyObject *obj, PyObject *value, void *closure) {
    (void)obj;
    (void)value;
    (void)closure;
    PyErr_SetString(PyExc_AttributeError,
                    "fsdp_params of a parameter group cannot be assigned: its collectives are "
                    "laid out for the initial parameters; pass ignored_params to fully_shard, or "
                    "use torch's FSDP2 (FSDP_C=0)");
    return -1;
}

static int set_comm(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_group *self = as_group(obj);
    if (value == NULL || !PyObject_TypeCheck(value, self->mod->comm_type)) {
        PyErr_SetString(PyExc_TypeError, "comm_ctx must be a fsdp_c CommContext");
        return -1;
    }
    if (!fcpy_group_check_initialized(self) ||
        fcpy_group_check_device(&((fcpy_comm *)value)->core, self->core.base.device) != 0) {
        return -1;
    }
    fc_status status = fc_group_set_comm(&self->core, &((fcpy_comm *)value)->core);
    if (status != FC_OK) {
        return fcpy_raise(status, self->core.base.comm->error.message);
    }
    fcpy_replace(self->mod, &self->comm, value);
    return 0;
}

static PyObject *get_training(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_training_state(as_group(obj)->mod, as_group(obj)->core.training_state);
}

static int set_training(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    return fcpy_parse_training_state(as_group(obj)->mod, value,
                                     &as_group(obj)->core.training_state);
}

static PyObject *get_sharded(PyObject *obj, void *closure) {
    (void)closure;
    return fcpy_sharded_state(as_group(obj)->mod, as_group(obj)->core.sharded_state);
}

static PyObject *get_is_state(PyObject *obj, void *closure) {
    return PyBool_FromLong((uintptr_t)as_group(obj)->core.sharded_state == (uintptr_t)closure);
}

static PyObject *get_divide_factor(PyObject *obj, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    if (!g->reducer.has_divide_factor) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(g->reducer.divide_factor);
}

static int set_divide_factor(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fc_group *g = &as_group(obj)->core;
    if (value == NULL || value == Py_None) {
        g->reducer.has_divide_factor = false;
        return 0;
    }
    double factor = PyFloat_AsDouble(value);
    if (factor == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!(factor > 0.0) || isinf(factor)) {
        PyErr_Format(PyExc_ValueError,
                     "the gradient divide factor must be positive and finite, got %R", value);
        return -1;
    }
    g->reducer.divide_factor = factor;
    g->reducer.has_divide_factor = true;
    return 0;
}

static int set_fqn(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fcpy_group *self = as_group(obj);
    return fcpy_set_text(self->mod, value, &self->fqn, &self->core.base.name);
}

static PyObject *get_all_gather_result(PyObject *obj, void *closure) {
    (void)closure;
    if (as_group(obj)->core.gather.pending.active) {
        Py_RETURN_TRUE;
    }
    Py_RETURN_NONE;
}

static PyObject *get_post_forward_indices(PyObject *obj, void *closure) {
    (void)closure;
    const fc_index_stack *indices = &as_group(obj)->core.post_forward_indices;
    PyObject *list = PyList_New((Py_ssize_t)indices->count);
    for (size_t i = 0; list != NULL && i < indices->count; i++) {
        PyObject *number = PyLong_FromSize_t(indices->items[i]);
        if (number == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, number);
    }
    return list;
}

static PyObject *get_partial(PyObject *obj, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    for (size_t i = 0; i < g->base.count; i++) {
        if (g->base.params[i]->partial != NULL) {
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_NONE;
}

/* Accepts only None, and drops the partial gradients. */
static int set_partial(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    const fc_group *g = &as_group(obj)->core;
    if (value != Py_None) {
        PyErr_SetString(PyExc_TypeError, "_partial_reduce_output can only be set to None");
        return -1;
    }
    for (size_t i = 0; i < g->base.count; i++) {
        fc_param_set_partial(g->base.params[i], NULL);
    }
    return 0;
}

static int set_keep_storage(PyObject *obj, PyObject *value, void *closure) {
    bool keep = false;
    (void)closure;
    if (!fcpy_group_check_initialized(as_group(obj)) || fcpy_parse_bool(value, &keep) != 0) {
        return -1;
    }
    fcpy_group_refresh(as_group(obj));
    fc_group_set_keep_storage(&as_group(obj)->core, keep);
    return 0;
}

/* Adopts replaced shards first, as a gather does. */
static PyObject *get_aliases_shards(PyObject *obj, void *closure) {
    (void)closure;
    fc_group_base *base = &as_group(obj)->core.base;
    bool can = false;
    if (!fcpy_group_check_initialized(as_group(obj))) {
        return NULL;
    }
    fcpy_group_refresh(as_group(obj));
    fc_status status = fc_group_base_adopt_replaced_shards(base);
    if (status == FC_OK) {
        status = fc_unsharded_can_alias(base, &can);
    }
    return fcpy_group_check_status(as_group(obj), status) != 0 ? NULL : PyBool_FromLong(can);
}

/* ---- settings that select what Python code performs ---- */

static int set_uses_fallback(PyObject *obj, PyObject *value, void *closure) {
    if (fcpy_set_flag(obj, value, closure) != 0) {
        return -1;
    }
    fcpy_group_refresh(as_group(obj));
    return 0;
}

static PyObject *get_param_calls(PyObject *obj, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(as_group(obj)->param_calls);
}

static int set_param_calls(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    const unsigned long bits = value != NULL ? PyLong_AsUnsignedLong(value) : 0;
    if (bits == (unsigned long)-1 && PyErr_Occurred()) {
        return -1;
    }
    as_group(obj)->param_calls = (uint32_t)bits;
    fcpy_group_refresh(as_group(obj));
    return 0;
}

#define GROUP_OFFSET(field) ((void *)(uintptr_t)offsetof(fcpy_group, core.field))
#define GROUP_FLAG(name, field, doc) {name, fcpy_get_flag, fcpy_set_flag, doc, GROUP_OFFSET(field)}

static PyObject *group_get_overlap(PyObject *obj, void *closure) {
    (void)closure;
    const fc_overlap overlap = ((fcpy_group *)obj)->core.reducer.overlap;
    if (overlap == FC_OVERLAP_UNLESS_CPU_BOUND) {
        Py_RETURN_NONE;
    }
    return PyBool_FromLong(overlap == FC_OVERLAP_ALWAYS);
}

static int group_set_overlap(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    fc_overlap overlap = FC_OVERLAP_UNLESS_CPU_BOUND;
    bool always = false;
    if (value != Py_None) {
        if (fcpy_parse_bool(value, &always) != 0) {
            return -1;
        }
        overlap = always ? FC_OVERLAP_ALWAYS : FC_OVERLAP_NEVER;
    }
    ((fcpy_group *)obj)->core.reducer.overlap = overlap;
    return 0;
}

/* ---- buckets ---- */

/* `closure` is NULL for the limit that applies, else the limit of a group that is the only one of
 * its root, or 0. */
static PyObject *group_get_bucket_bytes(PyObject *obj, void *closure) {
    const fc_buckets *b = &((fcpy_group *)obj)->core.buckets;
    if (closure != NULL) {
        return PyLong_FromLongLong(b->sole_only ? b->limit : 0);
    }
    return PyLong_FromLongLong(fc_bucket_limit(b));
}

static int group_set_bucket_bytes(PyObject *obj, PyObject *value, void *closure) {
    if (!fcpy_group_check_initialized((fcpy_group *)obj)) {
        return -1;
    }
    long long limit = value != NULL ? PyLong_AsLongLong(value) : -1;
    if (limit == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (limit < 0) {
        PyErr_SetString(PyExc_ValueError, "_bucket_bytes must be an int of at least 0");
        return -1;
    }
    fc_bucket_set_limit(&((fcpy_group *)obj)->core.buckets, limit, closure != NULL);
    return 0;
}

static PyObject *group_get_buckets(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_group *self = (fcpy_group *)obj;
    fc_buckets *b = &self->core.buckets;
    bool was_stale = b->mode == FC_BUCKETS_STALE;
    fc_status status = fc_bucket_cut(b);
    if (status != FC_OK) {
        (void)fcpy_raise(status, NULL);
        return NULL;
    }
    bool is_divided = b->mode != FC_BUCKETS_STALE;
    size_t count = is_divided ? b->count : 1;
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        fc_span span = is_divided ? b->items[i].span : fc_group_base_all(&self->core.base);
        PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)span.first, (Py_ssize_t)span.end);
        if (pair == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
    }
    /* Forward cuts the buckets on all ranks, from the parameters that require gradients then. If
     * parameters are frozen between this read and forward, the buckets of this read would differ
     * from those of other ranks. So they become stale again. */
    if (was_stale) {
        fc_bucket_invalidate(b);
    }
    return list;
}

static int set_reduce_dtype(PyObject *obj, PyObject *value, void *closure) {
    fct_dtype dtype = FCT_NO_DTYPE;
    (void)closure;
    if (!fcpy_group_check_initialized(as_group(obj)) || fcpy_parse_dtype(value, &dtype) != 0) {
        return -1;
    }
    fc_bucket_set_reduce_dtype(&as_group(obj)->core.buckets, dtype);
    return 0;
}

PyGetSetDef fcpy_group_getset[] = {
    {"fsdp_params", get_params, set_params, "List of the group's Params (a copy).", NULL},
    {"comm_ctx", fcpy_get_object, set_comm, "CommContext shared by the groups under one root.",
     (void *)offsetof(fcpy_group, comm)},
    {"_training_state", get_training, set_training, "TrainingState of the group.", NULL},
    {"_sharded_state", get_sharded, NULL, "ShardedState of the group.", NULL},
    {"is_sharded", get_is_state, NULL, "Whether the sharded parameters are registered.",
     (void *)FC_SHARDED},
    {"is_sharded_post_forward", get_is_state, NULL,
     "Whether the parameters are resharded to a smaller mesh.", (void *)FC_SHARDED_POST_FORWARD},
    {"gradient_divide_factor", get_divide_factor, set_divide_factor,
     "Divisor of the sum of gradients. None: reductions compute the mean.", NULL},
    {"_module_fqn", fcpy_get_object, set_fqn,
     "Fully qualified names of the group's modules, after lazy init.",
     (void *)offsetof(fcpy_group, fqn)},
    {"_orig_dtype", fcpy_get_dtype, fcpy_set_dtype, "dtype of the trainable parameters, or None.",
     (void *)offsetof(fcpy_group, orig_dtype)},
    {"_reduce_dtype", fcpy_get_dtype, set_reduce_dtype,
     "dtype in which gradients are reduced; None: the widest dtype of the gradients.",
     GROUP_OFFSET(base.reduce_dtype)},
    GROUP_FLAG("reduce_grads", settings.reduce_grads, "Whether backward reduces gradients."),
    GROUP_FLAG("all_reduce_grads", reducer.all_reduce_grads,
               "HSDP only: whether backward all-reduces."),
    GROUP_FLAG("_reshard_after_forward", settings.reshard_after_forward,
               "Whether forward reshards at its end."),
    GROUP_FLAG("unshard_in_backward", settings.unshard_in_backward,
               "Whether backward unshards the parameters."),
    GROUP_FLAG("force_sum_reduction_for_comms", reducer.force_sum,
               "Whether reductions use SUM only and divide separately."),
    GROUP_FLAG("reduce_scatter_unused_params", reducer.reduce_unused,
               "Whether parameters without gradient are reduced as zeros."),
    {"_keep_unsharded_storage", fcpy_get_flag, set_keep_storage,
     "Whether resharding keeps the unsharded memory.", GROUP_OFFSET(gather.keep_storage)},
    {"_aliases_shards", get_aliases_shards, NULL,
     "Whether the next unshard makes the unsharded parameters aliases of the shards.", NULL},
    {"_deferred", fcpy_get_flag, NULL,
     "Whether a backward has left gradients for a later reduction.", GROUP_OFFSET(deferred)},
    {"_uses_fallback_gather", fcpy_get_flag, set_uses_fallback,
     "Whether gathers call _fallback_gather().", (void *)offsetof(fcpy_group, fallback_gather)},
    {"_uses_fallback_reduce", fcpy_get_flag, set_uses_fallback,
     "Whether reductions call _fallback_reduce().", (void *)offsetof(fcpy_group, fallback_reduce)},
    {"_param_calls", get_param_calls, set_param_calls,
     "Bits CALL_*: methods of FSDPParam that single parameters override.", NULL},
    {"_reduction_overlap", group_get_overlap, group_set_overlap,
     "Whether backward continues while gradients are reduced. None: it continues unless CPU "
     "threads copy the gradients.",
     NULL},
    GROUP_FLAG("_has_reduce_hook", reducer.has_hook, "Whether reductions call _run_reduce_hook()."),
    {"_bucket_bytes", group_get_bucket_bytes, group_set_bucket_bytes,
     "Bytes of gradients at which a bucket is full; 0: one bucket for all gradients.", NULL},
    {"_sole_bucket_bytes", group_get_bucket_bytes, group_set_bucket_bytes,
     "_bucket_bytes that apply only if no other group has the same root; 0: they always apply.",
     (void *)"sole"},
    {"_buckets", group_get_buckets, NULL,
     "List of (first, end) index ranges of fsdp_params, in the order of their reduction.", NULL},
    GROUP_FLAG("reshard_after_backward", settings.reshard_after_backward,
               "Whether backward reshards at its end."),
    /* ---- names of torch's private interface; fsdp_c itself does not use them ---- */
    {"is_unsharded", get_is_state, NULL, "Whether the unsharded parameters are registered.",
     (void *)FC_UNSHARDED},
    {"_all_gather_result", get_all_gather_result, NULL,
     "True while an all-gather is in flight, else None.", NULL},
    {"_post_forward_indices", get_post_forward_indices, NULL,
     "Indices in the post-forward order (a copy).", NULL},
    GROUP_FLAG("unshard_async_op", settings.unshard_async_op,
               "Whether hooks unshard on the current stream."),
    {"_param_group_index", fcpy_get_size, NULL,
     "Index of the group among the groups of the fully_shard call.", GROUP_OFFSET(place.index)},
    {"_num_param_groups", fcpy_get_size, NULL, "Number of groups of the fully_shard call.",
     GROUP_OFFSET(place.siblings)},
    {"_partial_reduce_output", get_partial, set_partial,
     "True while gradients are reduce-scattered but not all-reduced, else None. Setting None "
     "drops the gradients.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
