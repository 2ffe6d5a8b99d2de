/* Works that can only be waited for by blocking, and the threads that do it: see wait_task.cpp. */
#ifndef FSDP_C_TORCH_PROGRESS_H
#define FSDP_C_TORCH_PROGRESS_H

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

namespace fct {

/* One wait by a progress_thread thread. */
class WaitTask {
  public:
    explicit WaitTask(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
    WaitTask(const WaitTask &) = delete;
    WaitTask &operator=(const WaitTask &) = delete;

    bool done();
    /* Blocks for at most that long; returns whether the wait is over. Call it without the GIL. */
    bool wait_for(std::chrono::milliseconds slice);
    /* Once done: throws what the wait has thrown. */
    void rethrow() const;
    /* The progress_thread's part: waits and publishes the outcome. */
    void run();

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* the progress_thread's; dropped when it is done */
    std::mutex mutex_;                    /* guards what follows */
    std::condition_variable changed_;
    bool done_ = false;
    std::exception_ptr error_;
};

/* The wait_tasks of one group in order of issue, and the thread that runs them. */
class ProgressThread {
  public:
    ProgressThread() = default;
    ProgressThread(const ProgressThread &) = delete;
    ProgressThread &operator=(const ProgressThread &) = delete;
    ~ProgressThread(); /* the thread ends by itself, after what it was given */
    /* Throws std::system_error where no thread is to be had. */
    std::shared_ptr<WaitTask> add(c10::intrusive_ptr<c10d::Work> work);

  private:
    struct Queue;
    static void run(Queue &queue);
    std::shared_ptr<Queue> queue_; /* shared with the thread; empty until there is a work */
};

/* Both block until it is over and throw what went wrong. They want the GIL, release it while they
 * block, and see signals every 0.1 s: what a handler raises is thrown, and the rest goes on in the
 * background. The work is one that can be polled and be waited for with a time-out. */
void wait_in_slices(c10d::Work &work);
void wait_in_slices(WaitTask &wait_task);

} // namespace fct

#endif
