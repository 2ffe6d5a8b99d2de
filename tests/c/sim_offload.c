/* Copies between host memory and the memory of a device with streams. Only these operations may use
 * both; any other operation that mixes them is a failure. Copies of pinned memory are asynchronous;
 * the host waits for others. */
#include "sim_internal.h"

int sim_stream_of(const fct_tensor *t) {
    return sim_tensor_is_of_host(t) ? sim_host_stream() : sim_stream_current();
}

fct_tensor *sim_tensor_new_in_host(fct_dtype dtype, int64_t numel, bool pinned,
                                   const double *values) {
    fct_tensor *t = sim_tensor_in_host(dtype, 1, &numel, pinned);
    sim_tensor_write(t, values, "the host's write");
    return t;
}

int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_upload")) {
        return -1;
    }
    fct_facts from;
    fct_facts to;
    fct_tensor_facts(src, &from);
    fct_tensor_facts(dst, &to);
    if (sim_tensor_is_of_host(dst) || to.dtype != from.dtype) {
        sim_fail("an upload to the host's memory, or of another type");
    }
    sim_point end = sim_tensor_cross(dst, src, "an upload");
    if (sim_tensor_is_of_host(src) && !sim_tensor_is_pinned(src)) {
        sim_host_waits(&end);
    }
    return 0;
}

int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_to_host")) {
        return -1;
    }
    const sim_view view = sim_view_of(t, "a copy to the host");
    fct_tensor *made = sim_tensor_in_host(view.dtype, view.ndim, view.sizes, non_blocking);
    sim_point end = sim_tensor_cross(made, t, "a copy to the host");
    if (!non_blocking) {
        sim_host_waits(&end);
    }
    *out = made;
    return 0;
}
