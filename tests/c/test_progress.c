/* The progress thread: order of tasks, waits, and the life of tasks and threads. */
#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "bridge/progress.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { TASKS = 20, ALARM = 100 /* seconds */ };

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* held: tasks do not run */
static int order[TASKS], ran, destroyed;

static void run(void *object) {
    (void)pthread_mutex_lock(&gate);
    order[ran++] = *(int *)object;
    (void)pthread_mutex_unlock(&gate);
}

static void destroy(void *object) {
    (void)__atomic_fetch_add(&destroyed, 1, __ATOMIC_SEQ_CST);
    free(object);
}

static progress_task *add(progress_thread *thread, int number) {
    int *object = (int *)malloc(sizeof *object);
    assert_non_null(object);
    *object = number;
    progress_task *task = progress_thread_add(thread, (progress_job){object, run, destroy});
    assert_non_null(task);
    return task;
}

/* The thread may release its references last. A second release of a task would free its memory
 * twice, which AddressSanitizer reports. */
static void wait_until_destroyed(int count) {
    while (__atomic_load_n(&destroyed, __ATOMIC_SEQ_CST) < count) {
        (void)usleep(1000);
    }
    assert_int_equal(__atomic_load_n(&destroyed, __ATOMIC_SEQ_CST), count);
}

static int begin(void **state) {
    (void)state;
    (void)alarm(ALARM);
    ran = destroyed = 0;
    return 0;
}

static void progress_tasks_run_in_order_and_are_destroyed_once(void **state) {
    (void)state;
    progress_thread *thread = progress_thread_new();
    progress_task *tasks[TASKS];
    (void)pthread_mutex_lock(&gate);
    for (int i = 0; i < TASKS; i++) {
        tasks[i] = add(thread, i);
        assert_int_equal(*(int *)progress_task_object(tasks[i]), i);
    }
    assert_false(progress_task_is_done(tasks[0]));
    assert_false(progress_task_wait(tasks[0], 1));
    (void)pthread_mutex_unlock(&gate);
    for (int i = TASKS - 1; i >= 0; i--) {
        while (!progress_task_wait(tasks[i], 1000)) {
        }
        assert_true(progress_task_is_done(tasks[i]));
    }
    for (int i = 0; i < TASKS; i++) {
        assert_int_equal(order[i], i);
        progress_task_release(tasks[i]);
    }
    progress_thread_free(thread);
    wait_until_destroyed(TASKS);
}

static void freed_progress_thread_runs_the_tasks_that_were_added(void **state) {
    (void)state;
    progress_thread *thread = progress_thread_new();
    (void)pthread_mutex_lock(&gate);
    progress_task *last = NULL;
    for (int i = 0; i < 3; i++) {
        progress_task_release(last);
        last = add(thread, i);
    }
    progress_thread_free(thread);
    (void)pthread_mutex_unlock(&gate);
    while (!progress_task_wait(last, 1000)) {
    }
    assert_int_equal(ran, 3);
    progress_task_release(last);
    wait_until_destroyed(3);
}

static void free_of_unused_or_null_progress_objects_does_not_crash(void **state) {
    (void)state;
    progress_thread_free(progress_thread_new());
    progress_thread_free(NULL);
    progress_task_release(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(progress_tasks_run_in_order_and_are_destroyed_once, begin),
        cmocka_unit_test_setup(freed_progress_thread_runs_the_tasks_that_were_added, begin),
        cmocka_unit_test_setup(free_of_unused_or_null_progress_objects_does_not_crash, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
