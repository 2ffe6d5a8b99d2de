/* The simulation as a whole: configuration, random numbers, log and recorded failures. It also has
 * the small parts of the boundary without a file of their own (flags of autograd, the profiler). */
#include "sim_internal.h"
#include "splitmix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_MAX = 1 << 16, DEVICE_PRIVATE = 20, RANGES_MAX = 64 };

_Thread_local sim_config sim_now;
_Thread_local sim_alive sim_living;

static _Thread_local uint64_t random_state;
static _Thread_local size_t failures;
static _Thread_local char first_failure[512];
static _Thread_local char log_text[LOG_MAX];
static _Thread_local size_t log_length;
static _Thread_local size_t range_depth;
static _Thread_local bool in_backward;
static _Thread_local bool recording;
static _Thread_local fct_grad_subscription *subscriptions; /* newest first */
static _Thread_local fct_hook at_end;

/* ASan's defaults are tuned for programs with fewer allocations. ASAN_OPTIONS in the environment
 * overrides these. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "malloc_context_size=5:quarantine_size_mb=16:thread_local_quarantine_size_kb=64";
}

void sim_begin(sim_config config) {
    memset(&sim_living, 0, sizeof sim_living);
    sim_now = config;
    random_state = config.seed;
    failures = 0;
    range_depth = 0;
    sim_log_clear();
    sim_faults_begin();
    sim_memory_begin();
    sim_streams_begin();
    sim_ranks_begin();
    sim_groups_begin();
    sim_autograd_begin();
    sim_gil_begin();
}

void sim_check_nothing_alive(void) {
    const sim_alive left = sim_living;
    if (left.tensors + left.storages + left.works + left.events + left.groups + left.hooks +
            left.launches >
        0) {
        sim_fail("leaked: %zu tensors, %zu storages, %zu works, %zu events, %zu process groups, "
                 "%zu hooks, %zu launches",
                 left.tensors, left.storages, left.works, left.events, left.groups, left.hooks,
                 left.launches);
    }
}

void sim_end(void) {
    sim_named_end("a simulation");
}

size_t sim_finish(char *first, size_t bytes) {
    sim_fault_arm(0, SIM_ONCE);
    sim_drop_at_end();
    sim_streams_end();
    sim_gil_end();
    sim_check_nothing_alive();
    if (range_depth != 0) {
        sim_fail("%zu profiler ranges were not left", range_depth);
    }
    sim_groups_end();
    sim_memory_end();
    (void)snprintf(first, bytes, "%s", failures > 0 ? first_failure : "");
    return failures;
}

void sim_named_end(const char *format, ...) {
    char name[256], first[sizeof first_failure];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (sim_finish(first, sizeof first) > 0) {
        fail_msg("%s (seed %llu): %zu failures, the first: %s", name,
                 (unsigned long long)sim_now.seed, failures, first);
    }
}

void sim_fail(const char *format, ...) {
    char text[sizeof first_failure];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (failures++ == 0) {
        memcpy(first_failure, text, sizeof text);
    }
}

size_t sim_take_failures(void) {
    size_t taken = failures;
    failures = 0;
    return taken;
}

sim_alive sim_count_alive(void) {
    return sim_living;
}

fct_device sim_device(void) {
    if (sim_now.no_kernels) {
        return (fct_device){.type = DEVICE_PRIVATE, .index = 0};
    }
    return sim_now.streams ? (fct_device){.type = FCT_DEVICE_CUDA, .index = 0}
                           : (fct_device){.type = FCT_DEVICE_CPU, .index = -1};
}

uint64_t sim_random(void) {
    return splitmix64(&random_state);
}

/* ---- log ---- */

void sim_log_clear(void) {
    log_length = 0;
    log_text[0] = '\0';
}

const char *sim_log_text(void) {
    return log_text;
}

