/* Traversal of forward arguments and outputs. */
#ifndef FSDP_C_PYTHON_TREE_H
#define FSDP_C_PYTHON_TREE_H

#include "objects.h"

/* Casts the floating-point tensors in *args and *kwargs, differentiably. Replaces both, which are
 * owned references. */
int fcpy_cast_inputs(fcpy_module *mod, fct_dtype dtype, PyObject **args, PyObject **kwargs);
/* Casts the floating-point tensors in `output`; returns a new reference. */
PyObject *fcpy_cast_output(fcpy_module *mod, fct_dtype dtype, PyObject *output);
/* Passes all tensors in *args and *kwargs that require grad through one post-backward node.
 * Replaces both. */
int fcpy_insert_node(fcpy_module *mod, const fct_hook *hook, PyObject **args, PyObject **kwargs);
/* Registers `hook` on the gradient of every tensor in output that requires grad. `state` is for the
 * warning about views. */
int fcpy_hook_outputs(fcpy_module *mod, PyObject *state, const fct_hook *hook, PyObject *output);

/* Replaces *args and *kwargs by the items of a 2-tuple. Steals `pair`. Returns -1 if `pair` is NULL
 * or not a 2-tuple. */
int fcpy_unpack_pair(PyObject *pair, PyObject **args, PyObject **kwargs);
/* Returns a new 2-tuple of args and kwargs, or NULL if `failed` is not 0. Steals args and kwargs.
 */
PyObject *fcpy_pack_pair(int failed, PyObject *args, PyObject *kwargs);

#endif
