/* The struct of shm_collective, for shm_collective.c and shm_all_reduce.c. */
#ifndef FSDP_C_TRANSPORT_SHM_COLLECTIVE_IMPL_H
#define FSDP_C_TRANSPORT_SHM_COLLECTIVE_IMPL_H

#include "shm_collective.h"

/* Elements [begin, end) of the tensor of an all-reduce. */
typedef struct shm_range {
    int64_t begin, end;
} shm_range;

/* A message of an all-reduce: the values of a part, or this rank's sums of a part. */
typedef struct shm_step {
    bool is_sum;
    shm_range part;
    size_t after; /* messages that must be read before it can be written */
} shm_step;

struct shm_collective {
    shm_op op; /* must be the first member */
    shm_request request;
    bool cpu_bound;
    /* All-gather and reduce-scatter. */
    shm_segment *segments;
    size_t part_bytes; /* of one rank shard, in one message */
    /* All-reduce. */
    shm_step *steps;
    bool sums_whole; /* each rank sums the whole tensor */
};

/* The methods of an all-reduce. */
extern const shm_op_methods shm_all_reduce_methods;
/* Makes the steps of an all-reduce. Returns false if there is no memory. */
bool shm_all_reduce_plan(shm_collective *c);
/* Writes the operation, dtype and size of a tag to `text`. */
void shm_describe_tag(const shm_op *op, uint32_t tag, char *text, size_t bytes);

#endif
