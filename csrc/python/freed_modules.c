/* Calls _leave_lists() of a state when all its modules and all its hooks are freed.
 *
 * Modules own their state through their forward hooks. The state has weak references to them, so
 * that reference counts free a deleted model. The other states under the root own the state, too:
 * it is in IterationContext.all_states and may be a target of prefetches. It leaves these lists
 * when all its modules are freed, and neither a copy of a module nor an autograd graph has its
 * hooks. A backward after the deletion of the model therefore runs as before. */
#include "freed_modules.h"

#include "attributes.h"

fcpy_state *fcpy_group_unit(const fcpy_group *group) {
    return group->unit != NULL ? (fcpy_state *)fcpy_weak_target(group->unit) : NULL;
}

static void leave_if_unused(fcpy_state *self) {
    /* Without Hook objects, the modules have Python functions, which do not report that they are
     * freed. The iteration is NULL after the garbage collector has cleared the state. */
    if (self->without_modules && self->has_hooks && self->hooks == 0 && self->iteration != NULL) {
        fcpy_call_and_report((PyObject *)self, self->mod->names._leave_lists);
    }
}

void fcpy_hook_retain(void *owner) {
    ((fcpy_state *)owner)->hooks++;
    fcpy_retain(owner);
}

void fcpy_hook_release(void *owner) {
    ((fcpy_state *)owner)->hooks--;
    leave_if_unused((fcpy_state *)owner);
    fcpy_release(owner);
}

PyObject *fcpy_state_note_freed_modules(PyObject *obj, PyObject *unused) {
    (void)unused;
    ((fcpy_state *)obj)->without_modules = true;
    leave_if_unused((fcpy_state *)obj);
    Py_RETURN_NONE;
}
