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

struct shm_collective {
    shm_op op; /* must be the first member */
    shm_request request;
    bool cpu_bound;
    /* All-gather and reduce-scatter. */
    shm_segment *segments;
    /* Bytes of each rank shard that one message carries. The last message may carry fewer. */
    size_t part_bytes;
    /* All-reduce. */
    shm_step *steps;
    bool sums_whole; /* each rank sums the whole tensor */
};

#endif
