/* Functions that take or return Python objects. Only csrc/python and this folder include this file.
 */
#ifndef FSDP_C_BRIDGE_PYOBJECT_H
#define FSDP_C_BRIDGE_PYOBJECT_H

#include "allocator.h"
#include "group.h"

#ifdef __cplusplus
extern "C" {
#endif

struct _object; /* CPython's PyObject */

bool fct_py_is_tensor(struct _object *obj); /* type(obj) is torch.Tensor or a subclass */
/* type(obj) is torch.Tensor or torch.nn.Parameter */
bool fct_py_is_exact_tensor(struct _object *obj);
/* The tensor of a torch.Tensor object, borrowed from obj. Returns NULL without an exception if obj
 * is not a tensor. */
fct_tensor *fct_py_tensor(struct _object *obj);
/* If only its Python object and `references` references of the caller hold t, borrows that object.
 * Then t holds a reference to the object, which ends with those of the caller, so a tp_traverse of
 * the caller visits the object once. Otherwise returns NULL. */
struct _object *fct_py_object_to_traverse(const fct_tensor *t, size_t references);
/* The address of the storage of a torch.Tensor object, for comparison only. */
const void *fct_py_storage(struct _object *tensor);
/* New reference to the Python object of t. Creates the object if it does not exist. */
FCT_CHECK int fct_py_from_tensor(fct_tensor *t, struct _object **out);
/* A new wrapper of `type`, a subclass of torch.Tensor with __torch_dispatch__. The wrapper has the
 * given sizes and strides, and local's dtype, device and offset, without memory and gradient.
 * Writes NULL to *out, without an exception, if this torch release does not export the constructor.
 * The same holds if `local` is not plain (for example, requires grad). Then the caller uses torch's
 * own function. */
FCT_CHECK int fct_py_wrapper(const fct_tensor *local, struct _object *type, const int64_t *sizes,
                             const int64_t *strides, int64_t dims, struct _object **out);
/* torch.Tensor.grad of param, even if the class of param overrides `grad`. New reference; None if
 * there is no gradient. */
FCT_CHECK int fct_py_grad(struct _object *param, struct _object **out);
/* param.grad = grad. Both are torch.Tensor objects. A NULL `grad` sets None. Of the checks of
 * torch's Python setter, this function makes only one: a dtype that param.grad_dtype excludes
 * raises torch's RuntimeError. */
FCT_CHECK int fct_py_set_grad(struct _object *param, struct _object *grad);
/* Borrows the dict of param's post-accumulate-grad hooks. Returns NULL without an exception if
 * param has no hooks. Does not call __torch_function__. */
struct _object *fct_py_grad_hooks(struct _object *param);
/* Conversions of torch.dtype objects. fct_py_dtype returns FCT_NO_DTYPE for None, and -2 with a
 * TypeError for other objects. */
fct_dtype fct_py_dtype(struct _object *obj);
FCT_CHECK int fct_py_from_dtype(fct_dtype dtype, struct _object **out);
/* Whether the interpreter finalizes. At that time modules are cleared, and code runs only in
 * __del__. */
bool fct_py_is_finalizing(void);
/* Writes a new reference to the handle of a ProcessGroup object. A group has one handle, which its
 * users share. */
FCT_CHECK int fct_py_pg(struct _object *obj, fct_pg **out);
/* A new reference to the ProcessGroup that has the shared-memory backend of `pg` as its CPU
 * backend. */
FCT_CHECK int fct_py_shm_group(fct_pg *pg, struct _object **out);
/* A new allocator of the table in allocator.cpp. `source` is the process group or the object of
 * torch that allocates. Raises ValueError for an unknown name. */
FCT_CHECK int fct_py_allocator(const char *name, struct _object *source, fct_allocator **out);
/* Converts a torch.device object. */
FCT_CHECK int fct_py_device(struct _object *obj, fct_device *out);

#ifdef __cplusplus
}
#endif

#endif
