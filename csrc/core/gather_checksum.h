/* The checksum of one all-gather, for the guard mode "hash". On the host the pack and the copy-out
 * compute it (checksum.h). On devices with streams a kernel reads the gathered rank shards
 * (device_checksums.h). In both cases the checksum also detects a change of this rank's shard since
 * the pack. */
#ifndef FSDP_C_CORE_GATHER_CHECKSUM_H
#define FSDP_C_CORE_GATHER_CHECKSUM_H

#include "checksum.h"
#include "group_base.h"
#include "plan.h"

/* Initialize it with zeros. Precondition of all functions: the pending gather owns the struct, and
 * its group has a comm context. Without the guard mode "hash" no function has an effect. */
typedef struct fc_gather_checksum {
    fc_checksum packed;   /* on the host: of this rank's packed shard */
    fc_checksum owned;    /* on the host: of chunks that become parameters, of all ranks */
    fc_checksum gathered; /* on the host: of all rank shards */
    fc_device_sum sum;    /* on devices with streams */
    bool added;           /* the checksum was passed on; a repeated copy-out adds nothing */
} fc_gather_checksum;

/* Return the checksum to which the pack, or the copy-out, adds; NULL: none. The second function
 * first sets `gathered` to `owned`. */
fc_checksum *fc_gather_checksum_of_pack(fc_gather_checksum *c, const fc_group_base *base);
fc_checksum *fc_gather_checksum_of_copy_out(fc_gather_checksum *c, const fc_group_base *base);
/* Returns whether the transport has to compute the checksums of chunks. */
bool fc_gather_checksum_needs_chunks(const fc_group_base *base);
/* Takes the checksums of the owned chunks from `work`, a completed gather of chunks. */
void fc_gather_checksum_take_owned(fc_gather_checksum *c, const fc_group_base *base,
                                   const fc_gather_plan *plan, int64_t rank, const fct_work *work);
/* On devices with streams: reads this rank's packed shard in the gather buffer, before the
 * all-gather. NULL: no buffer. Runs on the current stream. */
FC_CHECK fc_status fc_gather_checksum_read_packed(fc_gather_checksum *c, const fc_group_base *base,
                                                  const fc_gather_plan *plan, int64_t rank,
                                                  const fct_tensor *buffer);
/* Adds the checksum of the gathered rank shards, after the copy-out. On devices with streams the
 * current stream reads `buffer`, not the unsharded parameters; NULL: unknown. */
FC_CHECK fc_status fc_gather_checksum_add(fc_gather_checksum *c, const fc_group_base *base,
                                          fc_process_group *pg, const fc_gather_plan *plan,
                                          const fct_tensor *buffer);
/* Adds an unknown checksum, which counts as equal to every other checksum. */
void fc_gather_checksum_add_unknown(fc_gather_checksum *c, const fc_group_base *base,
                                    fc_process_group *pg);

#endif
