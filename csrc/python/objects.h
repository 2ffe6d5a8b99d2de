/* The structs of the Python-visible types, which wrap the core's structs, and the lookup of a
 * type's module state.
 *
 * Each object except a Hook embeds its core struct, and owns the Python references that the core
 * borrows. A ParamGroup keeps its Params and CommContext alive, a State its groups, prefetch
 * targets and contexts. The garbage collector breaks cycles. Every object points to its module
 * state, and types keep the module alive. So there is no static PyObject. */
#ifndef FSDP_C_PYTHON_OBJECTS_H
#define FSDP_C_PYTHON_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "../core/state.h"
#include "version_cache.h"

/* Names of attributes and methods that the extension uses, as interned strings; X(identifier). */
#define FCPY_NAMES(X)                                                                              \
    X(_local_tensor)                                                                               \
    X(_is_param)                                                                                   \
    X(_spec)                                                                                       \
    X(tensor_meta)                                                                                 \
    X(shape)                                                                                       \
    X(stride)                                                                                      \
    X(ndim)                                                                                        \
    X(mesh)                                                                                        \
    X(placements)                                                                                  \
    X(param_groups)                                                                                \
    X(params)                                                                                      \
    X(_parameters)                                                                                 \
    X(_post_accumulate_grad_hooks)                                                                 \
    X(grad)                                                                                        \
    X(requires_grad)                                                                               \
    X(_make_unsharded)                                                                             \
    X(_make_post_forward)                                                                          \
    X(_get_grad_inner_tensor)                                                                      \
    X(to_sharded)                                                                                  \
    X(to_sharded_dtensor)                                                                          \
    X(to_sharded_post_forward)                                                                     \
    X(to_unsharded)                                                                                \
    X(accumulate_unsharded_grad_if_needed)                                                         \
    X(to_accumulated_grad_if_needed)                                                               \
    X(_collect_grad)                                                                               \
    X(_refresh_shard)                                                                              \
    X(free_unsharded_param)                                                                        \
    X(_extend_inputs)                                                                              \
    X(_extend_unsharded)                                                                           \
    X(_run_reduce_hook)                                                                            \
    X(_fallback_gather)                                                                            \
    X(_fallback_copy_out)                                                                          \
    X(_fallback_drop_gather)                                                                       \
    X(_fallback_drop_reduce)                                                                       \
    X(_fallback_reduce)                                                                            \
    X(_fallback_finalize)                                                                          \
    X(_lazy_init)                                                                                  \
    X(_inputs_to_device)                                                                           \
    X(_gather_after)                                                                               \
    X(_modules)                                                                                    \
    X(_leave_lists)

/* Python functions and classes that fsdp_c/_runtime/bindings.py passes to the extension once (see
 * module.c). */
#define FCPY_BOUND(X)                                                                              \
    X(dtensor_class)                                                                               \
    X(dtensor_new)                                                                                 \
    X(collect_grad_tensors)                                                                        \
    X(replace_grad_tensors)                                                                        \
    X(cast_tree)                                                                                   \
    X(warn_view_output)                                                                            \
    X(warn_lost_backward)                                                                          \
    X(set_eval_frame)                                                                              \
    X(log_debug)                                                                                   \
    X(insert_node)                                                                                 \
    X(node_backward)                                                                               \
    X(training_states)                                                                             \
    X(sharded_states)

typedef struct fcpy_module {
    PyTypeObject *param_type;
    PyTypeObject *group_type;
    PyTypeObject *comm_type;
    PyTypeObject *iteration_type;
    PyTypeObject *state_type;
    PyTypeObject *hook_type;
    struct {
#define FCPY_FIELD(name) PyObject *name;
        FCPY_NAMES(FCPY_FIELD)
    } names;
    struct {
        FCPY_BOUND(FCPY_FIELD)
#undef FCPY_FIELD
    } bound;
    PyObject *no_grad_kwnames; /* ("requires_grad",) */
    Py_ssize_t local_offset;   /* of the slot _local_tensor in a DTensor object; -1: no such slot */
    Py_ssize_t spec_offset;    /* of the slot _spec; -1: no such slot */
    bool makes_dtensors;       /* whether the extension makes DTensors, not torch's constructor */
    fcpy_guard guard;
    size_t calls;               /* calls of the extension in progress, on all threads */
    PyObject *deferred_decrefs; /* list or NULL; see deferred_decref.c */
} fcpy_module;

/* A (module, name) pair under which a module holds a parameter. */
typedef struct fcpy_slot {
    PyObject *parameters; /* module._parameters, or NULL */
    PyObject *module;     /* if `parameters` is NULL: weak reference to the module, for setattr() */
    PyObject *name;       /* interned */
} fcpy_slot;

