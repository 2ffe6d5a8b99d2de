/* The model of a dry run: states, units and parameters on the core. All functions need a record of
 * this thread (record.h). */
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
    fcd_unit *units;   /* [unit_count] owned */
    fc_state *states;  /* [state_count] owned */
    fcd_root *roots;   /* [state_count] owned; entries of other states than roots are not used */
    size_t unit_count; /* number of initialized units */
    bool states_initialized; /* roots and states are initialized */
    fcd_storage **storages;  /* [storage_count] of the model's own tensors; NULL: not allocated */
    size_t storage_count;
    fc_error error;
} fcd_model;

/* Creates the model on the core and allocates the shards. They are counted as FCD_SHARDS, or as
 * FCD_HOST if they are offloaded from a device with streams. Borrows the description, which must
 * have passed fcd_description_check. `storages` is the number of the model's own storages. On
 * failure m->error has a message. Call fcd_model_fini in any case. */
FC_CHECK fc_status fcd_model_init(fcd_model *m, const fcd_description *description,
                                  size_t storages);
/* Releases everything. Safe on a zeroed struct. */
void fcd_model_fini(fcd_model *m);
#endif
