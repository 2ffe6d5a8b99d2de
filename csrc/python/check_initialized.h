/* Checks whether an object is initialized, and sets the exceptions for uninitialized objects. */
#ifndef FSDP_C_PYTHON_CHECK_INITIALIZED_H
#define FSDP_C_PYTHON_CHECK_INITIALIZED_H

#include "objects.h"

/* Whether the group is initialized. If not, sets RuntimeError. */
bool fcpy_group_check_initialized(const fcpy_group *self);
/* Before lazy init, torch's methods fail on the first attribute that they read. These functions
 * return whether the attribute would exist; if not, they set that AttributeError. Lazy init of the
 * root sets the attributes of the communication context. Lazy init of the group sets those of its
 * parameters; `unshard` runs it, too. */
bool fcpy_group_check_context_attribute(const fcpy_group *self, const char *attribute);
bool fcpy_group_check_param_attribute(const fcpy_group *self, const char *attribute);
/* Returns 0 for FC_OK. Otherwise sets the exception of `status`, with the message of the group's
 * context, and returns -1. If models of two ranks differ, it may wait two seconds for the other
 * rank, and releases the GIL meanwhile. */
int fcpy_group_check_status(const fcpy_group *self, fc_status status);
/* Returns 0 if the context is for the group's type of device, else -1 with ValueError. */
int fcpy_group_check_device(const fc_comm_ctx *comm, fct_device device);
/* Whether the state has its contexts. If not, sets RuntimeError. Uninitialized states have no
 * contexts, and neither have states that the garbage collector has cleared. */
bool fcpy_state_check_initialized(const fcpy_state *self);
/* fcpy_group_check_context_attribute for a state. */
bool fcpy_state_check_context_attribute(const fcpy_state *self, const char *attribute);
/* fcpy_group_check_status for a state. */
int fcpy_state_check_status(const fcpy_state *self, fc_status status);

#endif
