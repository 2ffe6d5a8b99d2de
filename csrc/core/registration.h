/* Registration of a group's parameters on the modules. A swap registers the parameter objects of
 * one sharded state on all modules that hold a parameter. A failed swap to another state than the
 * group's restores the parameter objects of the group's state. */
#ifndef FSDP_C_CORE_REGISTRATION_H
#define FSDP_C_CORE_REGISTRATION_H

#include "group_base.h"

/* Registers the parameters of `state` on all modules. On failure the swap restores the parameters
 * of `own`, the group's sharded state, even after an earlier incomplete swap. If `own` equals
 * `state` (a repair), a failed swap restores nothing.
 *
 * *dirty: modules may hold parameters of another state than the group's. A failed swap without a
 * complete restore sets *dirty. A successful swap or restore clears *dirty. Returns FC_ERAISED on
 * failure. Precondition: both states are valid. */
FC_CHECK fc_status fc_registration_swap(fc_group_base *base, fc_sharded_state own,
                                        fc_sharded_state state, bool *dirty);

/* Returns FC_ESTATE with a message if the registered state of a parameter is not `state`. */
FC_CHECK fc_status fc_registration_check(const fc_group_base *base, fc_sharded_state state);

#endif
