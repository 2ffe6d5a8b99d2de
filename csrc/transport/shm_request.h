/* A collective over shared memory: the request of the caller, and its state. */
#ifndef FSDP_C_TRANSPORT_SHM_REQUEST_H
#define FSDP_C_TRANSPORT_SHM_REQUEST_H

#include "op_tag.h"
#include "shm_transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Consecutive bytes of a rank shard, and their place in this rank's memory. A rank shard is the
 * elements that belong to one rank. */
typedef struct shm_segment {
    char *data;    /* address of the bytes of rank 0's shard */
    size_t stride; /* bytes from one rank's data to the next rank's */
    size_t begin;  /* byte offset in a rank shard */
    size_t bytes;
} shm_segment;

/* One collective. The caller keeps all memory valid until the collective is complete. */
typedef struct shm_request {
    fct_op_kind kind;
    int32_t dtype; /* torch's ScalarType number */
    size_t itemsize;
    int rank, world;
    /* All-gather and reduce-scatter: a rank shard, as segments in order. All-reduce: unused. */
    const shm_segment *segments;
    size_t segment_count;
    size_t bytes; /* of a rank shard; of the whole tensor for an all-reduce */
    /* Reduce-scatter: one contiguous rank shard. All-reduce: the contiguous tensor. */
    char *output;
    int64_t timeout_ms;
    const char *(*dtype_name)(int32_t dtype); /* for error messages */
} shm_request;

/* Elements [begin, end) of the tensor of an all-reduce. */
typedef struct shm_range {
    int64_t begin, end;
} shm_range;

/* A message of an all-reduce: the values of a part, or this rank's sums of a part. */
typedef struct shm_step {
    bool is_sum;
    shm_range part;
    size_t after; /* messages that must be read before this message can be written */
} shm_step;

/* The state of a collective. shm_collective.c and shm_all_reduce.c use the fields. */
typedef struct shm_collective {
    shm_op op; /* must be the first member */
    shm_request request;
    bool cpu_bound;
    /* All-gather and reduce-scatter. */
    shm_segment *segments;
    size_t part_bytes; /* of one rank shard, in one message */
    /* All-reduce. */
    shm_step *steps;
    bool sums_whole; /* each rank sums the whole tensor */
} shm_collective;

#ifdef __cplusplus
}
#endif

#endif
