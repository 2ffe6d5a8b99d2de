/* Shared memory of ranks on one host; see shm_ring.h.
 *
 * A ring is a fd of memory: a page of words and headers, and the capacity for messages. Who sleeps
 * counts itself first and looks for news once more; who makes news looks for sleepers afterwards,
 * and rings: both in one order for all, so that one of the two sees the other. A rank sleeps on a
 * doorbell of its own, for what it waits for may come from anybody.
 *
 * Messages lie in the capacity one after the other, as in a ring, but none is cut in two. When all are
 * read the reserved_offset offsets in front again, where memory is warm. */
#define _GNU_SOURCE 1 /* memfd_create, syscall */
#include "shm_ring.h"

#include <stdlib.h>

#ifdef __linux__

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    CACHE_LINE = 64,
    HEADER_SLOTS = 64, /* a power of two: numbers wrap */
    SPIN_COUNT = 64,   /* looks before a sleep, the processor given away between them */
    DAY_MS = 24 * 3600 * 1000,
};

typedef struct message_header {
    uint32_t tag;
    uint64_t offset; /* in the capacity */
    uint64_t bytes;
} message_header;

/* In the memory that all ranks see. Its owner writes all but the doorbell. */
typedef struct shared_page {
    uint64_t token;
    uint64_t capacity;
    _Alignas(CACHE_LINE) _Atomic uint32_t committed; /* messages so far */
    _Atomic uint32_t released;                       /* of each other rank */
    _Atomic uint32_t closed;
    _Alignas(CACHE_LINE) _Atomic uint32_t sleepers; /* threads */
    _Atomic uint32_t doorbell;                      /* that they sleep on; others ring it */
    _Alignas(CACHE_LINE) message_header headers[HEADER_SLOTS];
} shared_page;

/* One rank's ring, as this pid sees it. */
typedef struct ring_view {
    shared_page *page; /* NULL: not found */
    int fd;
} ring_view;

struct shm_ring {
    size_t capacity;
    int64_t pid; /* that opened it */
    int rank;
    int world_size;
    ring_view own; /* until it has joined; then views[rank] is the same */
    ring_view views[SHM_RING_MAX_RANKS];
    uint32_t read_seq;                        /* messages of each other rank that were read */
    uint64_t offsets[HEADER_SLOTS];           /* where messages of this rank lie in the capacity */
    uint64_t end;                             /* of the last one */
    uint64_t reserved_offset, reserved_bytes; /* what shm_ring_reserve gave */
};

/* ---- files of memory ---- */

static size_t segment_bytes(size_t capacity) {
    return sizeof(shared_page) + capacity;
}

static char *data_of(const ring_view *view) {
    return (char *)(view->page + 1);
}

static shared_page *map_segment(int fd, size_t capacity) {
    void *at = mmap(NULL, segment_bytes(capacity), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : (shared_page *)at;
}

static void unmap_view(ring_view *view, size_t capacity) {
    if (view->page != NULL) {
        (void)munmap(view->page, segment_bytes(capacity));
        (void)close(view->fd);
        view->page = NULL;
    }
}

/* The same fd under a number that no standard stream has, or -1: a program may have closed those,
 * and what it prints would go onto the ring. */
static int move_above_stdio(int fd) {
    if (fd < 0 || fd > STDERR_FILENO) {
        return fd;
    }
    const int beside = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    (void)close(fd);
    return beside;
}

/* The lock of an owner that lives. It belongs to the pid, and no child of fork() has it. */
static struct flock liveness_lock(void) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
}

