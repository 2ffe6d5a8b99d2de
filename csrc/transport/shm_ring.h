/* Shared memory of ranks on one host. Each rank has a ring of its own, on which it posts messages;
 * all others read them, and nobody else writes there.
 *
 * A message is for all other ranks, and they read messages in the order in which they were committed,
 * one of each rank at a time. Its memory is used again when all have read it. So a ring is full
 * only while others have not come as far as its owner, and whoever waits for capacity has to go on
 * reading, or two that wait for one another's would wait for ever.
 *
 * The memory has no name in any fd system, and goes with its last user, however that ends. The
 * others map_peer it by the pid and the number of a fd that it has open (`shm_ring_handle`); a token
 * says that they found the right one. While a rank lives it holds a lock on its fd, which the
 * system lets go with the pid: that is how the others know.
 *
 * An shm_ring is one rank's end: of its own memory and its maps of the others'. One thread at a
 * time uses it; but any may sleep (shm_ring_wait, with shm_ring_seq) beside that one. What the others write
 * is not believed: places and lengths are checked before they are used. */
#ifndef FSDP_C_TRANSPORT_SHM_RING_H
#define FSDP_C_TRANSPORT_SHM_RING_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where the others map_peer a ring: numbers, to be sent to them. A pid of 0: there is none. */
typedef struct shm_ring_handle {
    int64_t pid;
    int64_t fd;
    int64_t token;
} shm_ring_handle;

typedef struct shm_ring shm_ring;

/* What one rank has committed: `bytes` of them, at `data` until shm_ring_release. */
typedef struct shm_ring_message {
    uint32_t tag;
    size_t bytes;
    const char *data;
} shm_ring_message;

enum { SHM_RING_MAX_RANKS = 64 }; /* at most */

/* A ring of this pid, not yet seen_seq to others, with `capacity` bytes for messages, or somewhat
 * fewer where that is no multiple of 64. NULL: the system has no such memory, or has none left. */
shm_ring *shm_ring_create(size_t capacity);
shm_ring_handle shm_ring_get_handle(const shm_ring *ring);
/* Finds the boards of all ranks, by offers in their order; this one's own is at `rank`. 0: some
 * could not be found, or have another capacity; the ring can only be closed then. */
int shm_ring_connect(shm_ring *ring, int rank, int world_size, const shm_ring_handle *offers);
/* Says to the others that no more will come. */
void shm_ring_mark_closed(shm_ring *ring);
/* That, and lets all memory go. A child of fork() that closes what its parent opened says nothing.
 * NULL is fine. */
void shm_ring_destroy(shm_ring *ring);

/* Memory for this rank's reserved_offset message; NULL while others have too much to read yet. `bytes` is at
 * most the capacity. A second call before shm_ring_commit gives it anew. */
char *shm_ring_reserve(shm_ring *ring, size_t bytes);
/* The memory that shm_ring_reserve gave is a message now, of a tag that its readers know. */
void shm_ring_commit(shm_ring *ring, uint32_t tag);

typedef enum shm_ring_peek_result {
    SHM_RING_EMPTY = 0, /* not yet */
    SHM_RING_READY,     /* committed */
    SHM_RING_CLOSED,    /* nothing will come: the rank has closed its ring, or its pid has ended */
    SHM_RING_CORRUPT,   /* it says what cannot be */
} shm_ring_peek_result;

/* The reserved_offset message of `rank`, which this one has not read. */
shm_ring_peek_result shm_ring_peek(shm_ring *ring, int rank, shm_ring_message *message);
/* The reserved_offset message of all other ranks was read, and its memory is theirs again. */
void shm_ring_release(shm_ring *ring);

/* Of some rank that keeps others from posting more: it has not read for longest. -1: there is capacity
 * for something. */
int shm_ring_slowest_reader(const shm_ring *ring);
/* Whether a rank has closed its ring or its pid has ended. A system call; shm_ring_peek only knows
 * of the first. */
int shm_ring_peer_has_ended(const shm_ring *ring, int rank);

/* A number that is another one when some rank has committed or read something. */
uint32_t shm_ring_seq(const shm_ring *ring);
/* Waits until there are news since `seen_seq`, or some ring is closed, for `ms` milliseconds at most;
 * it may come back early. */
void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms);

#ifdef __cplusplus
}
#endif

#endif
