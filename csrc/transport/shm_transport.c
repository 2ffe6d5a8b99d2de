/* The queue of collectives over rings in shared memory; see shm_transport.h and README.md.
 *
 * shm_transport_submit copies this rank's data into its ring. shm_transport_progress and
 * shm_transport_wait read the peers' rings. An operation that fits into the ring needs no
 * background thread: submit writes all of it. Threads that wait for the transport write the rest of
 * other operations while peers read. The progress thread (progress.h) waits for an operation that
 * submit has not written completely. Messages are written and read in order of issue. The transport
 * makes no system call while no thread waits.
 *
 * A reader compares the tag and the size of each message with its own, and reports a mismatch.
 * After a mismatch, a timeout or the end of a rank, messages cannot be matched any more. All later
 * operations fail on every rank, like operations over gloo's connections. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "shm_transport.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "op_label.h"
#include "shm_tag.h"

enum { SLICE_MS = 100 }; /* the longest sleep before peers are checked */

struct shm_transport {
    atomic_uint owners;
    uint32_t forks;        /* value of the fork counter at construction */
    shm_ring *ring;        /* shm_ring_seq and shm_ring_wait do not need the mutex */
    pthread_mutex_t mutex; /* guards the ring and the fields below */
    int rank, world;
    bool oversubscribed;
    shm_op *first, *last; /* operations in order of issue; NULL: none */
    shm_op *writing;      /* the first operation with unwritten messages; NULL: none */
    bool failed;
    char error[SHM_ERROR_BYTES]; /* of the first failure */
};

/* Number of forks between the first process and this process. A child inherits its parent's
 * objects, but must not use its parent's rings. */
static atomic_uint forks;

static void count_fork(void) {
    atomic_fetch_add(&forks, 1);
}

static void register_fork_counter(void) {
    (void)pthread_atfork(NULL, NULL, &count_fork);
}

static bool is_forked_child(const shm_transport *t) {
    return t->forks != atomic_load(&forks);
}

static int64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- life ---- */

shm_transport *shm_transport_open(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, register_fork_counter);
    shm_transport *t = (shm_transport *)calloc(1, sizeof *t);
    if (t == NULL) {
        return NULL;
    }
    t->ring = shm_ring_create(SHM_CAPACITY);
    if (t->ring == NULL) {
        free(t);
        return NULL;
    }
    atomic_init(&t->owners, 1);
    t->forks = atomic_load(&forks);
    (void)pthread_mutex_init(&t->mutex, NULL);
    return t;
}

void shm_transport_retain(shm_transport *t) {
    assert(atomic_load(&t->owners) > 0);
    (void)atomic_fetch_add(&t->owners, 1);
}

void shm_transport_release(shm_transport *t) {
    assert(t == NULL || atomic_load(&t->owners) > 0);
    if (t == NULL || atomic_fetch_sub(&t->owners, 1) != 1) {
        return;
    }
    shm_ring_destroy(t->ring);
    if (!is_forked_child(t)) { /* a thread of the parent may have held the mutex at the fork */
        (void)pthread_mutex_destroy(&t->mutex);
    }
    free(t);
}

shm_ring_handle shm_transport_handle(const shm_transport *t) {
    return shm_ring_get_handle(t->ring);
}

void shm_transport_set_oversubscribed(shm_transport *t) {
    assert(t->world > 1 && t->first == NULL);
    t->oversubscribed = true;
}

bool shm_transport_is_cpu_bound(const shm_transport *t, size_t bytes) {
    return t->oversubscribed && bytes > SHM_CAPACITY;
}

bool shm_transport_connect(shm_transport *t, int rank, int world, const shm_ring_handle *handles) {
    assert(t->world == 0 && rank >= 0 && rank < world);
    (void)pthread_mutex_lock(&t->mutex);
    t->rank = rank;
    t->world = world;
    const bool connected = shm_ring_connect(t->ring, rank, world, handles) != 0;
    (void)pthread_mutex_unlock(&t->mutex);
    return connected;
}

/* ---- completion ---- */

