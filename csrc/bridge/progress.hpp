/* Works that isCompleted() cannot poll, and the thread that waits for them: see progress.cpp. */
#ifndef FSDP_C_BRIDGE_PROGRESS_HPP
#define FSDP_C_BRIDGE_PROGRESS_HPP

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

namespace fct {

/* A wait for one work, done by the progress thread. */
class WaitTask {
  public:
    explicit WaitTask(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
    WaitTask(const WaitTask &) = delete;
    WaitTask &operator=(const WaitTask &) = delete;

    bool is_done();
    /* Blocks for at most `slice`. Returns is_done(). Call it without the GIL. */
    bool wait_for(std::chrono::milliseconds slice);
    /* Throws the error of the wait, if any. Call it after is_done(). */
    void rethrow() const;
    /* Waits for the work and publishes the outcome. The progress thread calls it. */
    void run();

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* used by the progress thread only; reset by run() */
    std::mutex mutex_;                    /* guards the members below */
    std::condition_variable changed_;
    bool done_ = false;
    std::exception_ptr error_;
};

/* The wait tasks of one process group in order of issue, and the thread that runs them. */
class ProgressThread {
  public:
    ProgressThread() = default;
    ProgressThread(const ProgressThread &) = delete;
    ProgressThread &operator=(const ProgressThread &) = delete;
    ~ProgressThread(); /* does not join: the thread exits after its last task */
    /* Appends a task. Starts the thread at the first call. Throws std::system_error if that fails.
     */
    std::shared_ptr<WaitTask> add(c10::intrusive_ptr<c10d::Work> work);

  private:
    struct Queue;
    static void run(Queue &queue);
    std::shared_ptr<Queue> queue_; /* shared with the thread; null before the first task */
};

/* Both block until completion, and throw the error of the work. Call them with the GIL. They
 * release it while they block, and run signal handlers every 0.1 s. An exception of a handler is
 * thrown, and the work continues in the background. A Work must support isCompleted() and
 * wait(timeout). */
void wait_in_slices(c10d::Work &work);
void wait_in_slices(WaitTask &wait_task);

} // namespace fct

#endif