static uint64_t random_token(void) {
    uint64_t token = 0;
    if (getrandom(&token, sizeof token, GRND_NONBLOCK) != (ssize_t)sizeof token) {
        struct timespec now;
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
        token = (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 16;
    }
    return token >> 1; /* of a number with a sign */
}

/* Whether this pid may make a fd so large. Who tries all the same is sent a signal, which may
 * end it. */
static int fits_file_limit(size_t bytes) {
    struct rlimit most;
    return getrlimit(RLIMIT_FSIZE, &most) != 0 || bytes <= most.rlim_cur;
}

static int create_segment(shm_ring *ring) {
    if (!fits_file_limit(segment_bytes(ring->capacity))) {
        return 0;
    }
    const int fd = move_above_stdio(memfd_create("fsdp_c ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0) {
        return 0;
    }
    struct flock lock = liveness_lock();
    shared_page *made = NULL;
    if (ftruncate(fd, (off_t)segment_bytes(ring->capacity)) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 &&
        fcntl(fd, F_SETLK, &lock) == 0) {
        made = map_segment(fd, ring->capacity);
    }
    if (made == NULL) {
        (void)close(fd);
        return 0;
    }
    made->token = random_token();
    made->capacity = ring->capacity;
    ring->own = (ring_view){made, fd};
    return 1;
}

shm_ring *shm_ring_create(size_t capacity) {
    if (capacity > PTRDIFF_MAX - sizeof(shared_page)) {
        return NULL;
    }
    shm_ring *ring = (shm_ring *)calloc(1, sizeof *ring);
    if (ring == NULL) {
        return NULL;
    }
    ring->capacity = capacity / CACHE_LINE * CACHE_LINE;
    ring->pid = (int64_t)getpid();
    if (ring->capacity == 0 || !create_segment(ring)) {
        free(ring);
        return NULL;
    }
    return ring;
}

shm_ring_handle shm_ring_get_handle(const shm_ring *ring) {
    return (shm_ring_handle){ring->pid, ring->own.fd, (int64_t)ring->own.page->token};
}

static int has_segment_size(const struct stat *facts, size_t capacity) {
    return S_ISREG(facts->st_mode) && facts->st_size == (off_t)segment_bytes(capacity);
}

/* Maps what another pid has open; only a fd of the right size, which stays, that knows the
 * token. Where processes have other numbers there, it may be anything: a device that is opened may
 * do something, and a fd that is closed loses this pid's locks. So it is looked at first. */
static int map_peer(ring_view *found, const shm_ring_handle *offer, size_t capacity) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)offer->pid,
                   (long long)offer->fd);
    struct stat facts;
    if (stat(path, &facts) != 0 || !has_segment_size(&facts, capacity)) {
        return 0;
    }
    const int fd = move_above_stdio(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (fd < 0) {
        return 0;
    }
    const int seals = fcntl(fd, F_GET_SEALS);
    shared_page *at = NULL;
    if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &facts) == 0 &&
        has_segment_size(&facts, capacity)) {
        at = map_segment(fd, capacity);
    }
    if (at == NULL) {
        (void)close(fd);
        return 0;
    }
    *found = (ring_view){at, fd};
    return at->token == (uint64_t)offer->token && at->capacity == capacity;
}

int shm_ring_connect(shm_ring *ring, int rank, int world_size, const shm_ring_handle *offers) {
    if (world_size < 2 || world_size > SHM_RING_MAX_RANKS || rank < 0 || rank >= world_size ||
        ring->world_size != 0) {
        return 0;
    }
    ring->rank = rank;
    ring->world_size = world_size;
    ring->views[rank] = ring->own;
    for (int other = 0; other < world_size; other++) {
        if (other == rank) {
            continue;
        }
        /* Ranks of one pid would share its lock. */
        if (offers[other].pid <= 0 || offers[other].pid == ring->pid ||
            !map_peer(&ring->views[other], &offers[other], ring->capacity)) {
            return 0;
        }
    }
    return 1;
}

/* ---- news ---- */

