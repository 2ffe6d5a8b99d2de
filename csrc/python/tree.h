/* Walking forward arguments and outputs. */
#ifndef FSDP_C_PYTHON_TREE_H
#define FSDP_C_PYTHON_TREE_H

#include "objects.h"

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

#endif
