/* A group's transitions. Each checks whether the corresponding method of torch is overridden, and
 * calls it if so, else the core. Likewise fcpy_uses_fallback decides whether Python or the core
 * moves the data. Owns nothing. */
#include "transitions.h"

#include "guard.h"

/* ---- callbacks of the core ---- */

/* Whether these parameter methods are patched, or overridden on a parameter of the group. */
static bool are_param_methods_replaced(fcpy_group *self, uint32_t bits) {
    return (self->param_calls & bits) != 0 || fcpy_guard_patched(&self->mod->guard, bits);
}

bool fcpy_uses_fallback(void *group, fc_fallback move) {
    fcpy_group *self = (fcpy_group *)group;
    switch (move) {
    case FC_FALLBACK_GATHER:
        return self->fallback_gather || fcpy_guard_patched(&self->mod->guard, FCPY_CALL_GATHER);
    case FC_FALLBACK_REDUCE:
        return self->fallback_reduce || fcpy_guard_patched(&self->mod->guard, FCPY_CALL_REDUCE);
    case FC_FALLBACK_EARLY:
        return fcpy_uses_fallback(group, FC_FALLBACK_REDUCE) ||
               fcpy_group_overrides(self, FCPY_CALL_POST_BACKWARD);
    case FC_FALLBACK_FREE:
        return are_param_methods_replaced(self, FCPY_CALL_MEMORY);
    case FC_FALLBACK_SWAP:
        return are_param_methods_replaced(self, FCPY_CALL_SWAP);
    case FC_FALLBACK_GRADS:
        return are_param_methods_replaced(self, FCPY_CALL_GRADS);
    }
    return false;
}

/* ---- transitions ---- */

/* Calls the method with this bit, with `argument` (borrowed) if it is not NULL. */
static fc_status call_override(fc_group *g, uint32_t bit, PyObject *argument) {
    PyObject *self = (PyObject *)g->base.owner;
    const char *name = fcpy_group_method(bit);
    PyObject *result = argument != NULL ? PyObject_CallMethod(self, name, "O", argument)
                                        : PyObject_CallMethod(self, name, NULL);
    Py_XDECREF(result);
    return result != NULL ? FC_OK : FC_ERAISED;
}

static bool is_overridden(const fc_group *g, uint32_t bit) {
    return fcpy_group_overrides((fcpy_group *)g->base.owner, bit);
}

/* An override reads the pass from the group's training state, as in torch. */
static fc_status dispatch_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    if (!is_overridden(g, FCPY_CALL_UNSHARD)) {
        return fc_group_unshard(g, pass, async_op);
    }
    fc_training_state before = g->training_state;
    g->training_state = pass;
    fc_status status = call_override(g, FCPY_CALL_UNSHARD, async_op ? Py_True : Py_False);
    g->training_state = before;
    return status;
}

static fc_status dispatch_pre_backward(fc_group *g, bool default_prefetch) {
    return is_overridden(g, FCPY_CALL_PRE_BACKWARD)
               ? call_override(g, FCPY_CALL_PRE_BACKWARD, default_prefetch ? Py_True : Py_False)
               : fc_group_pre_backward(g, default_prefetch);
}

#define DISPATCH(name, bit, transition)                                                            \
    static fc_status name(fc_group *g) {                                                           \
        return is_overridden(g, bit) ? call_override(g, bit, NULL) : transition(g);                \
    }
DISPATCH(dispatch_wait, FCPY_CALL_WAIT, fc_group_wait_unshard)
DISPATCH(dispatch_reshard, FCPY_CALL_RESHARD, fc_group_reshard)
DISPATCH(dispatch_to_sharded, FCPY_CALL_TO_SHARDED, fc_group_to_sharded)
DISPATCH(dispatch_post_backward, FCPY_CALL_POST_BACKWARD, fc_group_post_backward)
DISPATCH(dispatch_finalize, FCPY_CALL_FINALIZE, fc_group_finalize_backward)
DISPATCH(dispatch_prefetch, FCPY_CALL_PREFETCH, fc_group_backward_prefetch)
#undef DISPATCH

const fc_transitions fcpy_transitions = {
    .unshard = dispatch_unshard,
    .wait_unshard = dispatch_wait,
    .reshard = dispatch_reshard,
    .to_sharded = dispatch_to_sharded,
    .pre_backward = dispatch_pre_backward,
    .post_backward = dispatch_post_backward,
    .finalize_backward = dispatch_finalize,
    .backward_prefetch = dispatch_prefetch,
};

void fcpy_callback_log(void *group, const char *label) {
    fcpy_log(((fcpy_group *)group)->mod, (PyObject *)group, label);
}
