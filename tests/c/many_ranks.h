/* Several ranks in one process: the transport of csrc/transport, with coroutines as ranks.
 *
 * Time. One rank runs at a time. It yields where it waits. It may yield before each atomic load,
 * before and after each atomic store, and between the actions of its program. The atomics are those
 * of shared memory (shm_ring.c). The seed selects the rank that continues. Clocks are virtual. If
 * all ranks wait, the clock advances to the end of the first wait.
 *
 * System calls. This file includes shm_ring.c and replaces its system calls. A rank has its own
 * process id. A segment is memory of this process, and its lock is free after the rank's death.
 *
 * Memory. The linker wraps malloc, calloc, realloc and free in the whole test program. A block
 * belongs to the rank that allocated it. So blocks of dead ranks are freed, and a rank that ends
 * must have freed all. */
#ifndef FSDP_C_TESTS_MANY_RANKS_H
#define FSDP_C_TESTS_MANY_RANKS_H

#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "splitmix.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { RANKS_MAX = 4, STACK_BYTES = 128 * 1024, FIRST_PID = 1000, FIRST_FD = 100 };
enum { PAGE_BYTES = 16384 /* at least sizeof(shared_page) */ };

/* ---- ranks ---- */

typedef struct heap_block {
    struct heap_block *next, *previous;
    size_t bytes;
    int rank;
} heap_block;

typedef struct coroutine {
    ucontext_t context;
    char *stack;
    bool started, finished, dead;
    bool sleeps; /* until `wakes` returns true or the clock reaches `until_ns` */
    bool (*wakes)(void *argument);
    void *argument;
    int64_t until_ns;
    heap_block heap; /* the head of the list of the rank's blocks */
} coroutine;

static struct {
    int world, current; /* -1: the scheduler runs */
    coroutine ranks[RANKS_MAX];
    ucontext_t scheduler;
    void (*program)(int rank);
    int64_t clock_ns;
    uint64_t random;
    uint32_t preemption; /* a rank yields at one in `preemption` preempt() calls, on average;
                            0: never */
    int64_t allocations; /* allocations of `failing_rank` until one fails; 0: none fails */
    int failing_rank;
    int64_t events; /* preempt() calls of `dying_rank` until it dies; 0: none dies */
    int dying_rank;
    bool stuck;                   /* no rank can continue */
    const void *scheduler_bottom; /* of the scheduler's stack, for AddressSanitizer */
    size_t scheduler_bytes;
} many;

static uint64_t random_bits(void) {
    return splitmix64(&many.random);
}

static uint32_t random_below(uint32_t below) {
    return (uint32_t)(random_bits() >> 33) % below;
}

/* ---- switches ---- */

/* Switches from one context to another. Announces the stack of the new context to
 * AddressSanitizer. */
static void switch_context(ucontext_t *from, ucontext_t *to, bool to_scheduler, bool ends) {
#ifdef __SANITIZE_ADDRESS__
    void *fake = NULL;
    const coroutine *next = to_scheduler ? NULL : &many.ranks[many.current];
    __sanitizer_start_switch_fiber(ends ? NULL : &fake,
                                   to_scheduler ? many.scheduler_bottom : next->stack,
                                   to_scheduler ? many.scheduler_bytes : STACK_BYTES);
    (void)swapcontext(from, to);
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#else
    (void)to_scheduler, (void)ends;
    (void)swapcontext(from, to);
#endif
}

static void yield_rank(void) {
    const int rank = many.current;
    switch_context(&many.ranks[rank].context, &many.scheduler, true, false);
}

/* Ends the process of the current rank, at any place. Does not return. */
static void die(void) {
    coroutine *rank = &many.ranks[many.current];
    rank->dead = rank->finished = true;
    switch_context(&rank->context, &many.scheduler, true, true);
    abort();
}

/* The current rank may yield or die here. */
static void preempt(void) {
    if (many.current < 0) {
        return;
    }
    if (many.events > 0 && many.current == many.dying_rank && --many.events == 0) {
        die();
    }
    if (many.preemption != 0 && random_below(many.preemption) == 0) {
        yield_rank();
    }
}

/* Sleeps until `wakes` returns true, for at most `ms`. */
static void suspend_until(bool (*wakes)(void *), void *argument, int64_t ms) {
    coroutine *rank = &many.ranks[many.current];
    rank->sleeps = true;
    rank->wakes = wakes;
    rank->argument = argument;
    rank->until_ns = many.clock_ns + ms * 1000000;
    yield_rank();
    rank->sleeps = false;
}

