/* Properties of device types, as inline functions in C. csrc/core calls these functions, and
 * compares no device type with a constant. */
#ifndef FSDP_C_BRIDGE_DEVICE_H
#define FSDP_C_BRIDGE_DEVICE_H

#include "types.h"

static inline bool fct_device_is_same_type(fct_device a, fct_device b) {
    return a.type == b.type;
}

/* Returns true if the collectives of the device support ReduceOp.AVG. torch's FSDP2 uses SUM on
 * MTIA. */
static inline bool fct_device_has_average(fct_device device) {
    return device.type != FCT_DEVICE_MTIA;
}

#endif
