/* The model of a dry run: states, units and parameters on the core. It needs the record of this
 * thread (record.h). */
#ifndef FSDP_C_DRY_RUN_MODEL_H
#define FSDP_C_DRY_RUN_MODEL_H

#include "../core/state.h"
#include "boundary.h"
#include "unit.h"

typedef struct fcd_root {
    fc_iteration iteration;
    fc_comm_ctx comm;
    size_t end_references; /* references of autograd to the callback for the end of backward */
} fcd_root;

typedef struct fcd_model {
    const fcd_description *description;
    fcd_unit *units;   /* [unit_count] owned */
    fc_state *states;  /* [state_count] owned */
    fcd_root *roots;   /* [state_count] owned; entries of other states than roots are not used */
    size_t unit_count; /* of initialized units */
    bool prepared;     /* roots and states are initialized */
    fcd_storage **storages; /* [storage_count] of the model's own tensors; NULL: not allocated */
    size_t storage_count;
    fc_error error;
} fcd_model;

/* Sets the model up: shards are allocated, in the purpose FCD_SHARDS. Borrows the description,
 * which must be consistent (fcd_description_check). `storages`: the model's own storages have
 * numbers below it. On failure m->error has a message; free the model in any case. */
FC_CHECK fc_status fcd_model_init(fcd_model *m, const fcd_description *description,
                                  size_t storages);
/* Releases everything. Safe on a zeroed struct. */
void fcd_model_fini(fcd_model *m);
#endif
