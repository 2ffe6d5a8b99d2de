/* Conversions, getters and setters that several types share. */
#ifndef FSDP_C_PYTHON_ATTRIBUTES_H
#define FSDP_C_PYTHON_ATTRIBUTES_H

#include "objects.h"

/* Checks that `list` is a list of objects of `type`. Returns its items as a new tuple, or NULL with
 * TypeError. The error message calls the list `name`. */
PyObject *fcpy_tuple_of(PyObject *list, PyTypeObject *type, const char *name);
/* Returns an array with the address of each item's core struct, `offset` bytes into the object. The
 * caller frees the array with free(). Returns NULL with MemoryError on failure. */
void *fcpy_core_array(PyObject *tuple, size_t offset);
/* fcpy_training_state and fcpy_sharded_state return a member of torch's enum; new reference. */
PyObject *fcpy_training_state(const fcpy_module *mod, fc_training_state state);
/* Returns -1 with TypeError if obj is not a TrainingState. */
int fcpy_parse_training_state(const fcpy_module *mod, PyObject *obj, fc_training_state *out);
PyObject *fcpy_sharded_state(const fcpy_module *mod, fc_sharded_state state);
/* Sets *target to the truth of `value`. Returns -1 with AttributeError on deletion. */
int fcpy_parse_bool(PyObject *value, bool *target);
/* Returns a torch.dtype, or None for FCT_NO_DTYPE; new reference. */
PyObject *fcpy_dtype_object(fct_dtype dtype);
/* Sets *target to a torch.dtype, or to FCT_NO_DTYPE for None and on deletion. Returns -1 with
 * TypeError for other objects. */
int fcpy_parse_dtype(PyObject *value, fct_dtype *target);
/* Getters and setters of a field. `closure` is the offset of the field in the object. */
PyObject *fcpy_get_object(PyObject *obj, void *closure); /* None for NULL */
PyObject *fcpy_get_size(PyObject *obj, void *closure);   /* of a size_t */
PyObject *fcpy_get_flag(PyObject *obj, void *closure);
int fcpy_set_flag(PyObject *obj, PyObject *value, void *closure);
PyObject *fcpy_get_dtype(PyObject *obj, void *closure);
int fcpy_set_dtype(PyObject *obj, PyObject *value, void *closure);
/* Stores a str in *slot and its UTF-8 text, which the core borrows, in *text. Stores NULL in both
 * for None and on deletion. */
int fcpy_set_text(fcpy_module *mod, PyObject *value, PyObject **slot, const char **text);
/* Returns a new reference to obj, or to None if obj is NULL. */
PyObject *fcpy_or_none(PyObject *obj);
/* Calls self.name() where no exception can be raised. Reports an exception of the call with
 * sys.unraisablehook. Does not change a pending exception. */
void fcpy_call_and_report(PyObject *self, PyObject *name);

/* Returns a new reference to the object of a weak reference, or NULL without an exception. */
PyObject *fcpy_weak_target(PyObject *reference);

/* Reference counting of a PyObject that owns an fct_hook. */
void fcpy_retain(void *owner);
void fcpy_release(void *owner);

#endif
