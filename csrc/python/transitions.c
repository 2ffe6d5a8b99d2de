/* A group's transitions as they are made here: each asks whether somebody has overridden the method
 * that torch has for it, and calls that. Likewise who moves the data. Owns nothing. */
#include "transitions.h"

#include "guard.h"

/* ---- what the core asks ---- */

/* Whether these methods of the group's parameters are patched, or overridden on their own. */
static bool param_calls(fcpy_group *self, uint32_t bits) {
    return (self->param_calls & bits) != 0 || fcpy_guard_patched(&self->mod->guard, bits);
}

bool fcpy_host_moves(void *group, fc_move move) {
    fcpy_group *self = (fcpy_group *)group;
    switch (move) {
    case FC_MOVE_GATHER:
        return self->hosted_gather || fcpy_guard_patched(&self->mod->guard, FCPY_CALL_GATHER);
    case FC_MOVE_REDUCE:
        return self->hosted_reduce || fcpy_guard_patched(&self->mod->guard, FCPY_CALL_REDUCE);
    case FC_MOVE_EARLY:
        return fcpy_host_moves(group, FC_MOVE_REDUCE) ||
               fcpy_group_overrides(self, FCPY_CALL_POST_BACKWARD);
    case FC_MOVE_FREE:
        return param_calls(self, FCPY_CALL_MEMORY);
    case FC_MOVE_SWAP:
        return param_calls(self, FCPY_CALL_SWAP);
    case FC_MOVE_GRADS:
        return param_calls(self, FCPY_CALL_GRADS);
    }
    return false;
}

/* ---- transitions: what overrides one of them, or else the group's own ---- */

/* Calls the method of that bit, with an argument where there is one (borrowed). */
static fc_status run(fc_group *g, uint32_t bit, PyObject *argument) {
    PyObject *self = (PyObject *)g->members.owner;
    const char *name = fcpy_group_method(bit);
    PyObject *result = argument != NULL ? PyObject_CallMethod(self, name, "O", argument)
                                        : PyObject_CallMethod(self, name, NULL);
    Py_XDECREF(result);
    return result != NULL ? FC_OK : FC_ERAISED;
}

static bool overridden(const fc_group *g, uint32_t bit) {
    return fcpy_group_overrides((fcpy_group *)g->members.owner, bit);
}

/* Whoever overrides it finds the pass in the group's training state, as in torch. */
static fc_status ask_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    if (!overridden(g, FCPY_CALL_UNSHARD)) {
        return fc_group_unshard(g, pass, async_op);
    }
    fc_training_state before = g->training_state;
    g->training_state = pass;
    fc_status status = run(g, FCPY_CALL_UNSHARD, async_op ? Py_True : Py_False);
    g->training_state = before;
    return status;
}

static fc_status ask_pre_backward(fc_group *g, bool default_prefetch) {
    return overridden(g, FCPY_CALL_PRE_BACKWARD)
               ? run(g, FCPY_CALL_PRE_BACKWARD, default_prefetch ? Py_True : Py_False)
               : fc_group_pre_backward(g, default_prefetch);
}

#define ASK(name, bit, transition)                                                                 \
    static fc_status name(fc_group *g) {                                                           \
        return overridden(g, bit) ? run(g, bit, NULL) : transition(g);                             \
    }
ASK(ask_wait, FCPY_CALL_WAIT, fc_group_wait_unshard)
ASK(ask_reshard, FCPY_CALL_RESHARD, fc_group_reshard)
ASK(ask_to_sharded, FCPY_CALL_TO_SHARDED, fc_group_to_sharded)
ASK(ask_post_backward, FCPY_CALL_POST_BACKWARD, fc_group_post_backward)
ASK(ask_finalize, FCPY_CALL_FINALIZE, fc_group_finalize_backward)
ASK(ask_prefetch, FCPY_CALL_PREFETCH, fc_group_backward_prefetch)
#undef ASK

const fc_transitions fcpy_transitions = {
    .unshard = ask_unshard,
    .wait_unshard = ask_wait,
    .reshard = ask_reshard,
    .to_sharded = ask_to_sharded,
    .pre_backward = ask_pre_backward,
    .post_backward = ask_post_backward,
    .finalize_backward = ask_finalize,
    .backward_prefetch = ask_prefetch,
};

void fcpy_host_log(void *group, const char *label) {
    fcpy_log(((fcpy_group *)group)->mod, (PyObject *)group, label);
}
