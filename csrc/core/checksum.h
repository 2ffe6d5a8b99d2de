/* Checksums of the data that ranks share after a collective, for the guard mode "hash". All
 * functions return at once unless `checksums` of the comm context is set. Precondition: the group
 * has a comm context.
 *
 * Checksums are those of host memory. Tensors of other devices, and fake tensors, have checksum 0,
 * which is equal to all. */
#ifndef FSDP_C_CORE_CHECKSUM_H
#define FSDP_C_CORE_CHECKSUM_H

#include "chunks.h"
#include "group_base.h"

/* Writes the checksum of this rank's packed shards, before the all-gather. */
FC_CHECK fc_status fc_checksum_pack(const fc_group_base *base, const fc_process_group *pg,
                                    const fc_chunks *chunks, uint64_t *packed);
/* Adds the checksum of the gathered data to those that the ranks of `pg` compare. `packed`: result
 * of fc_checksum_pack. If this rank's shards have changed since, the checksum differs from those of
 * the other ranks. `chunks` NULL: unknown data. */
FC_CHECK fc_status fc_checksum_add_gather(const fc_group_base *base, fc_process_group *pg,
                                          const fc_chunks *chunks, uint64_t packed);
/* Adds the checksum of an all-reduced row. NULL: unknown data. */
FC_CHECK fc_status fc_checksum_add_all_reduce(fc_group_base *base, const fct_tensor *row);

#endif
