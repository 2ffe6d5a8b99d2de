/* Progress threads, for collectives that cannot be polled; see progress.h.
 *
 * A process group has at most one progress thread. The first task starts the thread, which runs the
 * tasks one after the other, in order of issue.
 *
 * Invariants: the struct progress_thread and the thread share ownership of the queue, so either may
 * end first. The thread never takes the GIL: a thread that takes the GIL while the interpreter
 * finalizes would terminate the process. A task becomes done once, under its mutex. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "progress.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct progress_task {
    atomic_uint owners;
    progress_job job;
    pthread_mutex_t mutex; /* guards `done` */
    pthread_cond_t changed;
    bool done;
    progress_task *next; /* in the queue */
};

/* Shared by the struct progress_thread and the thread. */
typedef struct task_queue {
    atomic_uint owners;
    pthread_mutex_t mutex; /* guards the fields below */
    pthread_cond_t changed;
    progress_task *first, *last; /* each holds one reference */
    bool closed;
} task_queue;

struct progress_thread {
    pthread_mutex_t mutex; /* guards `queue` */
    task_queue *queue;     /* NULL before the first task */
};

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

/* ---- tasks ---- */

static progress_task *task_new(progress_job job) {
    progress_task *task = (progress_task *)calloc(1, sizeof *task);
    if (task != NULL) {
        atomic_init(&task->owners, 1);
        task->job = job;
        (void)pthread_mutex_init(&task->mutex, NULL);
        init_condition(&task->changed);
    }
    return task;
}

/* Frees the task but not its object. */
static void task_free(progress_task *task) {
    (void)pthread_cond_destroy(&task->changed);
    (void)pthread_mutex_destroy(&task->mutex);
    free(task);
}

void progress_task_retain(progress_task *task) {
    assert(atomic_load(&task->owners) > 0);
    (void)atomic_fetch_add(&task->owners, 1);
}

void progress_task_release(progress_task *task) {
    assert(task == NULL || atomic_load(&task->owners) > 0);
    if (task != NULL && atomic_fetch_sub(&task->owners, 1) == 1) {
        task->job.destroy(task->job.object);
        task_free(task);
    }
}

void *progress_task_object(const progress_task *task) {
    return task->job.object;
}

bool progress_task_is_done(progress_task *task) {
    assert(atomic_load(&task->owners) > 0);
    (void)pthread_mutex_lock(&task->mutex);
    const bool done = task->done;
    (void)pthread_mutex_unlock(&task->mutex);
    return done;
}

bool progress_task_wait(progress_task *task, int64_t ms) {
    assert(atomic_load(&task->owners) > 0 && ms >= 0);
    struct timespec deadline;
    (void)clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += (time_t)(ms / 1000);
    deadline.tv_nsec += (long)(ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    (void)pthread_mutex_lock(&task->mutex);
    while (!task->done && pthread_cond_timedwait(&task->changed, &task->mutex, &deadline) == 0) {
    }
    const bool done = task->done;
    (void)pthread_mutex_unlock(&task->mutex);
    return done;
}

static void run_task(progress_task *task) {
    task->job.run(task->job.object);
    (void)pthread_mutex_lock(&task->mutex);
    task->done = true;
    (void)pthread_mutex_unlock(&task->mutex);
    /* After the unlock, so that a woken thread can take the mutex at once. */
    (void)pthread_cond_broadcast(&task->changed);
    progress_task_release(task);
}

/* ---- the queue ---- */

static void queue_release(task_queue *queue) {
    if (atomic_fetch_sub(&queue->owners, 1) == 1) {
        assert(queue->first == NULL);
        (void)pthread_cond_destroy(&queue->changed);
        (void)pthread_mutex_destroy(&queue->mutex);
        free(queue);
    }
}

/* Returns the first task, which it removes, or NULL if the queue is closed and empty. */
static progress_task *pop_task(task_queue *queue) {
    (void)pthread_mutex_lock(&queue->mutex);
    while (queue->first == NULL && !queue->closed) {
        (void)pthread_cond_wait(&queue->changed, &queue->mutex);
    }
    progress_task *task = queue->first;
    if (task != NULL) {
        queue->first = task->next;
        queue->last = queue->first == NULL ? NULL : queue->last;
    }
    (void)pthread_mutex_unlock(&queue->mutex);
    return task;
}

static void *run_queue(void *argument) {
    task_queue *queue = (task_queue *)argument;
    for (progress_task *task = pop_task(queue); task != NULL; task = pop_task(queue)) {
        run_task(task);
    }
    queue_release(queue);
    return NULL;
}

/* Returns a queue whose thread runs, or NULL. */
static task_queue *queue_new(void) {
    task_queue *queue = (task_queue *)calloc(1, sizeof *queue);
    if (queue == NULL) {
        return NULL;
    }
    atomic_init(&queue->owners, 2); /* the struct progress_thread and the thread */
    (void)pthread_mutex_init(&queue->mutex, NULL);
    init_condition(&queue->changed);
    pthread_t id;
    if (pthread_create(&id, NULL, run_queue, queue) != 0) {
        atomic_store(&queue->owners, 1);
        queue_release(queue);
        return NULL;
    }
    (void)pthread_detach(id);
    return queue;
}

/* ---- the thread ---- */

progress_thread *progress_thread_new(void) {
    progress_thread *thread = (progress_thread *)calloc(1, sizeof *thread);
    if (thread != NULL) {
        (void)pthread_mutex_init(&thread->mutex, NULL);
    }
    return thread;
}

void progress_thread_free(progress_thread *thread) {
    if (thread == NULL) {
        return;
    }
    task_queue *queue = thread->queue;
    (void)pthread_mutex_destroy(&thread->mutex);
    free(thread);
    if (queue != NULL) {
        (void)pthread_mutex_lock(&queue->mutex);
        assert(!queue->closed);
        queue->closed = true;
        (void)pthread_cond_signal(&queue->changed);
        (void)pthread_mutex_unlock(&queue->mutex);
        queue_release(queue);
    }
}

progress_task *progress_thread_add(progress_thread *thread, progress_job job) {
    assert(job.run != NULL && job.destroy != NULL);
    progress_task *task = task_new(job);
    if (task == NULL) {
        return NULL;
    }
    (void)pthread_mutex_lock(&thread->mutex);
    thread->queue = thread->queue != NULL ? thread->queue : queue_new();
    task_queue *queue = thread->queue;
    (void)pthread_mutex_unlock(&thread->mutex);
    if (queue == NULL) {
        task_free(task);
        return NULL;
    }
    progress_task_retain(task); /* for the queue */
    (void)pthread_mutex_lock(&queue->mutex);
    if (queue->last != NULL) {
        queue->last->next = task;
    } else {
        queue->first = task;
    }
    queue->last = task;
    (void)pthread_mutex_unlock(&queue->mutex);
    (void)pthread_cond_signal(&queue->changed);
    return task;
}
