/* Selects which transitions and operations of a group Python code performs; see transitions.h.
 *
 * A group without replaced methods runs fc_group_transitions. Otherwise fcpy_group.transitions has
 * a dispatch function for each overridden method and the core's function for each other method. */
#include "transitions.h"

#include "guard.h"

/* ---- transitions ---- */

/* Calls the method with this bit, with `argument` (borrowed) if it is not NULL. The method is user
 * code and may patch further methods. Like in torch, the same transition then calls the patched
 * methods. */
static fc_status call_override(fc_group *g, uint32_t bit, PyObject *argument) {
    PyObject *self = (PyObject *)g->base.owner;
    const char *name = fcpy_group_method(bit);
    PyObject *result = argument != NULL ? PyObject_CallMethod(self, name, "O", argument)
                                        : PyObject_CallMethod(self, name, NULL);
    if (result == NULL) {
        return FC_ERAISED;
    }
    Py_DECREF(result);
    fcpy_group_refresh((fcpy_group *)self);
    return FC_OK;
}

/* Sets the training state during the call, because an override reads the pass (forward or backward)
 * from it, like in torch. */
static fc_status dispatch_unshard(fc_group *g, fc_training_state pass, bool async_op) {
    fc_training_state old_state = g->training_state;
    g->training_state = pass;
    fc_status status = call_override(g, FCPY_CALL_UNSHARD, async_op ? Py_True : Py_False);
    g->training_state = old_state;
    return status;
}

static fc_status dispatch_pre_backward(fc_group *g, bool default_prefetch) {
    return call_override(g, FCPY_CALL_PRE_BACKWARD, default_prefetch ? Py_True : Py_False);
}

#define DISPATCH(name, bit)                                                                        \
    static fc_status name(fc_group *g) {                                                           \
        return call_override(g, bit, NULL);                                                        \
    }
DISPATCH(dispatch_wait, FCPY_CALL_WAIT)
DISPATCH(dispatch_reshard, FCPY_CALL_RESHARD)
DISPATCH(dispatch_to_sharded, FCPY_CALL_TO_SHARDED)
DISPATCH(dispatch_post_backward, FCPY_CALL_POST_BACKWARD)
DISPATCH(dispatch_finalize, FCPY_CALL_FINALIZE)
DISPATCH(dispatch_prefetch, FCPY_CALL_PREFETCH)
#undef DISPATCH

static fc_transitions transitions_for(uint32_t replaced) {
    fc_transitions transitions = fc_group_transitions;
    const bool unshard = (replaced & FCPY_CALL_UNSHARD) != 0;
    const bool pre_backward = (replaced & FCPY_CALL_PRE_BACKWARD) != 0;
    transitions.unshard = unshard ? dispatch_unshard : transitions.unshard;
    transitions.pre_backward = pre_backward ? dispatch_pre_backward : transitions.pre_backward;
    const struct {
        uint32_t bit;
        fc_status (**entry)(fc_group *g);
        fc_status (*dispatch)(fc_group *g);
    } entries[] = {
        {FCPY_CALL_WAIT, &transitions.wait_unshard, dispatch_wait},
        {FCPY_CALL_RESHARD, &transitions.reshard, dispatch_reshard},
        {FCPY_CALL_TO_SHARDED, &transitions.to_sharded, dispatch_to_sharded},
        {FCPY_CALL_POST_BACKWARD, &transitions.post_backward, dispatch_post_backward},
        {FCPY_CALL_FINALIZE, &transitions.finalize_backward, dispatch_finalize},
        {FCPY_CALL_PREFETCH, &transitions.backward_prefetch, dispatch_prefetch},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if ((replaced & entries[i].bit) != 0) {
            *entries[i].entry = entries[i].dispatch;
        }
    }
    return transitions;
}

/* ---- operations ---- */

static uint32_t fallbacks_for(uint32_t replaced) {
    static const struct {
        uint32_t calls;
        uint32_t fallback;
    } table[] = {
        {FCPY_CALL_GATHER, FC_FALLBACK_GATHER},
        {FCPY_CALL_REDUCE, FC_FALLBACK_REDUCE},
        {FCPY_CALL_REDUCE | FCPY_CALL_POST_BACKWARD, FC_FALLBACK_EAGER},
        {FCPY_CALL_MEMORY, FC_FALLBACK_FREE},
        {FCPY_CALL_SWAP, FC_FALLBACK_SWAP},
        {FCPY_CALL_GRADS, FC_FALLBACK_GRADS},
    };
    uint32_t fallbacks = 0;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        fallbacks |= (replaced & table[i].calls) != 0 ? table[i].fallback : 0;
    }
    return fallbacks;
}

/* ---- refresh ---- */

/* Sets the fields of one group from the latest fcpy_guard_read(). Never fails. */
static fc_status refresh(fc_group *g) {
    fcpy_group *self = (fcpy_group *)g->base.owner;
    const fcpy_guard *guard = &self->mod->guard;
    const uint32_t replaced = fcpy_group_overrides(self) | guard->bits | self->param_calls |
                              (self->fallback_gather ? FCPY_CALL_GATHER : 0) |
                              (self->fallback_reduce ? FCPY_CALL_REDUCE : 0);
    g->base.logs = guard->log;
    if (replaced == self->replaced) {
        return FC_OK;
    }
    self->replaced = replaced;
    g->base.fallbacks = fallbacks_for(replaced);
    self->transitions = transitions_for(replaced);
    g->transitions =
        (replaced & FCPY_CALL_TRANSITIONS) != 0 ? &self->transitions : &fc_group_transitions;
    return FC_OK;
}

void fcpy_group_refresh(fcpy_group *self) {
    if (self->core.base.callbacks != NULL) {
        fcpy_guard_read(&self->mod->guard);
        FC_IGNORE(refresh(&self->core));
    }
}

void fcpy_group_refresh_targets(const fcpy_group *self) {
    FC_IGNORE(fc_group_visit_targets(&self->core, refresh));
}

void fcpy_state_refresh(fcpy_state *self) {
    self->replaced = fcpy_state_overrides(self);
}

void fcpy_state_refresh_groups(fcpy_state *self) {
    fcpy_guard_read(&self->mod->guard);
    FC_IGNORE(fc_state_visit_groups(&self->core, refresh));
}

void fcpy_state_refresh_forward_prefetch(fcpy_state *self) {
    fcpy_guard_read(&self->mod->guard);
    FC_IGNORE(fc_state_visit_forward_prefetch(&self->core, refresh));
}

void fcpy_state_refresh_pre_backward(fcpy_state *self) {
    fcpy_guard_read(&self->mod->guard);
    FC_IGNORE(fc_state_visit_pre_backward(&self->core, refresh));
}

void fcpy_state_refresh_iteration(fcpy_state *self) {
    fcpy_guard_read(&self->mod->guard);
    FC_IGNORE(fc_iteration_visit_groups(self->core.iteration, refresh));
}

/* ---- log ---- */

void fcpy_callback_log(void *group, const char *label) {
    fcpy_log(((fcpy_group *)group)->mod, (PyObject *)group, label);
}
