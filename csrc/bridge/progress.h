/* The progress thread of a process group. It waits for collectives that do not progress in the
 * background by themselves.
 *
 * Preconditions: the caller owns a reference to the task. A progress_thread is freed once. */
#ifndef FSDP_C_BRIDGE_PROGRESS_H
#define FSDP_C_BRIDGE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A task, reference-counted. `run` blocks until the collective of `object` is complete, stores its
 * outcome in the object, and must not use Python. `destroy` frees the object when the last
 * reference to the task is released, on any thread. */
typedef struct progress_task progress_task;
typedef struct progress_job {
    void *object;
    void (*run)(void *object);
    void (*destroy)(void *object);
} progress_job;

/* Whether run() has returned. */
bool progress_task_is_done(progress_task *task);
/* Blocks for at most `ms` milliseconds. Returns progress_task_is_done. Call it without the GIL. */
bool progress_task_wait(progress_task *task, int64_t ms);
/* The object of the job. Valid while the caller holds a reference. */
void *progress_task_object(const progress_task *task);
void progress_task_retain(progress_task *task);
void progress_task_release(progress_task *task); /* NULL is allowed */

/* The tasks of one process group in order of issue, and the thread that runs them. */
typedef struct progress_thread progress_thread;

progress_thread *progress_thread_new(void); /* NULL: no memory */
/* Does not join: the thread exits after its last task. NULL is allowed. */
void progress_thread_free(progress_thread *thread);
/* Appends a task and starts the thread at the first call. Any thread may call the function. Takes
 * job.object on success. Returns NULL if the thread cannot be started or there is no memory. Then
 * the caller keeps the object. */
progress_task *progress_thread_add(progress_thread *thread, progress_job job);

#ifdef __cplusplus
}
#endif

#endif
