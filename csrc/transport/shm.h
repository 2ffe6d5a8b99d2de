/* The transport over the shared memory of one host. */
#ifndef FSDP_C_TRANSPORT_SHM_H
#define FSDP_C_TRANSPORT_SHM_H

#include "table.h"

extern const fct_transport fct_shm_transport;

#endif
