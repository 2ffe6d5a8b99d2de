/* The all-reduce of shm_collective.h. */
#ifndef FSDP_C_TRANSPORT_SHM_ALL_REDUCE_H
#define FSDP_C_TRANSPORT_SHM_ALL_REDUCE_H

#include "shm_collective_state.h"

/* Makes the steps of an all-reduce and sets the methods of its operation. Precondition: the request
 * is an all-reduce, and has no steps. Returns false if there is no memory. */
bool shm_all_reduce_plan(shm_collective *c);

#endif