static void wake_peers(const shm_ring *ring) {
    for (int other = 0; other < ring->world_size; other++) {
        shared_page *theirs = ring->views[other].page;
        if (other != ring->rank && theirs != NULL && atomic_load(&theirs->sleepers) != 0) {
            (void)atomic_fetch_add(&theirs->doorbell, 1);
            (void)syscall(SYS_futex, &theirs->doorbell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
        }
    }
}

void shm_ring_mark_closed(shm_ring *ring) {
    if (ring->pid == (int64_t)getpid()) {
        atomic_store(&ring->own.page->closed, 1);
        wake_peers(ring);
    }
}

void shm_ring_destroy(shm_ring *ring) {
    if (ring == NULL) {
        return;
    }
    shm_ring_mark_closed(ring);
    for (int other = 0; other < ring->world_size; other++) {
        if (other != ring->rank) {
            unmap_view(&ring->views[other], ring->capacity);
        }
    }
    unmap_view(&ring->own, ring->capacity);
    free(ring);
}

int shm_ring_peer_has_ended(const shm_ring *ring, int rank) {
    const ring_view *theirs = &ring->views[rank];
    struct flock lock = liveness_lock();
    return atomic_load(&theirs->page->closed) != 0 ||
           (fcntl(theirs->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
}

/* Words that only grow, added up, so that the sum is another one while not all have wrapped. */
uint32_t shm_ring_seq(const shm_ring *ring) {
    uint32_t news = 0;
    for (int other = 0; other < ring->world_size; other++) {
        shared_page *theirs = ring->views[other].page;
        if (other != ring->rank && theirs != NULL) {
            news += atomic_load(&theirs->committed) + atomic_load(&theirs->released) +
                    atomic_load(&theirs->closed);
        }
    }
    return news;
}

static int64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int spin_for_change(const shm_ring *ring, uint32_t seen_seq) {
    for (int i = 0; i < SPIN_COUNT; i++) {
        if (shm_ring_seq(ring) != seen_seq) {
            return 1;
        }
        (void)sched_yield();
    }
    return 0;
}

static void wait_on_doorbell(shm_ring *ring, uint32_t seen_seq, int64_t until) {
    shared_page *own = ring->own.page;
    (void)atomic_fetch_add(&own->sleepers, 1);
    for (;;) {
        const uint32_t doorbell_value = atomic_load(&own->doorbell);
        const int64_t left = until - now_ns();
        if (left <= 0 || shm_ring_seq(ring) != seen_seq) {
            break;
        }
        const struct timespec time = {.tv_sec = (time_t)(left / 1000000000),
                                      .tv_nsec = (long)(left % 1000000000)};
        (void)syscall(SYS_futex, &own->doorbell, FUTEX_WAIT, doorbell_value, &time, NULL, 0);
    }
    (void)atomic_fetch_sub(&own->sleepers, 1);
}

void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms) {
    const int64_t most = ms < 0 ? 0 : ms < DAY_MS ? ms : DAY_MS;
    if (!spin_for_change(ring, seen_seq)) {
        wait_on_doorbell(ring, seen_seq, now_ns() + most * 1000000);
    }
}

/* ---- posting ---- */

/* How many messages of this rank some other one has yet to read, and, if asked, who. */
static uint32_t count_unread(const shm_ring *ring, int *slowest) {
    const uint32_t committed =
        atomic_load_explicit(&ring->own.page->committed, memory_order_relaxed);
    uint32_t most = 0;
    for (int other = 0; other < ring->world_size; other++) {
        if (other == ring->rank) {
            continue;
        }
        const shared_page *theirs = ring->views[other].page;
        uint32_t left = committed - atomic_load_explicit(&theirs->released, memory_order_acquire);
        left = left > HEADER_SLOTS ? HEADER_SLOTS : left; /* nothing is that late */
        if (left > most) {
            most = left;
            if (slowest != NULL) {
                *slowest = other;
            }
        }
    }
    return most;
}

/* Where so many bytes may go; the capacity's size where they may not. */
static uint64_t find_free(const shm_ring *ring, uint64_t bytes) {
    const uint64_t capacity = ring->capacity, none = capacity;
    const uint32_t waiting = count_unread(ring, NULL);
    if (waiting == 0) {
        return bytes <= capacity ? 0 : none;
    }
    if (waiting >= HEADER_SLOTS) {
        return none;
    }
    const uint32_t committed =
        atomic_load_explicit(&ring->own.page->committed, memory_order_relaxed);
    const uint64_t oldest = ring->offsets[(committed - waiting) % HEADER_SLOTS];
    if (oldest < ring->end) {
        if (bytes <= capacity - ring->end) {
            return ring->end;
        }
        return bytes <= oldest ? 0 : none;
    }
    return bytes <= oldest - ring->end ? ring->end : none;
}

/* What a message takes of the capacity: whole lines, and an empty one a line as well. */
static uint64_t message_footprint(uint64_t bytes) {
    return bytes == 0 ? CACHE_LINE : (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

char *shm_ring_reserve(shm_ring *ring, size_t bytes) {
    const uint64_t at = find_free(ring, message_footprint(bytes));
    if (at == ring->capacity) {
        return NULL;
    }
    ring->reserved_offset = at;
    ring->reserved_bytes = bytes;
    return data_of(&ring->own) + at;
}

void shm_ring_commit(shm_ring *ring, uint32_t tag) {
    shared_page *own = ring->own.page;
    const uint32_t seq = atomic_load_explicit(&own->committed, memory_order_relaxed);
    own->headers[seq % HEADER_SLOTS] =
        (message_header){tag, ring->reserved_offset, ring->reserved_bytes};
    ring->offsets[seq % HEADER_SLOTS] = ring->reserved_offset;
    ring->end = ring->reserved_offset + message_footprint(ring->reserved_bytes);
    atomic_store(&own->committed, seq + 1);
    wake_peers(ring);
}

int shm_ring_slowest_reader(const shm_ring *ring) {
    int slowest = -1;
    (void)count_unread(ring, &slowest);
    return slowest;
}

/* ---- reading ---- */

shm_ring_peek_result shm_ring_peek(shm_ring *ring, int rank, shm_ring_message *message) {
    const ring_view *theirs = &ring->views[rank];
    const uint32_t closed = atomic_load_explicit(&theirs->page->closed, memory_order_acquire);
    const uint32_t committed = atomic_load_explicit(&theirs->page->committed, memory_order_acquire);
    if (committed == ring->read_seq) {
        return closed != 0 ? SHM_RING_CLOSED : SHM_RING_EMPTY;
    }
    /* Read once: what was checked is what is used. */
    const volatile message_header *header = &theirs->page->headers[ring->read_seq % HEADER_SLOTS];
    const message_header got = {header->tag, header->offset, header->bytes};
    if (committed - ring->read_seq > HEADER_SLOTS || got.offset > ring->capacity ||
        got.offset % CACHE_LINE != 0 || got.bytes > ring->capacity - got.offset) {
        return SHM_RING_CORRUPT;
    }
    *message = (shm_ring_message){got.tag, (size_t)got.bytes, data_of(theirs) + got.offset};
    return SHM_RING_READY;
}

void shm_ring_release(shm_ring *ring) {
    shared_page *own = ring->own.page;
    ring->read_seq++;
    atomic_store(&own->released, ring->read_seq);
    wake_peers(ring);
}

#else /* no such memory */

shm_ring *shm_ring_create(size_t capacity) {
    (void)capacity;
    return NULL;
}
shm_ring_handle shm_ring_get_handle(const shm_ring *ring) {
    (void)ring;
    return (shm_ring_handle){0, 0, 0};
}
int shm_ring_connect(shm_ring *ring, int rank, int world_size, const shm_ring_handle *offers) {
    (void)ring, (void)rank, (void)world_size, (void)offers;
    return 0;
}
void shm_ring_mark_closed(shm_ring *ring) {
    (void)ring;
}
void shm_ring_destroy(shm_ring *ring) {
    (void)ring;
}
char *shm_ring_reserve(shm_ring *ring, size_t bytes) {
    (void)ring, (void)bytes;
    return NULL;
}
void shm_ring_commit(shm_ring *ring, uint32_t tag) {
    (void)ring, (void)tag;
}
shm_ring_peek_result shm_ring_peek(shm_ring *ring, int rank, shm_ring_message *message) {
    (void)ring, (void)rank, (void)message;
    return SHM_RING_CLOSED;
}
void shm_ring_release(shm_ring *ring) {
    (void)ring;
}
int shm_ring_slowest_reader(const shm_ring *ring) {
    (void)ring;
    return -1;
}
int shm_ring_peer_has_ended(const shm_ring *ring, int rank) {
    (void)ring, (void)rank;
    return 1;
}
uint32_t shm_ring_seq(const shm_ring *ring) {
    (void)ring;
    return 0;
}
void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms) {
    (void)ring, (void)seen_seq, (void)ms;
}

#endif
