/* The Python-visible objects around the core's structs, and what they share.
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
#include "guard.h"

/* Interned names used on the hot path; X(identifier). */
#define FCPY_NAMES(X)                                                                              \
    X(_local_tensor)                                                                               \
    X(_spec)                                                                                       \
    X(mesh)                                                                                        \
    X(placements)                                                                                  \
    X(param_groups)                                                                                \
    X(params)                                                                                      \
    X(_parameters)                                                                                 \
    X(_post_accumulate_grad_hooks)                                                                 \
    X(grad)                                                                                        \
    X(requires_grad)                                                                               \
    X(_make_unsharded)                                                                             \
    X(_make_forward)                                                                               \
    X(_get_grad_inner_tensor)                                                                      \
    X(to_sharded)                                                                                  \
    X(to_sharded_post_forward)                                                                     \
    X(to_unsharded)                                                                                \
    X(accumulate_unsharded_grad_if_needed)                                                         \
    X(to_accumulated_grad_if_needed)                                                               \
    X(_collect_grad)                                                                               \
    X(_follow_shard)                                                                               \
    X(_free_hosted)                                                                                \
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
    PyObject *sharded_param;   /* the DTensor parameter */
    PyObject *forward_param;   /* the one registered while resharded to a smaller mesh, or NULL */
    PyObject *unsharded_param; /* the one used for computation; NULL before the first unshard */
    PyObject
        *outputs; /* list of the gather's outputs where the host made others than the core would */
    PyObject *spec;          /* DTensorSpec of shard and gradient */
    struct {                 /* what the core's shard was taken from; see shard.c */
        PyObject *local;     /* sharded_param._local_tensor, counted; NULL: look again */
        const void *storage; /* behind it; only to be compared */
        const void *wrapper; /* behind sharded_param; likewise */
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
    PyObject *dict;
} fcpy_iteration;

/* The process groups of a parameter group. */
enum { FCPY_LINK_SHARD, FCPY_LINK_SCATTER, FCPY_LINK_REPLICATE, FCPY_LINK_FORWARD, FCPY_LINKS };

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
    PyObject *
        modules_to_run; /* set: modules of a multi-module state that have not run in this forward */
    PyObject *is_root;  /* None, True or False */
    fct_dtype input_dtype; /* cast of forward inputs; FCT_NO_DTYPE: none */
    fct_dtype output_dtype;
    bool moves_inputs;    /* as the iteration's root it puts its arguments on the device */
    bool entering;        /* a pre-forward runs: lazy init, gathers */
    unsigned long thread; /* that entered its latest forward */
    fcpy_seen seen;
    PyObject *dict;
    PyObject *weakrefs;
} fcpy_state;

/* ---- errors.c ---- */
/* Raises the exception of `status` (nothing for FC_ERAISED) with `message`; returns -1. */
int fcpy_raise(fc_status status, const char *message);

/* ---- module.c ---- */
extern struct PyModuleDef fcpy_module_def;
/* The module state of a type or of one of its bases; NULL with TypeError set. */
fcpy_module *fcpy_module_of(PyTypeObject *type);
extern const fc_host fcpy_host; /* host.c: what the core may ask of Python */

/* ---- slots.c ---- */
void fcpy_slots_clear(fcpy_param *self);
/* Puts `param` (NULL: SystemError) into every slot. */
int fcpy_slots_register(const fcpy_param *self, PyObject *param);
/* Param._set_slots(pairs, direct) */
PyObject *fcpy_slots_set(PyObject *param, PyObject *args);

