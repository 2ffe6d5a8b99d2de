/* The transport of torch's process group: the backend of the group moves the data. */
#ifndef FSDP_C_TRANSPORT_PG_H
#define FSDP_C_TRANSPORT_PG_H

#include "table.h"

extern const fct_transport fct_pg_transport;

#endif
