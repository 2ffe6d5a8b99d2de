/* The model of a dry run: states, units and parameters, which embed the structs of csrc/core.
 * Precondition of all functions: fcd_record_init() has installed a record in this thread. */
#ifndef FSDP_C_DRY_RUN_MODEL_H
#define FSDP_C_DRY_RUN_MODEL_H

#include "../core/state.h"
#include "boundary.h"
#include "unit.h"

typedef struct fcd_root {
    fc_iteration iteration;
    fc_comm_ctx comm;
} fcd_root;

typedef struct fcd_model {
    const fcd_description *description;
    fcd_unit *units;         /* [unit_count] owned */
    fc_state *states;        /* [state_count] owned */
    fcd_root *roots;         /* [state_count] owned; only the entries of root states are used */
    size_t unit_count;       /* number of initialized units */
    bool states_initialized; /* roots and states are initialized */
    /* [storage_count] storages of tensors that the model allocates, such as activations. NULL: not
     * allocated. */
    fcd_storage **storages;
    size_t storage_count;
    fc_error error;
} fcd_model;

/* Creates the model and allocates the shards. The record counts their bytes with the purpose
 * FCD_SHARDS, or FCD_HOST if a device with streams offloads them. Borrows the description, which
 * must have passed fcd_description_check. `storages` is storage_count. On failure m->error has a
 * message. Call fcd_model_fini in any case. */
FC_CHECK fc_status fcd_model_init(fcd_model *m, const fcd_description *description,
                                  size_t storages);
/* Releases everything. Safe on a zeroed struct. */
void fcd_model_fini(fcd_model *m);
#endif
