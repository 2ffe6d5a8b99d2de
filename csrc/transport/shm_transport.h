/* The shared-memory transport of one process group: a queue of operations over the rings of all
 * ranks. See README.md for the protocol.
 *
 * Preconditions: the caller of a function owns a reference to the transport. set_oversubscribed,
 * submit, progress and wait require that shm_transport_connect has returned true. */
#ifndef FSDP_C_TRANSPORT_SHM_TRANSPORT_H
#define FSDP_C_TRANSPORT_SHM_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../bridge/shm_methods.h"
#include "shm_ring.h"

enum {
    SHM_MAX_MESSAGE = 1 << 20,          /* bytes of the largest message; equal on all ranks */
    SHM_CAPACITY = 4 * SHM_MAX_MESSAGE, /* bytes of a ring for messages */
};

typedef struct shm_op shm_op;

/* The behavior of an operation: this rank writes op->message_count messages and reads the same
 * number of messages of each peer. Any thread may call the functions, with or without the GIL. The
 * functions cannot fail. */
typedef struct shm_op_methods {
    size_t (*message_bytes)(const shm_op *op, size_t message);
    /* Whether write() can produce a message after `messages_read` messages of each peer were read.
     * Must return true if `messages_read` >= `message`. NULL: always true. */
    bool (*can_write)(const shm_op *op, size_t message, size_t messages_read);
    void (*write)(shm_op *op, size_t message, char *buffer);
    /* `peer_data` has one entry for each rank, valid during the call. This rank's entry is NULL.
     * Called after write() of the same message. */
    void (*read)(shm_op *op, size_t message, const char *const *peer_data);
} shm_op_methods;

/* The first member of a struct that implements an operation. The caller sets the first six fields
 * before shm_transport_submit, and the other fields to zero. The transport sets these. */
struct shm_op {
    const shm_op_methods *methods;
    uint32_t tag; /* different tags on two ranks are a collective mismatch */
    const char *(*dtype_name)(fct_dtype dtype); /* for shm_tag_describe */
    fct_op_label label;                         /* unit 0: unknown */
    size_t message_count;
    int64_t timeout_ms; /* time from the issue after which an incomplete operation fails */
    shm_owner owner;
    int64_t start_ns;     /* 0: not submitted */
    size_t written, read; /* messages */
    int done;             /* set with release order after complete() */
    struct shm_op *next;
};

/* One rank's ring and its operations in order of issue. All users of a process group share the
 * object. Any thread may call the functions. */
typedef struct shm_transport shm_transport;

/* Returns a new transport with one owner, or NULL if the ring cannot be created. */
shm_transport *shm_transport_open(void);
void shm_transport_retain(shm_transport *t);
void shm_transport_release(shm_transport *t); /* NULL is allowed */
shm_ring_handle shm_transport_handle(const shm_transport *t);
/* Maps the peers' rings, once. Returns false if a ring cannot be mapped. */
bool shm_transport_connect(shm_transport *t, int rank, int world, const shm_ring_handle *handles);
/* Records that the ranks have fewer than two CPUs each, so that copies in the background take CPU
 * time from computation. Call it before the first submit. */
void shm_transport_set_oversubscribed(shm_transport *t);
/* Whether a collective that writes `bytes` bytes on this rank would take CPU time from computation:
 * the ranks are oversubscribed, and the ring cannot hold all bytes at once. */
bool shm_transport_is_cpu_bound(const shm_transport *t, size_t bytes);

/* Appends an operation and writes the messages that fit into the ring. On success takes one
 * reference of `owner.object`, which must keep `op` alive until complete(). After the first failure
 * of the transport every submit fails with the same error. */
shm_submit_result shm_transport_submit(shm_transport *t, shm_op *op, shm_owner owner,
                                       char error[SHM_ERROR_BYTES]);
/* Writes and reads messages until nothing more is possible without waiting. */
void shm_transport_progress(shm_transport *t);
/* Blocks until `op` is complete and returns 1. Aborts the transport when the time limit of the
 * operation ends. Returns -1 and writes `error` in a child of fork(), or after `max_ms`
 * milliseconds (0: no limit). After -1 the operation continues. The caller does not hold the GIL.
 */
int shm_transport_wait(shm_transport *t, shm_op *op, int64_t max_ms, char error[SHM_ERROR_BYTES]);
/* Fails all operations and every later submit, and marks the ring closed for peers. */
void shm_transport_abort(shm_transport *t, const char *reason);

#endif
