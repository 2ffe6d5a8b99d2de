/* A message ring in shared memory; see shm_ring.h.
 *
 * A segment is a memfd: a shared_page with counters and message headers, then the message data. A
 * waiter increments `sleepers`, then checks shm_ring_seq again. A writer publishes, then checks
 * `sleepers` and rings the doorbell. All four accesses are seq_cst, so no wake-up is lost. Each
 * rank waits on its own doorbell, because a message of any peer may end the wait.
 *
 * Messages are contiguous: the ring skips the free space behind the last message if the next
 * message does not fit. When all messages are released, the next message starts at offset 0,
 * because that memory is in the cache. */
#define _GNU_SOURCE 1 /* memfd_create, syscall */
#include "shm_ring.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
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
    HEADER_SLOTS = 64, /* a power of two, because sequence numbers wrap */
    SPIN_COUNT = 64,   /* checks before a futex wait, with a sched_yield after each */
    DAY_MS = 24 * 3600 * 1000,
};

typedef struct message_header {
    uint32_t tag;
    uint64_t offset; /* into the message data */
    uint64_t bytes;
    fct_op_label label;
} message_header;

/* The first part of a segment. Only the owner writes it, except `doorbell`. */
typedef struct shared_page {
    uint64_t token;
    uint64_t capacity;
    _Alignas(CACHE_LINE) _Atomic uint32_t committed; /* messages of the owner */
    _Atomic uint32_t released;                       /* messages of each peer */
    _Atomic uint32_t closed;
    _Alignas(CACHE_LINE) _Atomic uint32_t sleepers; /* waiting threads of the owner */
    _Atomic uint32_t doorbell;                      /* their futex; peers increment it */
    _Alignas(CACHE_LINE) message_header headers[HEADER_SLOTS];
} shared_page;

/* A mapping of one rank's segment in this process. */
typedef struct ring_view {
    shared_page *page; /* NULL: not mapped */
    int fd;
} ring_view;

struct shm_ring {
    size_t capacity;
    int64_t pid; /* of the process that created the ring */
    int rank;
    int world_size;
    ring_view own; /* equal to views[rank] after shm_ring_connect */
    ring_view views[SHM_RING_MAX_RANKS];
    uint32_t read_seq;              /* released messages of each peer */
    uint64_t offsets[HEADER_SLOTS]; /* of this rank's last messages, in the message data */
    uint64_t end;                   /* end offset of the last message */
    uint64_t reserved_offset, reserved_bytes; /* by shm_ring_reserve */
};

/* ---- segments ---- */

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

/* Duplicates a descriptor that has the number of a standard stream to a higher number. Closes `fd`.
 * Returns -1 on failure. A program that closed its standard streams would print into the segment.
 */
static int move_above_stdio(int fd) {
    if (fd < 0 || fd > STDERR_FILENO) {
        return fd;
    }
    const int new_fd = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    (void)close(fd);
    return new_fd;
}

/* The lock that a live owner holds. The lock belongs to the process: children of fork() do not
 * inherit it. */
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
    return token >> 1; /* fits into int64_t */
}

/* Whether RLIMIT_FSIZE allows a file of `bytes` bytes. fallocate beyond the limit raises SIGXFSZ,
 * which ends the process by default. */
static int fits_file_limit(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes <= limit.rlim_cur;
}

/* Sets the size of a file and allocates its memory, so that a lack of memory fails here. Otherwise
 * the first write to a page would raise SIGBUS. Signals are blocked, because on some kernels a
 * signal interrupts the call and undoes it. */
static int allocate_file(int fd, size_t bytes) {
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = fallocate(fd, 0, 0, (off_t)bytes);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status == 0;
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
    shared_page *page = NULL;
    if (allocate_file(fd, segment_bytes(ring->capacity)) &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 &&
        fcntl(fd, F_SETLK, &lock) == 0) {
        page = map_segment(fd, ring->capacity);
    }
    if (page == NULL) {
        (void)close(fd);
        return 0;
    }
    page->token = random_token();
    page->capacity = ring->capacity;
    ring->own = (ring_view){page, fd};
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

static int has_segment_size(const struct stat *info, size_t capacity) {
    return S_ISREG(info->st_mode) && info->st_size == (off_t)segment_bytes(capacity);
}

/* Maps a peer's segment. Accepts only a regular file of the right size that cannot shrink, with the
 * token of the handle. In another pid namespace the path may name any file. Opening a device may
 * have side effects, and closing a file drops this process's locks on it. So stat comes first. */
static int map_peer(ring_view *view, const shm_ring_handle *handle, size_t capacity) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)handle->pid,
                   (long long)handle->fd);
    struct stat info;
    if (stat(path, &info) != 0 || !has_segment_size(&info, capacity)) {
        return 0;
    }
    const int fd = move_above_stdio(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (fd < 0) {
        return 0;
    }
    const int seals = fcntl(fd, F_GET_SEALS);
    shared_page *at = NULL;
    if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &info) == 0 &&
        has_segment_size(&info, capacity)) {
        at = map_segment(fd, capacity);
    }
    if (at == NULL) {
        (void)close(fd);
        return 0;
    }
    *view = (ring_view){at, fd};
    return at->token == (uint64_t)handle->token && at->capacity == capacity;
}

