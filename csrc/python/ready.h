/* Whether an object may be used, and what it raises. */
#ifndef FSDP_C_PYTHON_READY_H
#define FSDP_C_PYTHON_READY_H

#include "objects.h"

/* Whether the group was initialised; false with RuntimeError. */
bool fcpy_group_ready(const fcpy_group *self);
int fcpy_group_raise(const fcpy_group *self, fc_status status); /* -1 */
/* Whether the context is for the group's kind of device; -1 with ValueError. */
int fcpy_group_check_device(const fc_comm *comm, fct_device device);
/* Whether the state has its contexts (never initialised ones and collected ones do not); false with
 * RuntimeError. */
bool fcpy_state_ready(const fcpy_state *self);
int fcpy_state_raise(const fcpy_state *self, fc_status status); /* -1 */

#endif
