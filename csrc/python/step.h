/* One training step as a state's hooks see it. */
#ifndef FSDP_C_PYTHON_STEP_H
#define FSDP_C_PYTHON_STEP_H

#include "objects.h"

/* A group's part: unshards and puts the post-backward node above the arguments. */
int fcpy_group_pre_forward(fcpy_group *self, PyObject **args, PyObject **kwargs);
/* Puts the post-backward node above the arguments: the core's, or torch's node under functorch and
 * where its class is patched. Returns -1 and sets an exception on failure. */
int fcpy_group_insert_node(fcpy_group *self, PyObject **args, PyObject **kwargs);

/* Lazy init where it has not been done, then the once-per-iteration part, which may replace args
 * and kwargs (owned). */
int fcpy_state_begin_forward(fcpy_state *self, PyObject **args, PyObject **kwargs);
/* What an iteration has left behind goes, for all states of its root. */
int fcpy_state_reset(fcpy_state *self);
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

#endif
