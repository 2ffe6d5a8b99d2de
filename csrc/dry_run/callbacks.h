/* The callbacks of the core into the dry run. The owner of a parameter is its fcd_param, and the
 * owner of a group its fcd_unit. */
#ifndef FSDP_C_DRY_RUN_CALLBACKS_H
#define FSDP_C_DRY_RUN_CALLBACKS_H

#include "../core/callbacks.h"

extern const fc_callbacks fcd_callbacks;

#endif