/* ---- shard.c ---- */
/* What belongs into fcpy_module.local_offset. */
Py_ssize_t fcpy_shard_local_offset(const fcpy_module *mod);
/* fc_host.follow_shard */
int fcpy_shard_follow(void *param);
/* Param._note_shard() */
PyObject *fcpy_shard_note(PyObject *param, PyObject *unused);
/* _C.count_step(optimizer, args, kwargs) */
PyObject *fcpy_count_step(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* _C.has_memory(tensor) -> bool */
PyObject *fcpy_has_memory(PyObject *module, PyObject *obj);

/* ---- dynamo.c ---- */
/* Stops dynamo on this thread until resume; what it returns is for resume only, NULL: not
 * active. */
PyObject *fcpy_dynamo_pause(fcpy_module *mod);
void fcpy_dynamo_resume(fcpy_module *mod, PyObject *callback);

/* ---- retired.c ---- */
/* Around every call that may run foreign code while the core holds borrowed pointers. */
void fcpy_calls_enter(fcpy_module *mod);
void fcpy_calls_leave(fcpy_module *mod);
/* Lets go of what an attribute held (taken, NULL is fine) when no call is under way any more. */
void fcpy_retire(fcpy_module *mod, PyObject *obj);
/* The same for a reference to the tensor that is about to be replaced, and for a block. */
void fcpy_retire_tensor(fcpy_module *mod, fct_tensor *tensor);
void fcpy_retire_block(fcpy_module *mod, void *block);

/* ---- guard.c ---- */
/* A debug line "FSDP::label (modules of the group; None: of none)" where they are wanted. */
void fcpy_log(fcpy_module *mod, PyObject *group, const char *label);

/* ---- type specs, one for each file ---- */
extern PyType_Spec fcpy_param_spec;
extern PyType_Spec fcpy_comm_spec;
extern PyType_Spec fcpy_iteration_spec;
extern PyType_Spec fcpy_group_spec;
extern PyType_Spec fcpy_state_spec;
extern PyType_Spec fcpy_hook_spec;

/* ---- attributes.c: getters and setters that several types share ---- */
/* A list of objects of one type as a new tuple; NULL with TypeError. */
PyObject *fcpy_tuple_of(PyObject *list, PyTypeObject *type, const char *what);
/* malloc'ed: where the structs of a tuple's items are, `offset` bytes into each object; NULL with
 * MemoryError. */
void *fcpy_core_array(PyObject *tuple, size_t offset);
PyObject *fcpy_training_state(const fcpy_module *mod, fc_training_state state);
/* -1 with TypeError where obj is no TrainingState. */
int fcpy_parse_training_state(const fcpy_module *mod, PyObject *obj, fc_training_state *out);
PyObject *fcpy_sharded_state(const fcpy_module *mod, fc_sharded_state state);
/* Sets *target from a Python bool; deletion is refused. */
int fcpy_set_bool(PyObject *value, bool *target);
PyObject *fcpy_get_dtype(fct_dtype dtype); /* None for FCT_NO_DTYPE */
int fcpy_set_dtype(PyObject *value, fct_dtype *target);
/* New reference to obj, None for NULL. */
PyObject *fcpy_or_none(PyObject *obj);

/* ---- tree.c: forward arguments and outputs ---- */
/* Casts floating-point tensors in args and kwargs; both are replaced (owned references).
 * Differentiable. */
int fcpy_cast_inputs(fcpy_module *mod, fct_dtype dtype, PyObject **args, PyObject **kwargs);
/* The same for one object; new reference. */
PyObject *fcpy_cast_output(fcpy_module *mod, fct_dtype dtype, PyObject *output);
/* Puts a post-backward node above all tensors in args and kwargs that require grad; both are
 * replaced. */
int fcpy_insert_node(fcpy_module *mod, const fct_hook *hook, PyObject **args, PyObject **kwargs);
/* Calls hook when the gradient of any tensor in output has been computed. `state` only for the view
 * warning. */
int fcpy_hook_outputs(fcpy_module *mod, PyObject *state, const fct_hook *hook, PyObject *output);

/* Replaces *args and *kwargs by the items of a 2-tuple (stolen; NULL: -1). */
int fcpy_take_pair(PyObject *pair, PyObject **args, PyObject **kwargs);
/* The other way: a new 2-tuple of args and kwargs, which are stolen; NULL where `failed`. */
PyObject *fcpy_give_pair(int failed, PyObject *args, PyObject *kwargs);

/* A group's part: unshards and puts the post-backward node above the arguments. */
int fcpy_group_pre_forward(fcpy_group *self, PyObject **args, PyObject **kwargs);
int fcpy_group_insert_node(fcpy_group *self, PyObject **args, PyObject **kwargs);

/* ---- ready.c ---- */
/* Whether the group was initialised; false with RuntimeError. */
bool fcpy_group_ready(const fcpy_group *self);
int fcpy_group_raise(const fcpy_group *self, fc_status status); /* -1 */
/* Whether the context is for the group's kind of device; -1 with ValueError. */
int fcpy_group_check_device(const fc_comm *comm, fct_device device);
/* Whether the state has its contexts (never initialised ones and collected ones do not); false with
 * RuntimeError. */
bool fcpy_state_ready(const fcpy_state *self);
int fcpy_state_raise(const fcpy_state *self, fc_status status); /* -1 */

/* ---- group_attributes.c ---- */
extern PyGetSetDef fcpy_group_getset[];

/* ---- admit.c ---- */
/* To be called before anything of a forward or backward is done; -1 with RuntimeError where another
 * thread is in it, or a tracer runs it. For backward the state is ready. */
int fcpy_admit_forward(fcpy_state *self);
int fcpy_admit_backward(fcpy_state *self);

/* ---- step.c ---- */
/* Lazy init where it has not been done, then the once-per-iteration part, which may replace args
 * and kwargs (owned). */
int fcpy_state_begin_forward(fcpy_state *self, PyObject **args, PyObject **kwargs);
/* The next forward of each state that has several modules starts with none of them run. */
int fcpy_state_forget_runs(const fcpy_state *self);
/* What the first gradient of an output, and the end of a backward, set off. */
int fcpy_state_pre_backward(fcpy_state *self);
int fcpy_state_end_backward(fcpy_state *self);
/* The hooks' work. pre returns 0 and leaves args and kwargs (owned, replaced); post a new
 * reference. */
int fcpy_state_pre_forward(fcpy_state *self, PyObject *module, PyObject **args, PyObject **kwargs);
PyObject *fcpy_state_post_forward(fcpy_state *self, PyObject *module, PyObject *input,
                                  PyObject *output);
/* output cast to the policy's output dtype; new reference. */
PyObject *fcpy_state_cast_output(fcpy_state *self, PyObject *output);
/* fc_host.grad_arrived */
int fcpy_param_grad_arrived(void *param);

/* ---- bucket.c: getters and setters of ParamGroup ---- */
PyObject *fcpy_group_get_bucket_bytes(PyObject *obj, void *closure);
int fcpy_group_set_bucket_bytes(PyObject *obj, PyObject *value, void *closure);
PyObject *fcpy_group_get_buckets(PyObject *obj, void *closure);

/* ---- clip.c: module functions, see fsdp_c/_C.pyi ---- */
/* New tuple of lists: local gradients, kinds as (mesh, placements), each gradient's kind. */
PyObject *fcpy_clip_collect(PyObject *module, PyObject *params);
PyObject *fcpy_clip(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Reference counting of a PyObject as the owner of an fct_hook. */
void fcpy_retain(void *owner);
void fcpy_release(void *owner);

#endif
