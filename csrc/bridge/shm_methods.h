/* The interface of the shared-memory backend (shm_backend.cpp) to csrc/transport, which implements
 * it. The backend owns tensors and works. csrc/transport owns the negotiation between the ranks,
 * and moves the data. */
#ifndef FSDP_C_BRIDGE_SHM_METHODS_H
#define FSDP_C_BRIDGE_SHM_METHODS_H

#include "collective.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Objects of csrc/transport. */
typedef struct shm_negotiation shm_negotiation; /* the decision of one process group */
typedef struct shm_transport shm_transport;     /* the operations of one process group */
typedef struct shm_collective shm_collective;   /* one operation */

enum { SHM_ERROR_BYTES = 640 /* size of the buffer for an error message */ };

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
    fct_dtype dtype;
    size_t itemsize;
    int rank, world;
    /* All-gather and reduce-scatter: a rank shard, as segments in order. All-reduce: unused. */
    const shm_segment *segments;
    size_t segment_count;
    size_t bytes;   /* of a rank shard; of the whole tensor for an all-reduce */
    bool checksums; /* of an all-gather: compute a checksum of each segment of each rank */
    /* Reduce-scatter: one contiguous rank shard. All-reduce: the contiguous tensor. */
    char *output;
    int64_t timeout_ms;
    const char *(*dtype_name)(fct_dtype dtype); /* for error messages */
} shm_request;

/* The object that owns an operation, usually a c10d work. Any thread may call the functions. */
typedef struct shm_owner {
    void *object;
    /* Called once, with the mutex of the transport, after all messages are written and read, or
     * with an error message after a failure. `error` is valid during the call; NULL: no failure. */
    void (*complete)(void *object, const char *error);
    /* Called once after complete(), without the mutex. May free the operation. */
    void (*release)(void *object);
} shm_owner;

typedef enum shm_submit_result {
    SHM_SUBMIT_FAILED = -1, /* `error` is written; the caller still owns the operation */
    SHM_SUBMIT_PENDING = 0, /* messages remain: progress() writes them */
    SHM_SUBMIT_WRITTEN = 1, /* all messages are written */
} shm_submit_result;

/* The functions that the backend calls, on any thread, with or without the GIL. The headers
 * negotiation.h, shm_transport.h and shm_collective.h of csrc/transport describe them. */
typedef struct fct_shm_methods {
    void (*retain_negotiation)(shm_negotiation *n);
    void (*release_negotiation)(shm_negotiation *n);
    void (*close_negotiation)(shm_negotiation *n);
    shm_transport *(*active_transport)(shm_negotiation *n);
    void (*release_transport)(shm_transport *t);
    void (*progress)(shm_transport *t);
    bool (*can_sum)(fct_dtype dtype);
    shm_collective *(*new_collective)(const shm_request *request);
    void (*free_collective)(shm_collective *c);
    void (*drop_segments)(shm_collective *c);
    shm_submit_result (*start)(shm_collective *c, shm_transport *t, shm_owner owner,
                               char error[SHM_ERROR_BYTES]);
    int (*wait)(shm_collective *c, shm_transport *t, int64_t max_ms, char error[SHM_ERROR_BYTES]);
    bool (*is_cpu_bound)(const shm_collective *c);
    bool (*rank_checksum)(const shm_collective *c, size_t segment, int64_t rank,
                          uint64_t *checksum);
} fct_shm_methods;

/* Adds the shared-memory backend to the group, under a backend type that the group does not use.
 * The group calls only the backend's setTimeout(), which has no effect, and its shutdown() and
 * abort(), which close the negotiation. Retains the negotiation. `methods` must live as long as the
 * process. Writes false to *added if the CPU backend is not gloo. */
FCT_CHECK int fct_pg_add_shm_backend(fct_pg *pg, const fct_shm_methods *methods,
                                     shm_negotiation *negotiation, bool *added);

#ifdef __cplusplus
}
#endif

#endif
