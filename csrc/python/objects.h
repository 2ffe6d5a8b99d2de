/* The Python-visible objects around the core's structs: their types, and nothing that is called
 * but the way from a type to its module, and the question what is a DTensor.
 *
 * Each object embeds its core struct and owns the Python references that the core borrows: a
 * ParamGroup keeps its Params and CommContext alive, a State its groups, prefetch targets,
 * contexts. Cycles are broken by GC; every object holds the module state it was made under (types
 * keep the module alive), so there is no static PyObject. */
#ifndef FSDP_C_PYTHON_OBJECTS_H
#define FSDP_C_PYTHON_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "../core/state.h"
#include "seen.h"

/* Interned names used on the hot path; X(identifier). */
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
    X(to_sharded_post_forward)                                                                     \
    X(to_unsharded)                                                                                \
    X(accumulate_unsharded_grad_if_needed)                                                         \
    X(to_accumulated_grad_if_needed)                                                               \
    X(_collect_grad)                                                                               \
    X(_follow_shard)                                                                               \
    X(free_unsharded_param)                                                                        \
    X(_extend_inputs)                                                                              \
    X(_extend_unsharded)                                                                           \
    X(_run_reduce_hook)                                                                            \
    X(_host_gather)                                                                                \
    X(_host_copy_out)                                                                              \
    X(_host_drop_gather)                                                                           \
    X(_host_drop_reduce)                                                                           \
    X(_host_reduce)                                                                                \
    X(_host_finalize)                                                                              \
    X(_lazy_init)                                                                                  \
    X(_inputs_to_device)                                                                           \
    X(_gather_after)                                                                               \
    X(_modules)

/* Python functions and classes that the extension is told about once, by fsdp_c/bind.py (see
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
    Py_ssize_t local_offset;   /* of _local_tensor in a DTensor object; -1: it is not that simple */
    Py_ssize_t spec_offset;    /* of _spec likewise */
    bool makes_dtensors;       /* as this torch does; else torch makes them */
    fcpy_guard guard;
    size_t calls;      /* into the extension that have not returned, on all threads */
    PyObject *retired; /* list, or NULL: see retired.c */
} fcpy_module;

/* One place where a parameter is registered. */
typedef struct fcpy_slot {
    PyObject *module;     /* used where the module has its own __setattr__ */
    PyObject *parameters; /* module._parameters; NULL: go through setattr */
    PyObject *name;       /* interned */
} fcpy_slot;

typedef struct fcpy_param {
    PyObject_HEAD
    fc_param core;
    fcpy_module *mod;
    PyObject *sharded_param; /* the DTensor parameter */
    PyObject
        *post_forward_param;   /* the one registered while resharded to a smaller mesh, or NULL */
    PyObject *unsharded_param; /* the one used for computation; NULL before the first unshard */
    PyObject *spec;            /* DTensorSpec of shard and gradient */
    struct {                   /* what the core's shard was taken from; see shard.c */
        PyObject *local;       /* sharded_param._local_tensor, counted; NULL: look again */
        const void *storage;   /* behind it; only to be compared */
        const void *wrapper;   /* behind sharded_param; likewise */
    } seen;
    PyObject *fqn; /* str or NULL */
    bool swapping; /* within what overrides the registration of a face */
    fcpy_slot *slots;
    Py_ssize_t slot_count;
    bool grouped; /* it is in a ParamGroup */
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_param;

typedef struct fcpy_comm {
    PyObject_HEAD
    fc_comm core;
    fcpy_module *mod;
    bool initialized; /* lazy_init was called */
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_comm;

typedef struct fcpy_iteration {
    PyObject_HEAD
    fc_iteration core;
    fcpy_module *mod;
    PyObject *all_states;         /* tuple of State */
    PyObject *post_optim_event;   /* what the next iteration's gathers wait for, or NULL */
    unsigned long forward_thread; /* that began the latest forward, and backward; see admit.c */
    unsigned long backward_thread;
    bool was_awaited; /* the latest backward, to be let go by autograd; see step.c */
    PyObject *dict;
} fcpy_iteration;

/* The process groups of a parameter group. */
enum {
    FCPY_LINK_SHARD,
    FCPY_LINK_SCATTER,
    FCPY_LINK_REPLICATE,
    FCPY_LINK_POST_FORWARD,
    FCPY_LINKS
};

typedef struct fcpy_group {
    PyObject_HEAD
    fc_group core;
    fcpy_module *mod;
    PyObject *params;                 /* tuple of Param, as many as core.count, in its order: the
                                         collector empties lists while who owns them lives on */
    PyObject *comm;                   /* CommContext */
    PyObject *link_names[FCPY_LINKS]; /* str or NULL: the core borrows their text */
    PyObject *fqn;
    PyObject *unit;           /* State of the fully_shard call, or NULL */
    fct_dtype orig_dtype;     /* of the trainable parameters; FCT_NO_DTYPE: none, or several */
    unsigned int param_calls; /* FCPY_CALL_*: methods that single Params override */
    bool hosted_gather;       /* Python gathers, or reduces (fc_host.moves) */
    bool hosted_reduce;
    bool has_reduced; /* Python has, and may hold something */
    fcpy_seen seen;
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_group;

typedef struct fcpy_state {
    PyObject_HEAD
    fc_state core;
    fcpy_module *mod;
    PyObject *groups;            /* tuples, never NULL: the collector empties lists while who owns
                                    them lives on; of ParamGroup */
    PyObject *forward_prefetch;  /* of State */
    PyObject *backward_prefetch; /* of State */
    PyObject *iteration;         /* IterationContext */
    PyObject *comm;              /* CommContext */
    /* Set: modules of a multi-module state that have not run in this forward. */
    PyObject *modules_to_run;
    PyObject *is_root;     /* None, True or False */
    fct_dtype input_dtype; /* cast of forward inputs; FCT_NO_DTYPE: none */
    fct_dtype output_dtype;
    bool moves_inputs;    /* as the iteration's root it puts its arguments on the device */
    bool entering;        /* a pre-forward runs: lazy init, gathers */
    unsigned long thread; /* that entered its latest forward */
    fcpy_seen seen;
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_state;

/* What tells our module from others, by its address. */
extern const char fcpy_module_name[];
/* The module state of a type or of one of its bases; NULL with TypeError set. */
fcpy_module *fcpy_module_of(PyTypeObject *type);

#endif
