/* The negotiation of a process group; see group_negotiation.h. */
#include "group_negotiation.h"

#include <assert.h>

#include "../bridge/error.h"
#include "group_users.h"

static void release_negotiation(void *negotiation) {
    shm_negotiation_release((shm_negotiation *)negotiation);
}

shm_negotiation *fct_negotiation_find(fct_pg *pg) {
    assert(pg != NULL);
    return (shm_negotiation *)fct_pg_attachment(pg);
}

shm_negotiation *fct_negotiation_open(fct_pg *pg) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n == NULL) {
        n = shm_negotiation_new();
        if (n == NULL) {
            fct_error_no_memory();
        } else {
            fct_pg_attach(pg, n, release_negotiation);
        }
    }
    return n;
}

int fct_pg_register_user(const char *name) {
    if (fct_fault("fct_pg_register_user") != 0) {
        return -1;
    }
    if (!fct_group_users_add(name)) {
        fct_error_no_memory();
        return -1;
    }
    return 0;
}
