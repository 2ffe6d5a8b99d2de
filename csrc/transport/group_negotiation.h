/* Finds the negotiation of a process group about shared memory (negotiation.h). The bridge owns it
 * while the group lives. Precondition: `pg` is not NULL. */
#ifndef FSDP_C_TRANSPORT_GROUP_NEGOTIATION_H
#define FSDP_C_TRANSPORT_GROUP_NEGOTIATION_H

#include "negotiation.h"

/* Both functions return a borrowed reference. If there is no negotiation, find returns NULL and
 * open makes one. open returns NULL with a Python exception on failure. */
shm_negotiation *fct_negotiation_find(fct_pg *pg);
shm_negotiation *fct_negotiation_open(fct_pg *pg);
/* Adds one user of the process group `name`: a parameter group that gathers or all-reduces over it,
 * or a bucket after the first of such a group. The number of users is the upper bound on the
 * collectives that a rank issues before it waits for one. Returns -1 with a Python exception on
 * failure. */
FCT_CHECK int fct_pg_register_user(const char *name);

#endif
