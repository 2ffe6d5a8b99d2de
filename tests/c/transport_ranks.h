/* Shared by the tests of collectives over shared memory: ranks as processes with one connected
 * transport each. SIGALRM kills a process that waits forever. */
#ifndef FSDP_C_TESTS_TRANSPORT_RANKS_H
#define FSDP_C_TESTS_TRANSPORT_RANKS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "transport/op_label.h"
#include "transport/shm_collective.h"
#include "transport/shm_transport.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ALARM = 100 /* seconds */ };

/* Memory that all ranks share. */
typedef struct shared_state {
    pthread_barrier_t barrier;
    shm_ring_handle handles[SHM_RING_MAX_RANKS];
} shared_state;

/* The rank that this process runs. */
static struct {
    int rank, world;
    shm_transport *transport;
    shared_state *shared;
    char error[SHM_ERROR_BYTES];
} me;

#define require(condition)                                                                         \
    ((condition) ? (void)0                                                                         \
                 : ((void)fprintf(stderr, "%s:%d: rank %d: failed: %s (error: %s)\n", __FILE__,    \
                                  __LINE__, me.rank, #condition, me.error),                        \
                    _exit(1)))

static inline void barrier(void) {
    (void)pthread_barrier_wait(&me.shared->barrier);
}

static inline const char *name_dtype(int32_t dtype) {
    return dtype == FCK_FLOAT32 ? "Float" : "?";
}

/* ---- operations ---- */

/* The owner of an operation. */
typedef struct test_work {
    char error[SHM_ERROR_BYTES];
    int completions, releases;
} test_work;

typedef struct issued {
    shm_collective *collective;
    test_work work;
} issued;

static inline void complete_work(void *object, const char *error) {
    test_work *work = (test_work *)object;
    work->completions++;
    (void)snprintf(work->error, sizeof work->error, "%s", error != NULL ? error : "");
}

static inline void release_work(void *object) {
    ((test_work *)object)->releases++;
}

static inline shm_submit_result start(issued *op, const shm_request *request) {
    memset(op, 0, sizeof *op);
    op->collective = shm_collective_new(request);
    require(op->collective != NULL);
    return shm_collective_start(op->collective, me.transport,
                                (shm_owner){&op->work, complete_work, release_work}, me.error);
}

static inline int wait_for(issued *op, int64_t most_ms) {
    return shm_collective_wait(op->collective, me.transport, most_ms, me.error);
}

static inline void run_to_end(const shm_request *request) {
    issued op;
    require(start(&op, request) != SHM_SUBMIT_FAILED);
    require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
    require(op.work.completions == 1 && op.work.releases == 1);
    shm_collective_free(op.collective);
}

/* ---- ranks ---- */

static inline void run_as_rank(void (*run)(void)) {
    (void)alarm(ALARM);
    me.transport = shm_transport_open();
    require(me.transport != NULL);
    me.shared->handles[me.rank] = shm_transport_handle(me.transport);
    barrier();
    require(shm_transport_connect(me.transport, me.rank, me.world, me.shared->handles));
    barrier(); /* a rank that ends before its peers have mapped it would fail their connect */
    run();
    shm_transport_release(me.transport);
    exit(0); /* runs the leak check of AddressSanitizer */
}

static inline void run_ranks(void (*run)(void), int world) {
    pid_t ranks[SHM_RING_MAX_RANKS];
    shared_state *shared = (shared_state *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    pthread_barrierattr_t attributes;
    (void)pthread_barrierattr_init(&attributes);
    (void)pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    (void)pthread_barrier_init(&shared->barrier, &attributes, (unsigned)world);
    for (int rank = 0; rank < world; rank++) {
        ranks[rank] = fork();
        assert_true(ranks[rank] >= 0);
        if (ranks[rank] == 0) {
            me.rank = rank;
            me.world = world;
            me.shared = shared;
            run_as_rank(run);
        }
    }
    bool failed = false;
    for (int ended = 0; ended < world; ended++) {
        int status = -1;
        const pid_t pid = waitpid(-1, &status, 0);
        assert_true(pid > 0);
        failed = failed || status != 0;
        for (int rank = 0; rank < world; rank++) {
            ranks[rank] = ranks[rank] == pid ? 0 : ranks[rank];
            if (failed && ranks[rank] != 0) {
                (void)kill(ranks[rank], SIGKILL); /* it may wait for the failed rank */
            }
        }
    }
    (void)munmap(shared, sizeof *shared);
    assert_false(failed);
}

#endif
