/* The callbacks of the core in a dry run. fc_param.owner is the fcd_param, and fc_group_base.owner
 * is the fcd_unit. */
#ifndef FSDP_C_DRY_RUN_CALLBACKS_H
#define FSDP_C_DRY_RUN_CALLBACKS_H

#include "../core/callbacks.h"

extern const fc_callbacks fcd_callbacks;

#endif
