/* Checksums of the data that ranks share after a collective, for the guard mode "hash".
 *
 * The checksum of gathered rank shards is a sum over all slots of all ranks. So it depends neither
 * on the order of the slots nor on the chunks that hold them, which may differ between ranks. Slots
 * are read in pieces that fit in the processor's cache, directly after or before they are copied.
 * The shared-memory transport copies chunks that become parameters, and computes their checksums.
 */
#ifndef FSDP_C_CORE_CHECKSUM_H
#define FSDP_C_CORE_CHECKSUM_H

#include <stdbool.h>

#include "../kernels/kernels.h"
#include "status.h"

/* Checksums of gathered rank shards. Initialize it with zeros. */
typedef struct fc_checksum {
    uint64_t all; /* of the slots that were added, of all ranks */
    uint64_t own; /* of the slots of this rank */
    bool unknown; /* some data could not be read: it counts as equal to every other checksum */
} fc_checksum;

/* The owner of a rank shard. `is_own`: it is this rank. */
typedef struct fc_checksum_shard {
    int64_t rank;
    bool is_own;
} fc_checksum_shard;

/* Packs the segment of a slot with `kernels`, and adds it to `own`; `all` then has no meaning.
 * Precondition: the kernels have a checksum. Returns NULL, or the error message of the kernel. */
const char *fc_checksum_pack(fc_checksum *c, size_t slot, const fck_segment *segment,
                             const fck_backend *kernels);
/* Adds a slot of a rank shard, and copies it to `to` with `kernels`; NULL: no copy. Precondition
 * and result as above. */
const char *fc_checksum_add(fc_checksum *c, size_t slot, fc_checksum_shard shard, const void *data,
                            int64_t bytes, void *to, const fck_backend *kernels);
/* Adds the checksum of a slot of a rank shard: a hash of the checksums of its pieces
 * (FCK_CHECKSUM_PIECE). */
void fc_checksum_add_sum(fc_checksum *c, size_t slot, fc_checksum_shard shard, uint64_t sum);
/* Returns the checksum of gathered rank shards. If this rank's shard has changed since `packed`,
 * the result differs from those of the other ranks. 0: unknown. */
uint64_t fc_checksum_of_shards(const fc_checksum *gathered, const fc_checksum *packed);

#endif