int shm_ring_connect(shm_ring *ring, int rank, int world_size, const shm_ring_handle *handles) {
    assert(ring->own.page != NULL && handles != NULL);
    if (world_size < 2 || world_size > SHM_RING_MAX_RANKS || rank < 0 || rank >= world_size ||
        ring->world_size != 0) {
        return 0;
    }
    ring->rank = rank;
    ring->world_size = world_size;
    ring->views[rank] = ring->own;
    for (int peer = 0; peer < world_size; peer++) {
        if (peer == rank) {
            continue;
        }
        /* Ranks in one process would share the liveness lock. */
        if (handles[peer].pid <= 0 || handles[peer].pid == ring->pid ||
            !map_peer(&ring->views[peer], &handles[peer], ring->capacity)) {
            return 0;
        }
    }
    return 1;
}

/* ---- notification ---- */

static void wake_peers(const shm_ring *ring) {
    for (int peer = 0; peer < ring->world_size; peer++) {
        shared_page *page = ring->views[peer].page;
        if (peer != ring->rank && page != NULL && atomic_load(&page->sleepers) != 0) {
            (void)atomic_fetch_add(&page->doorbell, 1);
            (void)syscall(SYS_futex, &page->doorbell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
        }
    }
}

void shm_ring_mark_closed(shm_ring *ring) {
    assert(ring->own.page != NULL);
    if (ring->pid == (int64_t)getpid()) {
        atomic_store(&ring->own.page->closed, 1);
        wake_peers(ring);
    }
}

void shm_ring_destroy(shm_ring *ring) {
    if (ring == NULL) {
        return;
    }
    assert(ring->own.page != NULL);
    shm_ring_mark_closed(ring);
    for (int peer = 0; peer < ring->world_size; peer++) {
        if (peer != ring->rank) {
            unmap_view(&ring->views[peer], ring->capacity);
        }
    }
    unmap_view(&ring->own, ring->capacity);
    free(ring);
}

int shm_ring_peer_has_ended(const shm_ring *ring, int rank) {
    const ring_view *view = &ring->views[rank];
    struct flock lock = liveness_lock();
    return atomic_load(&view->page->closed) != 0 ||
           (fcntl(view->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
}

/* Returns the sum of counters that only grow. Up to 2^32 increments, each increment changes the
 * sum. */
uint32_t shm_ring_seq(const shm_ring *ring) {
    uint32_t seq = 0;
    for (int peer = 0; peer < ring->world_size; peer++) {
        shared_page *page = ring->views[peer].page;
        if (peer != ring->rank && page != NULL) {
            seq += atomic_load(&page->committed) + atomic_load(&page->released) +
                   atomic_load(&page->closed);
        }
    }
    return seq;
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

static void wait_on_doorbell(shm_ring *ring, uint32_t seen_seq, int64_t deadline_ns) {
    shared_page *own = ring->own.page;
    (void)atomic_fetch_add(&own->sleepers, 1);
    for (;;) {
        const uint32_t doorbell_value = atomic_load(&own->doorbell);
        const int64_t remaining_ns = deadline_ns - now_ns();
        if (remaining_ns <= 0 || shm_ring_seq(ring) != seen_seq) {
            break;
        }
        const struct timespec time = {.tv_sec = (time_t)(remaining_ns / 1000000000),
                                      .tv_nsec = (long)(remaining_ns % 1000000000)};
        (void)syscall(SYS_futex, &own->doorbell, FUTEX_WAIT, doorbell_value, &time, NULL, 0);
    }
    (void)atomic_fetch_sub(&own->sleepers, 1);
}

void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms) {
    assert(ring->own.page != NULL);
    const int64_t timeout_ms = ms < 0 ? 0 : ms < DAY_MS ? ms : DAY_MS;
    if (!spin_for_change(ring, seen_seq)) {
        wait_on_doorbell(ring, seen_seq, now_ns() + timeout_ms * 1000000);
    }
}

/* ---- writing ---- */

/* Returns the largest number of this rank's messages that a peer has not released. Writes that peer
 * to *slowest if `slowest` is not NULL and the number is not 0. */
static uint32_t count_unread(const shm_ring *ring, int *slowest) {
    const uint32_t committed =
        atomic_load_explicit(&ring->own.page->committed, memory_order_relaxed);
    uint32_t largest = 0;
    for (int peer = 0; peer < ring->world_size; peer++) {
        if (peer == ring->rank) {
            continue;
        }
        const shared_page *page = ring->views[peer].page;
        uint32_t pending = committed - atomic_load_explicit(&page->released, memory_order_acquire);
        /* A corrupt counter may exceed the slots. */
        pending = pending > HEADER_SLOTS ? HEADER_SLOTS : pending;
        if (pending > largest) {
            largest = pending;
            if (slowest != NULL) {
                *slowest = peer;
            }
        }
    }
    return largest;
}

/* Returns the offset of `bytes` free contiguous bytes, or the capacity if there are none. */
static uint64_t find_free(const shm_ring *ring, uint64_t bytes) {
    const uint64_t capacity = ring->capacity, full = capacity;
    const uint32_t pending = count_unread(ring, NULL);
    if (pending == 0) {
        return bytes <= capacity ? 0 : full;
    }
    if (pending >= HEADER_SLOTS) {
        return full;
    }
    const uint32_t committed =
        atomic_load_explicit(&ring->own.page->committed, memory_order_relaxed);
    const uint64_t oldest = ring->offsets[(committed - pending) % HEADER_SLOTS];
    if (oldest < ring->end) {
        if (bytes <= capacity - ring->end) {
            return ring->end;
        }
        return bytes <= oldest ? 0 : full;
    }
    return bytes <= oldest - ring->end ? ring->end : full;
}

/* Rounds up to whole cache lines. An empty message takes one line, so that offsets stay distinct.
 */
static uint64_t message_footprint(uint64_t bytes) {
    return bytes == 0 ? CACHE_LINE : (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

char *shm_ring_reserve(shm_ring *ring, size_t bytes) {
    assert(ring->world_size > 1 && bytes <= ring->capacity);
    const uint64_t at = find_free(ring, message_footprint(bytes));
    if (at == ring->capacity) {
        return NULL;
    }
    ring->reserved_offset = at;
    ring->reserved_bytes = bytes;
    return data_of(&ring->own) + at;
}

void shm_ring_commit(shm_ring *ring, uint32_t tag, const fct_op_label *label) {
    assert(ring->reserved_bytes <= ring->capacity - ring->reserved_offset);
    shared_page *own = ring->own.page;
    const uint32_t seq = atomic_load_explicit(&own->committed, memory_order_relaxed);
    message_header *header = &own->headers[seq % HEADER_SLOTS];
    header->tag = tag;
    header->offset = ring->reserved_offset;
    header->bytes = ring->reserved_bytes;
    if (label != NULL) {
        header->label = *label;
    } else {
        header->label.unit = 0;
    }
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
    assert(rank >= 0 && rank < ring->world_size && rank != ring->rank);
    const ring_view *view = &ring->views[rank];
    const uint32_t closed = atomic_load_explicit(&view->page->closed, memory_order_acquire);
    const uint32_t committed = atomic_load_explicit(&view->page->committed, memory_order_acquire);
    if (committed == ring->read_seq) {
        return closed != 0 ? SHM_RING_CLOSED : SHM_RING_EMPTY;
    }
    /* Copy the header first: the peer may change it between the check and the use. */
    const message_header *header = &view->page->headers[ring->read_seq % HEADER_SLOTS];
    const struct {
        uint32_t tag;
        uint64_t offset, bytes;
    } copy = {*(const volatile uint32_t *)&header->tag, *(const volatile uint64_t *)&header->offset,
              *(const volatile uint64_t *)&header->bytes};
    if (committed - ring->read_seq > HEADER_SLOTS || copy.offset > ring->capacity ||
        copy.offset % CACHE_LINE != 0 || copy.bytes > ring->capacity - copy.offset) {
        return SHM_RING_CORRUPT;
    }
    *message = (shm_ring_message){copy.tag, (size_t)copy.bytes, data_of(view) + copy.offset,
                                  &header->label};
    return SHM_RING_READY;
}

void shm_ring_release(shm_ring *ring) {
    assert(ring->world_size > 1);
    shared_page *own = ring->own.page;
    ring->read_seq++;
    atomic_store(&own->released, ring->read_seq);
    wake_peers(ring);
}
