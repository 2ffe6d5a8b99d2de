/* Works that can only be waited for by blocking, and the threads that do it: see waiter.cpp. */
#ifndef FSDP_C_TORCH_WAITER_H
#define FSDP_C_TORCH_WAITER_H

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

namespace fct {

/* One wait by a helper thread. */
class Waiter {
  public:
    explicit Waiter(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
    Waiter(const Waiter &) = delete;
    Waiter &operator=(const Waiter &) = delete;

    bool done();
    /* Blocks for at most that long; returns whether the wait is over. Call it without the GIL. */
    bool wait_for(std::chrono::milliseconds slice);
    /* Once done: throws what the wait has thrown. */
    void rethrow() const;
    /* The helper's part: waits and publishes the outcome. */
    void run();

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* the helper's; dropped when it is done */
    std::mutex mutex_;                    /* guards what follows */
    std::condition_variable changed_;
    bool done_ = false;
    std::exception_ptr error_;
};

/* The waiters of one group in order of issue, and the thread that runs them. */
class Helper {
  public:
    Helper() = default;
    Helper(const Helper &) = delete;
    Helper &operator=(const Helper &) = delete;
    ~Helper(); /* the thread ends by itself, after what it was given */
    /* Throws std::system_error where no thread is to be had. */
    std::shared_ptr<Waiter> add(c10::intrusive_ptr<c10d::Work> work);

  private:
    struct Queue;
    static void run(Queue &queue);
    std::shared_ptr<Queue> queue_; /* shared with the thread; empty until there is a work */
};

/* Both block until it is over and throw what went wrong. They want the GIL, release it while they
 * block, and see signals every 0.1 s: what a handler raises is thrown, and the rest goes on in the
 * background. The work is one that can be polled and be waited for with a time-out. */
void wait_in_slices(c10d::Work &work);
void wait_in_slices(Waiter &waiter);

} // namespace fct

#endif
