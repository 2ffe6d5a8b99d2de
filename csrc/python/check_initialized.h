/* Checks whether an object is initialized, and sets the exceptions for uninitialized objects. */
#ifndef FSDP_C_PYTHON_CHECK_INITIALIZED_H
#define FSDP_C_PYTHON_CHECK_INITIALIZED_H

#include "objects.h"

/* Whether the group is initialized. If not, sets RuntimeError. */
bool fcpy_group_check_initialized(const fcpy_group *self);
/* Whether lazy init of the group's communication context is done. The first forward of the root or
 * `CommContext.lazy_init` runs lazy init. Before lazy init, torch's methods fail on the first
 * attribute that they read of the context or of a parameter. If lazy init is not done, sets that
 * AttributeError. */
bool fcpy_group_check_context(const fcpy_group *self, const char *type, const char *attribute);
/* Returns 0 for FC_OK. Otherwise sets the exception of `status`, with the message of the group's
 * context, and returns -1. */
int fcpy_group_check_status(const fcpy_group *self, fc_status status);
/* Returns 0 if the context is for the group's type of device, else -1 with ValueError. */
int fcpy_group_check_device(const fc_comm_ctx *comm, fct_device device);
/* Whether the state has its contexts. If not, sets RuntimeError. Uninitialized states have no
 * contexts, and neither have states that the garbage collector has cleared. */
bool fcpy_state_check_initialized(const fcpy_state *self);
/* fcpy_group_check_context for a state. */
bool fcpy_state_check_context(const fcpy_state *self, const char *attribute);
/* fcpy_group_check_status for a state. */
int fcpy_state_check_status(const fcpy_state *self, fc_status status);

#endif
