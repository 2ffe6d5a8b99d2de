/* The compatibility guard: detects patched and overridden methods and functions, as bits. Only
 * transitions.c reads it, and stores the bits in `replaced` of groups and states. */
#ifndef FSDP_C_PYTHON_GUARD_H
#define FSDP_C_PYTHON_GUARD_H

#include "objects.h"

/* Replaceable methods of a group and of a parameter, and functions and classes of torch. */
enum {
    FCPY_CALL_UNSHARD = 1 << 0,
    FCPY_CALL_WAIT = 1 << 1,
    FCPY_CALL_RESHARD = 1 << 2,
    FCPY_CALL_TO_SHARDED = 1 << 3,
    FCPY_CALL_PRE_BACKWARD = 1 << 4,
    FCPY_CALL_POST_BACKWARD = 1 << 5,
    FCPY_CALL_FINALIZE = 1 << 6,
    FCPY_CALL_PREFETCH = 1 << 7, /* for the group that backward is expected to reach next */
    FCPY_CALL_GATHER = 1 << 8,   /* functions that move the data of gathers */
    FCPY_CALL_REDUCE = 1 << 9,
    FCPY_CALL_MEMORY = 1 << 10, /* of a parameter: freeing the unsharded parameter */
    FCPY_CALL_PRE_FORWARD = 1 << 11,
    FCPY_CALL_POST_FORWARD = 1 << 12,
    FCPY_CALL_INSERT_NODE = 1 << 13,
    FCPY_CALL_NODE_CLASS = 1 << 14,      /* class of torch's post-backward node */
    FCPY_CALL_NODE = 1 << 15,            /* backward of torch's post-backward node */
    FCPY_CALL_SWAP = 1 << 16,            /* of a parameter: registering one of its tensors */
    FCPY_CALL_GRADS = 1 << 17,           /* of a parameter: accumulating unsharded gradients */
    FCPY_CALL_TRANSITIONS = (1 << 8) - 1 /* all entries of fc_transitions */
};
/* X(method, bit) for each method of a group. */
#define FCPY_GROUP_METHODS(X)                                                                      \
    X(unshard, FCPY_CALL_UNSHARD)                                                                  \
    X(wait_for_unshard, FCPY_CALL_WAIT)                                                            \
    X(reshard, FCPY_CALL_RESHARD)                                                                  \
    X(_to_sharded, FCPY_CALL_TO_SHARDED)                                                           \
    X(pre_backward, FCPY_CALL_PRE_BACKWARD)                                                        \
    X(post_backward, FCPY_CALL_POST_BACKWARD)                                                      \
    X(finalize_backward, FCPY_CALL_FINALIZE)                                                       \
    X(_backward_prefetch, FCPY_CALL_PREFETCH)                                                      \
    X(pre_forward, FCPY_CALL_PRE_FORWARD)                                                          \
    X(post_forward, FCPY_CALL_POST_FORWARD)                                                        \
    X(_register_post_backward_hook, FCPY_CALL_INSERT_NODE)

/* Replaceable methods of a state. */
enum {
    FCPY_STATE_CAST_INPUTS = 1 << 0,
    FCPY_STATE_CAST_OUTPUT = 1 << 1,
    FCPY_STATE_ROOT_PRE_FORWARD = 1 << 2,
    FCPY_STATE_HOOK_OUTPUT = 1 << 3,
    FCPY_STATE_PRE_BACKWARD = 1 << 4,
    FCPY_STATE_QUEUE_END = 1 << 5,
    FCPY_STATE_END = 1 << 6,
    FCPY_STATE_COMPLETE = 1 << 7
};
/* X(method, bit) for each method of a state. */
#define FCPY_STATE_METHODS(X)                                                                      \
    X(_cast_forward_inputs, FCPY_STATE_CAST_INPUTS)                                                \
    X(_cast_output_dtype, FCPY_STATE_CAST_OUTPUT)                                                  \
    X(_root_pre_forward, FCPY_STATE_ROOT_PRE_FORWARD)                                              \
    X(_register_pre_backward_hook, FCPY_STATE_HOOK_OUTPUT)                                         \
    X(_pre_backward, FCPY_STATE_PRE_BACKWARD)                                                      \
    X(_register_root_post_backward_final_callback, FCPY_STATE_QUEUE_END)                           \
    X(_root_post_backward_final_callback, FCPY_STATE_END)                                          \
    X(_force_complete_incomplete_states, FCPY_STATE_COMPLETE)

/* Return the bits of the methods that are overridden now: on torch's class, on the object or on its
 * type. */
uint32_t fcpy_group_overrides(fcpy_group *self);
uint32_t fcpy_state_overrides(fcpy_state *self);
/* Returns the name of the group method with this bit, or NULL if there is no such method. */
const char *fcpy_group_method(uint32_t bit);

/* Detects patched functions and methods of torch's modules and classes, and the level of torch's
 * logger. Updates guard->bits and guard->log. */
void fcpy_guard_read(fcpy_guard *guard);

/* Logs "FSDP::label (modules of the group)" at debug level, if enabled. `group` may be None. Does
 * not change a pending exception. */
void fcpy_log(fcpy_module *mod, PyObject *group, const char *label);

/* _C.guard_bind(group_methods, state_methods, entries, log_cache, log_enabled) */
PyObject *fcpy_guard_bind(PyObject *module, PyObject *args);
/* Adds GROUP_METHODS, STATE_METHODS and the bits CALL_* of entries to the module. */
int fcpy_guard_add_names(PyObject *module);
/* _C._testing.overrides(group or state) -> int */
PyObject *fcpy_guard_overrides(PyObject *module, PyObject *obj);
int fcpy_guard_traverse(fcpy_guard *guard, visitproc visit, void *arg);
void fcpy_guard_clear(fcpy_guard *guard);

#endif