/* Completes an operation that was removed from the queue. Caller holds `mutex`. */
static void complete(shm_op *op, const char *error) {
    op->owner.complete(op->owner.object, error);
    __atomic_store_n(&op->done, 1, __ATOMIC_RELEASE);
}

/* Releases the owners of completed operations. Owners may need the GIL, so the caller does not hold
 * `mutex`. */
static void release_owners(shm_op *finished) {
    while (finished != NULL) {
        shm_op *next = finished->next;
        finished->owner.release(finished->owner.object); /* may free the operation */
        finished = next;
    }
}

/* Fails all operations. Returns them for release_owners(). Caller holds `mutex`. */
static shm_op *fail_all(shm_transport *t, const char *error) {
    if (!t->failed) {
        t->failed = true;
        (void)snprintf(t->error, sizeof t->error, "%s", error);
    }
    shm_ring_mark_closed(t->ring);
    shm_op *finished = t->first;
    t->first = t->last = t->writing = NULL;
    for (shm_op *op = finished; op != NULL; op = op->next) {
        complete(op, t->error);
    }
    return finished;
}

/* ---- writing ---- */

/* Writes one message. Returns false if all messages are written, if the ring is full, or if peers'
 * messages must be read first. Caller holds `mutex`. */
static bool write_next(shm_transport *t) {
    shm_op *op = t->writing;
    if (op == NULL ||
        (op->methods->can_write != NULL && !op->methods->can_write(op, op->written, op->read))) {
        return false;
    }
    char *buffer = shm_ring_reserve(t->ring, op->methods->message_bytes(op, op->written));
    if (buffer == NULL) {
        return false;
    }
    op->methods->write(op, op->written, buffer);
    shm_ring_commit(t->ring, op->tag, &op->label);
    op->written++;
    if (op->written == op->message_count) {
        t->writing = op->next;
    }
    return true;
}

shm_submit_result shm_transport_submit(shm_transport *t, shm_op *op, shm_owner owner,
                                       char error[SHM_ERROR_BYTES]) {
    assert(t->world > 1 && op->message_count > 0 && op->methods != NULL && op->start_ns == 0);
    if (is_forked_child(t)) {
        (void)snprintf(error, SHM_ERROR_BYTES,
                       "a child of fork() cannot use its parent's process group");
        return SHM_SUBMIT_FAILED;
    }
    (void)pthread_mutex_lock(&t->mutex);
    if (t->failed) {
        (void)snprintf(error, SHM_ERROR_BYTES, "%s", t->error);
        (void)pthread_mutex_unlock(&t->mutex);
        return SHM_SUBMIT_FAILED;
    }
    op->owner = owner;
    op->start_ns = now_ns();
    op->written = op->read = 0;
    op->next = NULL;
    if (t->last != NULL) {
        t->last->next = op;
    } else {
        t->first = op;
    }
    t->last = op;
    if (t->writing == NULL) {
        t->writing = op;
    }
    while (write_next(t)) {
    }
    const bool written = t->writing == NULL;
    (void)pthread_mutex_unlock(&t->mutex);
    return written ? SHM_SUBMIT_WRITTEN : SHM_SUBMIT_PENDING;
}

/* ---- reading ---- */

enum { NO_PEER = -1, FAILED = -2 };

#define REMEDY                                                                                     \
    "The process group cannot be used any more: restart the ranks, or shard the model over a new " \
    "process group"

static void describe_mismatch(const shm_transport *t, const shm_op *op, size_t bytes, int rank,
                              const shm_ring_message *message, char error[SHM_ERROR_BYTES]) {
    char own_text[176], peer_text[176];
    if (!op_label_is_equal(&op->label, message->label)) {
        op_label_describe(&op->label, message->label, shm_tag_kind(op->tag), t->rank, own_text,
                          sizeof own_text);
        op_label_describe(message->label, &op->label, shm_tag_kind(message->tag), rank, peer_text,
                          sizeof peer_text);
        const bool is_first = t->rank < rank;
        (void)snprintf(error, SHM_ERROR_BYTES, "collective mismatch: %s, %s. %s",
                       is_first ? own_text : peer_text, is_first ? peer_text : own_text, REMEDY);
        return;
    }
    shm_tag_describe(op->tag, op->dtype_name, own_text, sizeof own_text);
    shm_tag_describe(message->tag, op->dtype_name, peer_text, sizeof peer_text);
    (void)snprintf(error, SHM_ERROR_BYTES,
                   "collective mismatch: rank %d issued %s (message of %zu bytes), rank %d issued "
                   "%s (message of %zu bytes). %s",
                   t->rank, own_text, bytes, rank, peer_text, message->bytes, REMEDY);
}

