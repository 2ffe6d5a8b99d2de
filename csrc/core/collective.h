/* A group's collectives: issued and waited for in the group's name, so that a failure of the backend
 * (a peer that died, a time-out) says which group, operation and rank it met. Owns nothing. */
#ifndef FSDP_C_CORE_COLLECTIVE_H
#define FSDP_C_CORE_COLLECTIVE_H

#include "group.h"

typedef enum fc_operation { FC_ALL_GATHER, FC_REDUCE_SCATTER, FC_ALL_REDUCE } fc_operation;

/* Each issues one collective of `g` over `link`, which is opened where it is not; see torch_abi.h
 * for tensors and *work. */
FC_CHECK fc_status fc_collective_gather(const fc_group *g, fc_link *link, fct_tensor *output,
                                        fct_tensor *input, bool async_op, fct_work **work);
FC_CHECK fc_status fc_collective_scatter(const fc_group *g, fc_link *link, fct_tensor *output,
                                         fct_tensor *input, fct_reduce_op op, double factor,
                                         bool async_op, fct_work **work);
FC_CHECK fc_status fc_collective_all_reduce(const fc_group *g, fc_link *link, fct_tensor *tensor,
                                            fct_reduce_op op, bool async_op, fct_work **work);
/* Waits for *work, then releases it and makes it NULL; nothing where it is NULL. After a failure
 * the work is still there. */
FC_CHECK fc_status fc_collective_wait(const fc_group *g, const fc_link *link,
                                      fc_operation operation, fct_work **work);

#endif
