/* The work of a state's hooks during a training step. */
#ifndef FSDP_C_PYTHON_STEP_H
#define FSDP_C_PYTHON_STEP_H

#include "objects.h"

/* Functions that return int return 0, or -1 with an exception. */

/* Pre-forward of a group: unshards it and passes the arguments through the post-backward node. */
int fcpy_group_pre_forward(fcpy_group *self, PyObject **args, PyObject **kwargs);
/* Passes the arguments through the post-backward node. Uses torch's node under functorch and while
 * its class is patched, else the node of csrc/bridge. */
int fcpy_group_insert_node(fcpy_group *self, PyObject **args, PyObject **kwargs);

/* Runs lazy init if it has not run, then begins an iteration if none has begun. May replace *args
 * and *kwargs, which are owned references. */
int fcpy_state_begin_forward(fcpy_state *self, PyObject **args, PyObject **kwargs);
/* Resets the iteration and all states under the root. */
int fcpy_state_reset(fcpy_state *self);
/* The work of the hooks at the first gradient of an output, and at the end of a backward. */
int fcpy_state_pre_backward(fcpy_state *self);
int fcpy_state_end_backward(fcpy_state *self);
/* The work of the forward hooks. fcpy_state_pre_forward may replace *args and *kwargs, which are
 * owned references. fcpy_state_post_forward returns a new reference to the output, or NULL with an
 * exception. */
int fcpy_state_pre_forward(fcpy_state *self, PyObject *module, PyObject **args, PyObject **kwargs);
PyObject *fcpy_state_post_forward(fcpy_state *self, PyObject *module, PyObject *input,
                                  PyObject *output);
/* Casts output to the policy's output dtype. Returns a new reference. */
PyObject *fcpy_state_cast_output(fcpy_state *self, PyObject *output);
/* fc_callbacks.grad_arrived */
int fcpy_param_grad_arrived(void *param);

#endif
