/* The number of users of each process group (fct_pg_register_user), until its negotiation starts.
 * The GIL guards the numbers. */
#ifndef FSDP_C_TRANSPORT_GROUP_USERS_H
#define FSDP_C_TRANSPORT_GROUP_USERS_H

#include <stdbool.h>
#include <stdint.h>

/* Adds one user of the process group `name`. Returns false if there is no memory. Precondition:
 * `name` is not NULL. */
bool fct_group_users_add(const char *name);
/* Removes and returns the number of users of a process group. Returns 1 if no user was added. */
int64_t fct_group_users_take(const char *name);

#endif
