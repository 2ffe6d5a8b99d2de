/* Local tensors for torch's optimizers: module functions, see fsdp_c/_C.pyi. */
#ifndef FSDP_C_PYTHON_LOCAL_LISTS_H
#define FSDP_C_PYTHON_LOCAL_LISTS_H

#include "objects.h"

/* _C.local_lists(lists, layout_cache, layouts_equal) */
PyObject *fcpy_local_lists(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
/* _C.local_group(params, state, keys, layout_cache, layouts_equal) */
PyObject *fcpy_local_group(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
