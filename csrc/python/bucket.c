/* A ParamGroup's buckets as Python sees them. Owns nothing. */
#include "../core/bucket.h"

#include "objects.h"

PyObject *fcpy_group_get_bucket_bytes(PyObject *obj, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((fcpy_group *)obj)->core.buckets.limit);
}

int fcpy_group_set_bucket_bytes(PyObject *obj, PyObject *value, void *closure) {
    (void)closure;
    long long limit = value != NULL ? PyLong_AsLongLong(value) : -1;
    if (limit == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (limit < 0) {
        PyErr_SetString(PyExc_ValueError, "_bucket_bytes must be an int of at least 0");
        return -1;
    }
    fc_bucket_set_limit(&((fcpy_group *)obj)->core.buckets, limit);
    return 0;
}

PyObject *fcpy_group_get_buckets(PyObject *obj, void *closure) {
    (void)closure;
    fcpy_group *self = (fcpy_group *)obj;
    fc_buckets *b = &self->core.buckets;
    fc_status status = fc_bucket_cut(b);
    if (status != FC_OK) {
        (void)fcpy_raise(status, NULL);
        return NULL;
    }
    bool cut = b->mode != FC_BUCKETS_STALE;
    size_t count = cut ? b->count : 1;
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        fc_span span = cut ? b->items[i].span : fc_members_all(&self->core.members);
        PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)span.first, (Py_ssize_t)span.end);
        if (pair == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
    }
    return list;
}
