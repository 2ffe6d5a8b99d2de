/* Capabilities of this process; see capabilities.h. */
#define _GNU_SOURCE 1 /* sched_getaffinity */
#include "capabilities.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/group.h"

static bool is_set(const char *variable) {
    const char *value = getenv(variable);
    return value != NULL && value[0] != '\0' && strcmp(value, "0") != 0;
}

bool fct_requests_flight_recorder(void) {
    return is_set("TORCH_FR_BUFFER_SIZE") || is_set("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

bool fct_accepts_shared_memory(void) {
    const char *choice = getenv("FSDP_C_TRANSPORT");
    return (choice == NULL || strcmp(choice, "gloo") != 0) && !fct_c10d_is_debugged() &&
           !fct_requests_flight_recorder();
}

int fct_available_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return CPU_COUNT(&set);
    }
    return 1;
}
