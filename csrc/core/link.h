/* A process group that a parameter group talks to, and the collectives over it: issued and waited
 * for in the parameter group's name (`whose`), so that a failure of the backend (a peer that died,
 * a time-out) says which group, operation and rank it met. Knows nothing of parameters. */
#ifndef FSDP_C_CORE_LINK_H
#define FSDP_C_CORE_LINK_H

#include "../torch/torch_abi.h"
#include "status.h"

typedef struct fc_link {
    const char *name; /* of the process group; borrowed; NULL: there is none */
    fct_pg *pg;       /* counted; resolved at first use */
    int64_t world;
    int64_t rank;
} fc_link;

typedef enum fc_operation { FC_ALL_GATHER, FC_REDUCE_SCATTER, FC_ALL_REDUCE } fc_operation;

/* Points a link elsewhere (name borrowed, NULL: nowhere). */
void fc_link_set(fc_link *link, const char *name, int64_t world, int64_t rank);
/* Releases the process group; the link leads nowhere then. */
void fc_link_fini(fc_link *link);
/* Resolves the process group where that has not been done. */
FC_CHECK fc_status fc_link_open(fc_link *link);
/* Says that so many of its collectives more than there are parameter groups may be in flight. */
FC_CHECK fc_status fc_link_announce(const fc_link *link, size_t more);

/* Each issues one collective, over a link that is opened where it is not; see torch_abi.h for
 * tensors and *work. `whose`: names of the modules, "" or NULL for the root. */
FC_CHECK fc_status fc_link_all_gather(fc_link *link, const char *whose, fct_tensor *output,
                                      fct_tensor *input, bool async_op, fct_work **work);
FC_CHECK fc_status fc_link_reduce_scatter(fc_link *link, const char *whose, fct_tensor *output,
                                          fct_tensor *input, fct_reduce_op op, double factor,
                                          bool async_op, fct_work **work);
FC_CHECK fc_status fc_link_all_reduce(fc_link *link, const char *whose, fct_tensor *tensor,
                                      fct_reduce_op op, bool async_op, fct_work **work);
/* Whether processors that compute would copy the rows of such a gather, see torch_abi.h. Opens the
 * link, if that can be done. */
bool fc_link_is_copied(fc_link *link, int64_t row_bytes);
/* The first two over separate chunks, see torch_abi.h, where *takes. Opens the link. */
FC_CHECK fc_status fc_link_takes_chunks(fc_link *link, fct_device device, fc_operation operation,
                                        bool *takes);
FC_CHECK fc_status fc_link_gather_chunks(fc_link *link, const char *whose,
                                         fct_tensor *const *chunks, size_t count,
                                         const fct_chunk_layout *layout, fct_work **work);
FC_CHECK fc_status fc_link_reduce_chunks(fc_link *link, const char *whose, fct_tensor *output,
                                         fct_tensor *const *chunks, size_t count,
                                         const fct_chunk_layout *layout, fct_reduce_op op,
                                         fct_work **work);
/* Waits for *work, then releases it and makes it NULL; nothing where it is NULL. After a failure
 * the work is still there. */
FC_CHECK fc_status fc_link_wait(const fc_link *link, const char *whose, fc_operation operation,
                                fct_work **work);

#endif
