/* The state of a collective over shared memory, for the files that implement collectives. */
#ifndef FSDP_C_TRANSPORT_SHM_COLLECTIVE_STATE_H
#define FSDP_C_TRANSPORT_SHM_COLLECTIVE_STATE_H

#include "shm_transport.h"

/* Elements [begin, end) of the tensor of an all-reduce. */
typedef struct shm_range {
    int64_t begin, end;
} shm_range;

/* A message of an all-reduce: the elements of a part, or the sums of this rank's share of a
 * part. */
typedef struct shm_step {
    bool is_sum;
    shm_range part;
    /* Number of messages of this collective that this rank must have read before it writes this
     * message. */
    size_t after;
} shm_step;

/* The checksum of the bytes of one rank's segment that were copied so far. A piece
 * (FCK_CHECKSUM_PIECE) is added when its last byte is copied. */
typedef struct shm_rank_checksum {
    uint64_t hash; /* of the checksums of the pieces */
    bool complete; /* all pieces of the segment were added */
} shm_rank_checksum;

struct shm_collective {
    shm_op op; /* must be the first member */
    shm_request request;
    bool cpu_bound;
    /* All-gather and reduce-scatter. */
    shm_segment *segments;
    /* Bytes of each rank shard that one message carries. The last message may carry fewer. */
    size_t part_bytes;
    /* [checksum_segments * world] of an all-gather with checksums; NULL: none */
    shm_rank_checksum *checksums;
    size_t checksum_segments; /* request.segment_count; remains when the segments are dropped */
    /* All-reduce. */
    shm_step *steps;
    bool sums_whole; /* each rank sums the whole tensor */
};

#endif