typedef struct fcpy_param {
    PyObject_HEAD
    fc_param core;
    fcpy_module *mod;
    PyObject *sharded_param;      /* the DTensor parameter */
    PyObject *post_forward_param; /* registered while resharded to a smaller mesh, or NULL */
    PyObject *unsharded_param;    /* used for computation; NULL before the first unshard */
    PyObject *spec;               /* DTensorSpec of shard and gradient */
    struct {                      /* the tensors that hold the core's shard; see shard.c */
        PyObject *local;          /* sharded_param._local_tensor, owned; NULL: not valid */
        const void *storage;      /* storage of `local`; compared only, never dereferenced */
        const void *wrapper;      /* storage of sharded_param; compared only */
    } shard_identity;
    PyObject *fqn; /* str or NULL */
    bool swapping; /* an overridden registration method is running */
    fcpy_slot *slots;
    Py_ssize_t slot_count;
    bool grouped; /* is in a ParamGroup */
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_param;

typedef struct fcpy_comm {
    PyObject_HEAD
    fc_comm_ctx core;
    fcpy_module *mod;
    bool initialized; /* lazy_init was called */
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_comm;

typedef struct fcpy_iteration {
    PyObject_HEAD
    fc_iteration core;
    fcpy_module *mod;
    PyObject *all_states;          /* tuple of State */
    PyObject *post_optim_event;    /* event that the next iteration's gathers wait for, or NULL */
    unsigned long forward_thread;  /* thread of the latest forward; see check_thread.c */
    unsigned long backward_thread; /* thread of the latest backward */
    bool was_awaited; /* await_autograd() has run for the latest backward; see step.c */
    PyObject *dict;
} fcpy_iteration;

/* Indices of the process groups of a parameter group. */
enum {
    FCPY_PG_SHARD,
    FCPY_PG_SCATTER,
    FCPY_PG_REPLICATE,
    FCPY_PG_POST_FORWARD,
    FCPY_PROCESS_GROUPS
};

/* `params` is a tuple, because the garbage collector empties lists while their owners are alive. */
typedef struct fcpy_group {
    PyObject_HEAD
    fc_group core;
    fcpy_module *mod;
    PyObject *params;                        /* tuple of Param, in the order of core.base */
    PyObject *comm;                          /* CommContext */
    PyObject *pg_names[FCPY_PROCESS_GROUPS]; /* str or NULL; the core borrows their text */
    PyObject *fqn;                           /* str or NULL */
    PyObject *unit;       /* weak reference to the State of the fully_shard call, or NULL */
    fct_dtype orig_dtype; /* of the trainable parameters; FCT_NO_DTYPE: none or several */
    uint32_t param_calls; /* FCPY_CALL_*: methods overridden on single Params */
    bool fallback_gather; /* Python code performs the gathers */
    bool fallback_reduce; /* Python code performs the reductions */
    /* FCPY_CALL_*: transitions and operations that Python code performs, as of the latest
     * fcpy_group_refresh(). */
    uint32_t replaced;
    fc_transitions transitions; /* the core's table of transitions while a method is overridden */
    fcpy_version_cache version_cache;
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_group;

/* The first three objects are tuples and never NULL: see fcpy_group. */
typedef struct fcpy_state {
    PyObject_HEAD
    fc_state core;
    fcpy_module *mod;
    PyObject *groups;            /* tuple of ParamGroup */
    PyObject *forward_prefetch;  /* tuple of State */
    PyObject *backward_prefetch; /* tuple of State */
    PyObject *iteration;         /* IterationContext */
    PyObject *comm;              /* CommContext */
    PyObject *modules_to_run;    /* set: modules of the state that have not run in this forward */
    PyObject *is_root;           /* None, True or False */
    fct_dtype input_dtype;       /* forward inputs are cast to it; FCT_NO_DTYPE: no cast */
    fct_dtype output_dtype;      /* forward outputs are cast to it; FCT_NO_DTYPE: no cast */
    bool moves_inputs;           /* as the root, the state moves its inputs to the device */
    bool entering;               /* a pre-forward is running */
    bool without_modules;        /* all modules of the state were freed */
    bool has_hooks;              /* Hook objects of the state were created */
    size_t hooks;                /* Hook objects, and hooks of the state in autograd graphs */
    unsigned long thread;        /* thread that entered the latest forward */
    uint32_t replaced;           /* FCPY_STATE_*: overridden methods, as of the latest hook */
    fcpy_version_cache version_cache;
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_state;

/* The module's name. Its address identifies the module. */
extern const char fcpy_module_name[];
/* Returns the module state of a type or of one of its bases, or NULL with TypeError. */
fcpy_module *fcpy_module_of(PyTypeObject *type);

/* Returns 0 if bind() has stored torch's classes in the module state, else -1 with SystemError. */
int fcpy_check_bound(const fcpy_module *mod);

/* Drops the result of a call. Returns 0, or -1 if the call raised. */
static inline int fcpy_drop_result(PyObject *result) {
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

#endif