static void run_program(void) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, &many.scheduler_bottom, &many.scheduler_bytes);
#endif
    many.program(many.current);
    many.ranks[many.current].finished = true;
    switch_context(&many.ranks[many.current].context, &many.scheduler, true, true);
}

static void continue_rank(int index) {
    coroutine *rank = &many.ranks[index];
    many.current = index;
    if (!rank->started) {
        rank->started = true;
        (void)getcontext(&rank->context);
        rank->context.uc_stack.ss_sp = rank->stack;
        rank->context.uc_stack.ss_size = STACK_BYTES;
        rank->context.uc_link = NULL;
        makecontext(&rank->context, run_program, 0);
    }
    switch_context(&many.scheduler, &rank->context, false, false);
    many.current = -1;
}

static bool is_runnable(const coroutine *rank) {
    return !rank->finished &&
           (!rank->sleeps || rank->wakes(rank->argument) || many.clock_ns >= rank->until_ns);
}

/* Advances the clock to the end of the first wait. Returns false if no rank waits. */
static bool advance_clock(void) {
    int64_t first = INT64_MAX;
    for (int i = 0; i < many.world; i++) {
        const coroutine *rank = &many.ranks[i];
        if (!rank->finished && rank->until_ns < first) {
            first = rank->until_ns;
        }
    }
    many.clock_ns = first != INT64_MAX && first > many.clock_ns ? first : many.clock_ns;
    return first != INT64_MAX;
}

/* Runs the ranks until all have finished. */
static void run_schedule(void) {
    for (;;) {
        int runnable[RANKS_MAX], count = 0, unfinished = 0;
        for (int i = 0; i < many.world; i++) {
            unfinished += !many.ranks[i].finished;
            if (is_runnable(&many.ranks[i])) {
                runnable[count++] = i;
            }
        }
        if (unfinished == 0) {
            return;
        }
        if (count == 0 && !advance_clock()) {
            many.stuck = true;
            return;
        }
        if (count > 0) {
            continue_rank(runnable[count == 1 ? 0 : random_below((uint32_t)count)]);
        }
    }
}

/* ---- memory ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *block);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);
void __wrap_free(void *block);

void *__wrap_malloc(size_t bytes) {
    if (many.allocations > 0 && many.current == many.failing_rank && --many.allocations == 0) {
        return NULL;
    }
    heap_block *block = (heap_block *)__real_malloc(sizeof *block + bytes);
    const int owner = many.current < 0 ? 0 : many.current;
    heap_block *head = &many.ranks[owner].heap;
    *block = (heap_block){head->next, head, bytes, owner};
    head->next->previous = block;
    head->next = block;
    return block + 1;
}

void *__wrap_calloc(size_t count, size_t bytes) {
    void *block = __wrap_malloc(count * bytes);
    if (block != NULL) {
        memset(block, 0, count * bytes);
    }
    return block;
}

void __wrap_free(void *memory) {
    if (memory != NULL) {
        heap_block *block = (heap_block *)memory - 1;
        block->next->previous = block->previous;
        block->previous->next = block->next;
        __real_free(block);
    }
}

void *__wrap_realloc(void *memory, size_t bytes) {
    void *larger = __wrap_malloc(bytes);
    if (larger != NULL && memory != NULL) {
        const size_t old = ((heap_block *)memory - 1)->bytes;
        memcpy(larger, memory, old < bytes ? old : bytes);
        __wrap_free(memory);
    }
    return larger;
}

/* Frees the blocks of a rank. Returns their number. */
static int free_heap(coroutine *rank) {
    int count = 0;
    while (rank->heap.next != &rank->heap) {
        __wrap_free(rank->heap.next + 1);
        count++;
    }
    return count;
}

/* ---- system calls ---- */

/* The memory of a rank's segment. Segments are kept between schedules, because they are large. */
static struct {
    char *memory[RANKS_MAX];
    size_t bytes;
    bool refuses_open[RANKS_MAX]; /* peers' segments cannot be opened by this rank */
} kernel;

static int rank_of_fd(int fd) {
    return (fd - FIRST_FD) % RANKS_MAX;
}

static int kernel_create(void) {
    return FIRST_FD + many.current;
}

static int kernel_resize(int fd, off_t bytes) {
    const int rank = rank_of_fd(fd);
    if (kernel.memory[rank] == NULL) {
        kernel.bytes = (size_t)bytes;
        kernel.memory[rank] = (char *)aligned_alloc(4096, ((size_t)bytes + 4095) / 4096 * 4096);
    }
    memset(kernel.memory[rank], 0, PAGE_BYTES);
    return 0;
}