/* Returns the first rank after this one whose next message is not committed, or NO_PEER. Writes the
 * peers' data to peer_data if it is not NULL. Returns FAILED and writes `error` if a message is
 * corrupt or belongs to another collective, or if a peer has closed its ring. A peer may have
 * closed its ring after a mismatch, which this rank must report, too. So a mismatch with any peer
 * precedes a closed ring. Caller holds `mutex`. */
static int find_missing_peer(const shm_transport *t, const shm_op *op, const char **peer_data,
                             char error[SHM_ERROR_BYTES]) {
    const size_t bytes = op->methods->message_bytes(op, op->read);
    int missing = NO_PEER;
    for (int distance = 1; distance < t->world; distance++) {
        const int rank = (t->rank + distance) % t->world;
        shm_ring_message message;
        switch (shm_ring_peek(t->ring, rank, &message)) {
        case SHM_RING_EMPTY:
            missing = missing == NO_PEER ? rank : missing;
            continue;
        case SHM_RING_CLOSED:
            (void)snprintf(error, SHM_ERROR_BYTES,
                           "Connection closed by peer: rank %d has closed its process group or "
                           "ended; rank %d waits for its data",
                           rank, t->rank);
            missing = FAILED;
            continue;
        case SHM_RING_CORRUPT:
            (void)snprintf(error, SHM_ERROR_BYTES, "the shared memory of rank %d is corrupt", rank);
            return FAILED;
        case SHM_RING_READY:
            break;
        }
        if (message.tag != op->tag || message.bytes != bytes ||
            !op_label_is_equal(&op->label, message.label)) {
            describe_mismatch(t, op, bytes, rank, &message, error);
            return FAILED;
        }
        if (peer_data != NULL) {
            peer_data[rank] = message.data;
        }
    }
    return missing;
}

/* Reads one message of each peer and completes the first operation if that was its last message.
 * Returns false if there is no operation, or if a message is not committed. Sets *finished to the
 * list of operations that the call completed. Caller holds `mutex`. */
static bool read_next(shm_transport *t, shm_op **finished) {
    shm_op *op = t->first;
    if (op == NULL) {
        return false;
    }
    bool progressed = false;
    if (op->read < op->written) {
        const char *peer_data[SHM_RING_MAX_RANKS] = {NULL};
        char error[SHM_ERROR_BYTES];
        const int missing = find_missing_peer(t, op, peer_data, error);
        if (missing != NO_PEER) {
            if (missing == FAILED) {
                *finished = fail_all(t, error);
            }
            return false;
        }
        op->methods->read(op, op->read, peer_data);
        shm_ring_release(t->ring);
        op->read++;
        progressed = true;
    }
    if (op->read == op->message_count && t->writing != op) {
        t->first = op->next;
        t->last = t->first == NULL ? NULL : t->last;
        op->next = NULL;
        complete(op, NULL);
        *finished = op;
        progressed = true;
    }
    return progressed;
}

/* Writes or reads one message. Returns false if neither is possible now. */
static bool advance(shm_transport *t) {
    if (is_forked_child(t)) {
        return false;
    }
    shm_op *finished = NULL;
    (void)pthread_mutex_lock(&t->mutex);
    const bool progressed = write_next(t) || read_next(t, &finished);
    (void)pthread_mutex_unlock(&t->mutex);
    release_owners(finished);
    return progressed;
}

void shm_transport_progress(shm_transport *t) {
    assert(t->world > 1);
    while (advance(t)) {
    }
}

/* ---- waiting ---- */

