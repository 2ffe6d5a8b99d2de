/* A message ring in shared memory, for the ranks of one host. Each rank owns one ring. The owner
 * commits messages to it, and all peers read them.
 *
 * A message is addressed to all peers. Peers read messages in the order of the commits, and release
 * one message of each peer at a time. The memory of a message is reused after all peers released
 * it. A ring is full only while some peer is behind its owner. So a rank that waits for free memory
 * must keep reading, or two ranks that wait for each other deadlock.
 *
 * The memory is an anonymous file (memfd), which the kernel frees with its last user. Peers open
 * the file by pid and descriptor (shm_ring_handle), and compare a random token. The owner holds a
 * lock on its file. The kernel drops the lock when the process ends, so peers can test whether the
 * owner lives.
 *
 * A shm_ring contains the rank's own memory and the mappings of the peers' memory. One thread at a
 * time may use it. At the same time any number of threads may call shm_ring_seq and shm_ring_wait.
 * Peer memory is untrusted: offsets and lengths are validated before use.
 *
 * Precondition of all functions below shm_ring_connect, except for mark_closed and destroy:
 * shm_ring_connect has succeeded. The argument `rank` is the rank of a peer. */
#ifndef FSDP_C_TRANSPORT_SHM_RING_H
#define FSDP_C_TRANSPORT_SHM_RING_H

#include <stddef.h>
#include <stdint.h>

#include "op_tag.h"

/* The address of a ring, to be sent to peers. pid 0: the rank has no ring. */
typedef struct shm_ring_handle {
    int64_t pid;
    int64_t fd;
    int64_t token;
} shm_ring_handle;

typedef struct shm_ring shm_ring;

/* A committed message. `data` is valid until shm_ring_release. */
typedef struct shm_ring_message {
    uint32_t tag;
    size_t bytes;
    const char *data;
    const fct_op_label *label; /* memory of the peer, which may change it at any time */
} shm_ring_message;

enum { SHM_RING_MAX_RANKS = 64 };

/* Creates a ring with `capacity` bytes for messages, rounded down to a multiple of 64. Returns NULL
 * if the system does not support or does not grant such memory. */
shm_ring *shm_ring_create(size_t capacity);
shm_ring_handle shm_ring_get_handle(const shm_ring *ring);
/* Maps the rings of all peers. `handles` is in rank order, and includes this rank. Returns 0 if a
 * ring cannot be mapped, has another capacity or belongs to this process. Also returns 0 on a
 * second call, and if `world_size` is not in 2 to SHM_RING_MAX_RANKS or `rank` not below it. After
 * a failure only shm_ring_destroy may be called. */
int shm_ring_connect(shm_ring *ring, int rank, int world_size, const shm_ring_handle *handles);
/* Marks the ring closed: this rank commits no more messages. Wakes waiting peers. No-op in a child
 * of fork(). */
void shm_ring_mark_closed(shm_ring *ring);
/* Marks the ring closed and unmaps all memory. In a child of fork(), unmaps the memory only. NULL
 * is allowed. */
void shm_ring_destroy(shm_ring *ring);

/* Reserves memory for the next message of `bytes` bytes, at most the capacity. Returns NULL if the
 * slowest peer has not released enough. A second call before shm_ring_commit replaces the
 * reservation. */
char *shm_ring_reserve(shm_ring *ring, size_t bytes);
/* Publishes the reserved message with a tag and a label, and wakes waiting peers. `label` is
 * copied; NULL: unknown. */
void shm_ring_commit(shm_ring *ring, uint32_t tag, const fct_op_label *label);

typedef enum shm_ring_peek_result {
    SHM_RING_EMPTY = 0, /* the next message is not committed yet */
    SHM_RING_READY,     /* the next message is committed */
    SHM_RING_CLOSED,    /* all messages are read, and the owner has marked its ring closed */
    SHM_RING_CORRUPT,   /* a header or a counter is out of range */
} shm_ring_peek_result;

/* Reads the header of the first unreleased message of `rank`. Validates each field against the
 * capacity. Writes *message only for SHM_RING_READY. */
shm_ring_peek_result shm_ring_peek(shm_ring *ring, int rank, shm_ring_message *message);
/* Releases the memory of one message of each peer. The caller has peeked these messages. */
void shm_ring_release(shm_ring *ring);

/* Returns the peer with the most unreleased messages of this rank, or -1 if all are released. */
int shm_ring_slowest_reader(const shm_ring *ring);
/* Whether a peer has marked its ring closed or its process has ended. Makes a system call, unlike
 * shm_ring_peek, which detects only the mark. */
int shm_ring_peer_has_ended(const shm_ring *ring, int rank);

/* A sequence number that changes when a peer commits, releases or marks its ring closed. */
uint32_t shm_ring_seq(const shm_ring *ring);
/* Blocks until shm_ring_seq differs from `seen_seq`, for at most `ms` milliseconds. May return
 * early. */
void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms);

#endif