/* open() and stat() of /proc/PID/fd/FD. Returns the descriptor, or -1. `info` may be NULL. */
static int kernel_find(const char *path, struct stat *info) {
    long long pid = 0, fd = 0;
    if (sscanf(path, "/proc/%lld/fd/%lld", &pid, &fd) != 2 || kernel.refuses_open[many.current] ||
        many.ranks[pid - FIRST_PID].finished) {
        return -1;
    }
    if (info != NULL) {
        info->st_mode = S_IFREG;
        info->st_size = (off_t)kernel.bytes;
    }
    return (int)fd;
}

static int kernel_describe(int fd, struct stat *info) {
    (void)fd;
    info->st_mode = S_IFREG;
    info->st_size = (off_t)kernel.bytes;
    return 0;
}

static int kernel_control(int fd, int command, struct flock *lock) {
    if (command == F_GETLK) {
        const int owner = rank_of_fd(fd);
        lock->l_type = many.ranks[owner].finished ? F_UNLCK : F_WRLCK;
    }
    return command == F_GET_SEALS ? F_SEAL_SHRINK : 0;
}

static void *kernel_map(int fd, size_t bytes) {
    assert_true(bytes == kernel.bytes);
    return kernel.memory[rank_of_fd(fd)];
}

/* Futexes: shm_ring_wait below replaces the wait, so no wake-up is needed. */
static long kernel_call(long number, ...) {
    (void)number;
    return 0;
}

static int kernel_clock(struct timespec *now) {
    now->tv_sec = (time_t)(many.clock_ns / 1000000000);
    now->tv_nsec = (long)(many.clock_ns % 1000000000);
    return 0;
}

int __wrap_clock_gettime(clockid_t id, struct timespec *now); /* for shm_transport.c */
int __wrap_clock_gettime(clockid_t id, struct timespec *now) {
    (void)id;
    return kernel_clock(now);
}

#define KERNEL_COMMAND(command, ...) command
#define KERNEL_LOCK(command, argument, ...) (struct flock *)(uintptr_t)(argument)
#define memfd_create(name, flags) kernel_create()
#define fallocate(fd, mode, offset, bytes) kernel_resize(fd, bytes)
#define mmap(address, bytes, protection, flags, fd, offset) kernel_map(fd, bytes)
#define munmap(address, bytes) ((void)(address), (void)(bytes), 0)
#define close(fd) ((void)(fd), 0)
#define stat(path, info) (kernel_find(path, info) < 0 ? -1 : 0)
#define open(path, flags) kernel_find(path, NULL)
#define fstat(fd, info) kernel_describe(fd, info)
#define fcntl(fd, ...)                                                                             \
    kernel_control(fd, KERNEL_COMMAND(__VA_ARGS__, 0), KERNEL_LOCK(__VA_ARGS__, 0, 0))
#define getrlimit(resource, limit) ((void)(limit), -1)
#define getrandom(token, bytes, flags) (*(token) = random_bits(), (ssize_t)(bytes))
#define getpid() (FIRST_PID + many.current)
#define sched_yield() 0
#define syscall(...) kernel_call(__VA_ARGS__)
#define clock_gettime(id, now) kernel_clock(now)

/* ---- shared memory ---- */

static uint32_t read_atomic(const _Atomic uint32_t *value) {
    preempt();
    return atomic_load(value);
}

static void write_atomic(_Atomic uint32_t *value, uint32_t to) {
    preempt();
    atomic_store(value, to);
    preempt();
}

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#define atomic_load(value) read_atomic(value)
#define atomic_load_explicit(value, order) read_atomic(value)
#define atomic_store(value, to) write_atomic(value, to)
#define shm_ring_wait wait_on_futex

#include "transport/shm_ring.c"

#undef shm_ring_wait
_Static_assert(sizeof(shared_page) <= PAGE_BYTES, "kernel_resize clears the counters");

void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms);

typedef struct ring_wait {
    const shm_ring *ring;
    uint32_t seen_seq;
} ring_wait;

static bool has_changed(void *argument) {
    const ring_wait *wait_of = (const ring_wait *)argument;
    return shm_ring_seq(wait_of->ring) != wait_of->seen_seq;
}

/* In place of the futex. A wait may also end early: shm_transport_wait then checks its peers. */
void shm_ring_wait(shm_ring *ring, uint32_t seen_seq, int64_t ms) {
    ring_wait argument = {ring, seen_seq};
    suspend_until(has_changed, &argument, random_below(4) == 0 ? 0 : ms);
}

#endif
