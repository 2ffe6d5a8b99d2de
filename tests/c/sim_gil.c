/* The simulated GIL: scopes of bridge/gil.h, and the number of releases. */
#include "sim_internal.h"

#include <string.h>

static _Thread_local bool in_scope;
static _Thread_local bool released; /* the first device call of the scope has released the GIL */
static _Thread_local size_t releases;

void sim_gil_begin(void) {
    in_scope = released = false;
    releases = 0;
}

void sim_gil_end(void) {
    if (in_scope) {
        sim_fail("a scope of the GIL was not left");
    }
}

size_t sim_gil_releases(void) {
    return releases;
}

void sim_gil_need(const char *name) {
    if (in_scope) {
        sim_fail("%s is called in a scope that releases the GIL", name);
    }
}

/* Returns true if the bridge releases the GIL in the call. */
static bool is_device_call(const char *name) {
    static const char *const names[] = {
        "fct_tensor_empty",      "fct_tensor_cast",      "fct_tensor_copy",   "fct_tensor_add",
        "fct_tensor_div",        "fct_storage_alloc",    "fct_foreach_copy",  "fct_foreach_add",
        "fct_split_copy",        "fct_chunk_cat",        "fct_launch_enter",  "fct_all_gather",
        "fct_reduce_scatter",    "fct_all_reduce",       "fct_tensor_upload", "fct_tensor_to_host",
        "fct_tensor_zeros_like", "fct_tensor_contiguous"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

void sim_gil_note_call(const char *name) {
    if (sim_now.streams && is_device_call(name) && !released) {
        releases++;
        released = in_scope;
    }
}

void fct_gil_enter(void) {
    in_scope = true;
}

void fct_gil_leave(void) {
    in_scope = released = false;
}
