/* CUPTI without activities. torch's profiler then records the host's work only, as on a machine
 * that does not permit CUPTI. */
#include <cupti.h>

extern "C" {

CUptiResult cuptiGetResultString(CUptiResult, const char **text) {
    *text = "not simulated";
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetTimestamp(uint64_t *timestamp) {
    *timestamp = 0;
    return CUPTI_SUCCESS;
}
}
