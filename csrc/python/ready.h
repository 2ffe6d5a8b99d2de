/* Whether an object may be used, and what it raises. */
#ifndef FSDP_C_PYTHON_READY_H
#define FSDP_C_PYTHON_READY_H

#include "objects.h"

/* Whether the group was initialised; false with RuntimeError. */
bool fcpy_group_ready(const fcpy_group *self);
/* Whether the group's communication context has had its lazy init: by the first forward of the
 * root, or by `CommContext.lazy_init`. Before it, torch's methods fail on the context's first
 * attribute that they read; false with that AttributeError. */
bool fcpy_group_check_context(const fcpy_group *self, const char *attribute);
int fcpy_group_raise(const fcpy_group *self, fc_status status); /* -1 */
/* Whether the context is for the group's kind of device; -1 with ValueError. */
int fcpy_group_check_device(const fc_comm *comm, fct_device device);
/* Whether the state has its contexts (never initialised ones and collected ones do not); false with
 * RuntimeError. */
bool fcpy_state_ready(const fcpy_state *self);
/* The same of a state's context. */
bool fcpy_state_check_context(const fcpy_state *self, const char *attribute);
int fcpy_state_raise(const fcpy_state *self, fc_status status); /* -1 */

#endif
