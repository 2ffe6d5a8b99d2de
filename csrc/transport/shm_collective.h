/* Collectives over shared memory: all-gather, reduce-scatter and all-reduce of memory that the
 * caller describes by addresses. The bytes of a rank shard travel in shard order. */
#ifndef FSDP_C_TRANSPORT_SHM_COLLECTIVE_H
#define FSDP_C_TRANSPORT_SHM_COLLECTIVE_H

#include "op_tag.h"
#include "shm_transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Consecutive bytes of a rank shard, and their place in this rank's memory. A rank shard is the
 * elements that belong to one rank. */
typedef struct shm_segment {
    char *data;    /* of rank 0's shard */
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

typedef struct shm_collective shm_collective;

/* Whether the elements of a dtype can be summed in the order of gloo's ring. Required for
 * reduce-scatters and all-reduces. */
bool shm_can_sum(int32_t dtype);
/* Returns a new collective, or NULL if there is no memory. Copies the segments. */
shm_collective *shm_collective_new(const shm_request *request);
/* Only before its submission or after its completion. NULL is allowed. */
void shm_collective_free(shm_collective *c);
/* Frees the list of segments after completion, so that no address is kept. */
void shm_collective_drop_segments(shm_collective *c);
/* Submits the collective; see shm_transport_submit. */
shm_submit_result shm_collective_start(shm_collective *c, shm_transport *t, shm_owner owner,
                                       char error[SHM_ERROR_BYTES]);
/* See shm_transport_wait. */
int shm_collective_wait(shm_collective *c, shm_transport *t, int64_t most_ms,
                        char error[SHM_ERROR_BYTES]);
/* The value of shm_transport_is_cpu_bound at the start. */
bool shm_collective_is_cpu_bound(const shm_collective *c);

#ifdef __cplusplus
}
#endif

#endif
