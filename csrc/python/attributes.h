/* Getters and setters that several types share. */
#ifndef FSDP_C_PYTHON_ATTRIBUTES_H
#define FSDP_C_PYTHON_ATTRIBUTES_H

#include "objects.h"

/* A list of objects of one type as a new tuple; NULL with TypeError. */
PyObject *fcpy_tuple_of(PyObject *list, PyTypeObject *type, const char *what);
/* malloc'ed: where the structs of a tuple's items are, `offset` bytes into each object; NULL with
 * MemoryError. */
void *fcpy_core_array(PyObject *tuple, size_t offset);
PyObject *fcpy_training_state(const fcpy_module *mod, fc_training_state state);
/* -1 with TypeError where obj is no TrainingState. */
int fcpy_parse_training_state(const fcpy_module *mod, PyObject *obj, fc_training_state *out);
PyObject *fcpy_sharded_state(const fcpy_module *mod, fc_sharded_state state);
/* Sets *target from a Python bool; deletion is refused. */
int fcpy_set_bool(PyObject *value, bool *target);
PyObject *fcpy_get_dtype(fct_dtype dtype); /* None for FCT_NO_DTYPE */
int fcpy_set_dtype(PyObject *value, fct_dtype *target);
/* Getters and setters of a bool, or an fct_dtype, `closure` bytes into the object. */
PyObject *fcpy_get_flag(PyObject *obj, void *closure);
int fcpy_set_flag(PyObject *obj, PyObject *value, void *closure);
PyObject *fcpy_get_dtype_at(PyObject *obj, void *closure);
int fcpy_set_dtype_at(PyObject *obj, PyObject *value, void *closure);
/* Puts a str (None: none) into *slot and its text, which the core borrows, into *text. */
int fcpy_set_text(fcpy_module *mod, PyObject *value, PyObject **slot, const char **text);
/* New reference to obj, None for NULL. */
PyObject *fcpy_or_none(PyObject *obj);
/* Reference counting of a PyObject as the owner of an fct_hook. */
void fcpy_retain(void *owner);
void fcpy_release(void *owner);

#endif