static bool is_done(const shm_op *op) {
    return __atomic_load_n(&op->done, __ATOMIC_ACQUIRE) != 0;
}

/* Returns a rank for which the first operation waits, NO_PEER, or FAILED with `error`. Caller holds
 * `mutex`. */
static int find_late_peer(const shm_transport *t, char error[SHM_ERROR_BYTES]) {
    const shm_op *op = t->first;
    if (op == NULL) {
        return NO_PEER;
    }
    return op->read < op->written ? find_missing_peer(t, op, NULL, error)
                                  : shm_ring_slowest_reader(t->ring);
}

/* Fails all operations if the rank for which the first operation waits has ended. */
static void check_peers(shm_transport *t, uint32_t seen_seq) {
    char error[SHM_ERROR_BYTES];
    shm_op *finished = NULL;
    (void)pthread_mutex_lock(&t->mutex);
    const int rank = find_late_peer(t, error);
    if (rank == FAILED) {
        finished = fail_all(t, error);
    } else if (rank >= 0 && shm_ring_peer_has_ended(t->ring, rank) != 0 &&
               /* The peer may have committed its last message before it ended. */
               shm_ring_seq(t->ring) == seen_seq) {
        (void)snprintf(error, sizeof error,
                       "Connection closed by peer: the process of rank %d has ended or closed its "
                       "process group",
                       rank);
        finished = fail_all(t, error);
    }
    (void)pthread_mutex_unlock(&t->mutex);
    release_owners(finished);
}

/* Writes or reads one message. If that is not possible and `op` is not complete, waits for a peer,
 * for at most `max_ms`. */
static void progress_or_wait(shm_transport *t, const shm_op *op, int64_t max_ms) {
    const uint32_t seen_seq = shm_ring_seq(t->ring);
    /* Another thread may complete `op` while this thread waits for the mutex. */
    if (advance(t) || is_done(op)) {
        return;
    }
    shm_ring_wait(t->ring, seen_seq, max_ms);
    if (shm_ring_seq(t->ring) == seen_seq) {
        check_peers(t, seen_seq);
    }
}

/* The time limit of an operation starts at its issue, as in gloo. After `max_ms`, the limit of this
 * call, the operation continues. */
int shm_transport_wait(shm_transport *t, shm_op *op, int64_t max_ms, char error[SHM_ERROR_BYTES]) {
    assert(t->world > 1 && op->start_ns != 0);
    const int64_t begin_ns = now_ns();
    for (;;) {
        shm_transport_progress(t);
        if (is_done(op)) {
            return 1;
        }
        if (is_forked_child(t)) {
            (void)snprintf(error, SHM_ERROR_BYTES,
                           "a child of fork() cannot wait for its parent's collectives");
            return -1;
        }
        const int64_t time_ns = now_ns();
        int64_t remaining_ms = op->timeout_ms - (time_ns - op->start_ns) / 1000000;
        if (remaining_ms <= 0) {
            (void)snprintf(error, SHM_ERROR_BYTES,
                           "Timed out waiting %" PRId64 "ms for the data of other ranks",
                           op->timeout_ms);
            shm_transport_abort(t, error);
            return 1;
        }
        if (max_ms != 0) {
            const int64_t call_ms = max_ms - (time_ns - begin_ns) / 1000000;
            remaining_ms = call_ms < remaining_ms ? call_ms : remaining_ms;
            if (remaining_ms <= 0) {
                (void)snprintf(error, SHM_ERROR_BYTES, "Timed out waiting %" PRId64 "ms", max_ms);
                return -1;
            }
        }
        progress_or_wait(t, op, remaining_ms < SLICE_MS ? remaining_ms : SLICE_MS);
    }
}

void shm_transport_abort(shm_transport *t, const char *reason) {
    assert(reason != NULL && atomic_load(&t->owners) > 0);
    if (is_forked_child(t)) {
        return; /* another thread of the parent may have held the mutex at the fork */
    }
    (void)pthread_mutex_lock(&t->mutex);
    shm_op *finished = fail_all(t, reason);
    (void)pthread_mutex_unlock(&t->mutex);
    release_owners(finished);
}
