/* Injected faults, and the exception that is pending after one.
 *
 * One counter covers everything that can fail: boundary calls, fc_callbacks, kernel launches and
 * the core's malloc, calloc and realloc (through the linker's --wrap). As in Python there is one
 * pending exception. A call that fails while one is pending keeps the first. */
#include "sim_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *block, size_t size);

static _Thread_local struct {
    int64_t left; /* calls until the fault; 0: no fault */
    sim_fault_span span;
    sim_fault_kind fired;
    const char *name;
    bool error;
    char explanation[600];
} faults;

/* FSDP_C_SIM_TRACE=file writes every call that can fail to the file, in order, one per line. A
 * refactoring of the core must not change this trace. */
static void trace(const char *name) {
    static FILE *file;
    static bool was_read;
    if (!was_read) {
        const char *path = getenv("FSDP_C_SIM_TRACE");
        file = path != NULL ? fopen(path, "w") : NULL;
        was_read = true;
    }
    if (file != NULL) {
        (void)fprintf(file, "%s\n", name);
    }
}

/* Boundary calls since sim_calls_clear(), except for fct_tensor_alias() and fct_tensor_alias_as().
 * Calls that do not fit are dropped: sweeps neither read nor clear the text. */
static _Thread_local char calls[1024];
static _Thread_local size_t calls_length;

void sim_calls_clear(void) {
    calls[0] = '\0';
    calls_length = 0;
}

const char *sim_calls_text(void) {
    return calls;
}

static void note_call(const char *name) {
    size_t length = strlen(name);
    if (calls_length + length + 2 > sizeof calls || strncmp(name, "fct_tensor_alias", 16) == 0) {
        return;
    }
    if (calls_length > 0) {
        calls[calls_length++] = ' ';
    }
    memcpy(calls + calls_length, name, length + 1);
    calls_length += length;
}

void sim_faults_begin(void) {
    trace("---");
    memset(&faults, 0, sizeof faults);
}

void sim_fault_arm(int64_t n, sim_fault_span span) {
    faults.left = n;
    faults.span = span;
    faults.fired = SIM_NO_FAULT;
    faults.name = NULL;
}

sim_fault_kind sim_fault_fired(const char **name) {
    if (name != NULL) {
        *name = faults.name;
    }
    return faults.fired;
}

bool sim_error_pending(void) {
    return faults.error;
}

int sim_raise(void) {
    faults.error = true;
    return -1;
}

bool sim_fault(sim_fault_kind kind, const char *name) {
    trace(name);
    if (sim_ranks != NULL) {
        sim_ranks->preempt();
    }
    if (kind == SIM_FAULT_BOUNDARY) {
        note_call(name);
        sim_gil_note_call(name);
    }
    if (faults.left == 0) {
        return false;
    }
    if (faults.fired != SIM_NO_FAULT) {
        if (faults.span == SIM_CALLBACKS_AFTER && kind != SIM_FAULT_CALLBACK) {
            return false;
        }
    } else if (--faults.left > 0) {
        return false;
    } else if (faults.span != SIM_ONCE) {
        faults.left = 1; /* stays armed */
    }
    if (faults.fired == SIM_NO_FAULT) {
        faults.fired = kind;
        faults.name = name;
    }
    faults.error = faults.error || kind == SIM_FAULT_BOUNDARY || kind == SIM_FAULT_CALLBACK;
    return true;
}

/* The address of `exception` represents the pending exception. */
void *fct_error_set_aside(void) {
    static char exception;
    void *error = faults.error ? &exception : NULL;
    faults.error = false;
    return error;
}

void fct_error_put_back(void *error) {
    faults.error = error != NULL;
}

void sim_discard_error(void) {
    faults.error = false;
}

void fct_error_explain(const char *text) {
    assert_true(faults.error);
    assert_non_null(text);
    (void)snprintf(faults.explanation, sizeof faults.explanation, "%s", text);
}

const char *sim_error_explanation(void) {
    return faults.explanation;
}

/* ---- memory of the core ---- */

void *__wrap_malloc(size_t size) {
    return sim_fault(SIM_FAULT_MEMORY, "malloc") ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size) {
    return sim_fault(SIM_FAULT_MEMORY, "calloc") ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t size) {
    return sim_fault(SIM_FAULT_MEMORY, "realloc") ? NULL : __real_realloc(block, size);
}

void *sim_alloc(size_t bytes) {
    void *block = __real_calloc(1, bytes > 0 ? bytes : 1);
    if (block == NULL) {
        fail_msg("the simulation is out of memory");
    }
    return block;
}