void sim_log(const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (log_length > 0 && log_length + 1 < LOG_MAX) {
        log_text[log_length++] = ' ';
    }
    int written = vsnprintf(log_text + log_length, LOG_MAX - log_length, format, args);
    va_end(args);
    if (written < 0 || log_length + (size_t)written >= LOG_MAX) {
        fail_msg("the simulation's log is full");
    }
    log_length += (size_t)written;
}

/* ---- autograd ---- */

void sim_autograd_begin(void) {
    in_backward = false;
    recording = false;
    subscriptions = NULL;
    memset(&at_end, 0, sizeof at_end);
}

void sim_set_in_backward(bool value) {
    in_backward = value;
}

void sim_set_recording(bool value) {
    recording = value;
}

const void *fct_grad_identity(const fct_tensor *t) {
    return sim_grad_peek(t);
}

void *fct_functorch_pause(void) {
    return NULL;
}

void fct_functorch_resume(void *pause) {
    (void)pause;
}

bool fct_grad_enabled(void) {
    return !in_backward || recording;
}

bool fct_in_backward(void) {
    return in_backward;
}

struct fct_grad_subscription {
    fct_tensor *leaf;
    fct_hook hook;
    fct_grad_subscription *next;
};

int fct_autograd_subscribe(fct_tensor *leaf, const fct_hook *hook, fct_grad_subscription **out) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_autograd_subscribe")) {
        return -1;
    }
    fct_grad_subscription *subscription = (fct_grad_subscription *)sim_alloc(sizeof *subscription);
    *subscription = (fct_grad_subscription){.leaf = leaf, .hook = *hook, .next = subscriptions};
    fct_tensor_retain(leaf);
    subscriptions = subscription;
    sim_living.hooks++;
    *out = subscription;
    return 0;
}

void fct_grad_subscription_free(fct_grad_subscription *subscription) {
    fct_grad_subscription **link = &subscriptions;
    if (subscription == NULL) {
        return;
    }
    while (*link != subscription) {
        assert_non_null(*link);
        link = &(*link)->next;
    }
    *link = subscription->next;
    fct_tensor_release(subscription->leaf);
    sim_living.hooks--;
    free(subscription);
}

int sim_subscriptions_run(const fct_tensor *leaf) {
    const fct_grad_subscription *found = NULL;
    for (const fct_grad_subscription *s = subscriptions; s != NULL; s = s->next) {
        if (s->leaf == leaf && found != NULL) {
            sim_fail("a leaf has two subscriptions");
        } else if (s->leaf == leaf) {
            found = s;
        }
    }
    return found != NULL ? found->hook.call(found->hook.owner) : 0;
}

int fct_autograd_at_end(const fct_hook *hook) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_autograd_at_end")) {
        return -1;
    }
    if (at_end.call != NULL) {
        sim_fail("two callbacks are registered for the end of one backward");
    }
    at_end = *hook;
    at_end.retain(at_end.owner);
    sim_living.hooks++;
    return 0;
}

void sim_drop_at_end(void) {
    if (at_end.call != NULL) {
        at_end.release(at_end.owner);
        sim_living.hooks--;
        memset(&at_end, 0, sizeof at_end);
    }
}

int sim_run_at_end(void) {
    int result = at_end.call != NULL ? at_end.call(at_end.owner) : 0;
    sim_drop_at_end();
    return result;
}

/* ---- profiler ---- */

bool fct_profile_active(void) {
    return sim_now.profile;
}

/* The token of a range is its address in this array, so that ranges closed in the wrong order are
 * detected. */
static char range_places[RANGES_MAX];

void *fct_profile_enter(const char *name) {
    if (!sim_now.profile) {
        return NULL;
    }
    if (range_depth == RANGES_MAX) {
        fail_msg("profiler ranges are entered and never left");
    }
    sim_log("<%s>", name);
    return &range_places[range_depth++];
}

void fct_profile_exit(void *token) {
    if (token == NULL) {
        return;
    }
    if (range_depth == 0 || token != &range_places[range_depth - 1]) {
        sim_fail("a profiler range is left that is not the innermost");
        return;
    }
    range_depth--;
}
