/* Progress threads, for works that isCompleted() cannot poll.
 *
 * A process group has at most one progress thread. The first such work starts it, and it waits for
 * one work after the other, in order of issue.
 *
 * Invariants: the thread and its callers share ownership of what both use, so either may end first.
 * The thread calls no Python and never takes the GIL, not even to destroy what it holds: a thread
 * that takes the GIL while the interpreter finalizes would terminate the process. The outcome of a
 * task is published once, under its mutex. */
#include "progress.hpp"

#include "bridge.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>
#include <utility>

namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);

void check_signals() {
    if (PyErr_CheckSignals() != 0) {
        fct::throw_python_error();
    }
}

} // namespace

namespace fct {

bool WaitTask::is_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
}

bool WaitTask::wait_for(std::chrono::milliseconds slice) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, slice, [&] { return done_; });
}

void WaitTask::rethrow() const {
    if (error_) {
        std::rethrow_exception(error_);
    }
}

void WaitTask::run() {
    std::exception_ptr error;
    try {
        /* The only thread-local state of the issuing thread that is copied. The rest of it holds
         * Python objects. */
        const c10::AutoGradMode no_grad(false);
        const at::AutoDispatchBelowADInplaceOrView below;
        work_->wait();
    } catch (...) {
        error = std::current_exception();
    }
    work_.reset();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::move(error);
        done_ = true;
    }
    changed_.notify_all(); /* after unlocking, so that a woken thread gets the mutex */
}

struct ProgressThread::Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<WaitTask>> wait_tasks;
    bool closed = false;
};

void ProgressThread::run(Queue &queue) {
    for (;;) {
        std::shared_ptr<WaitTask> next;
        {
            std::unique_lock<std::mutex> lock(queue.mutex);
            queue.changed.wait(lock, [&] { return queue.closed || !queue.wait_tasks.empty(); });
            if (queue.wait_tasks.empty()) {
                return;
            }
            next = std::move(queue.wait_tasks.front());
            queue.wait_tasks.pop_front();
        }
        next->run();
    }
}

std::shared_ptr<WaitTask> ProgressThread::add(c10::intrusive_ptr<c10d::Work> work) {
    auto wait_task = std::make_shared<WaitTask>(std::move(work));
    if (!queue_) {
        auto queue = std::make_shared<Queue>();
        std::thread([queue] { run(*queue); }).detach();
        queue_ = std::move(queue);
    }
    {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->wait_tasks.push_back(wait_task);
    }
    queue_->changed.notify_one();
    return wait_task;
}

void wait_in_slices(c10d::Work &work) {
    while (!work.isCompleted()) {
        {
            pybind11::gil_scoped_release released;
            const auto start = std::chrono::steady_clock::now();
            try {
                work.wait(kSlice);
                return;
            } catch (const std::exception &) {
                /* After a timeout of the slice the loop continues. After a failure of the
                 * collective isCompleted() is true. Other errors are thrown, or this loop would
                 * spin. */
                if (std::chrono::steady_clock::now() - start < kSlice / 2 && !work.isCompleted()) {
                    throw;
                }
            }
        }
        check_signals();
    }
    work.wait(); /* throws the collective's error; does not block */
}

void wait_in_slices(WaitTask &wait_task) {
    while (!wait_task.is_done()) {
        {
            pybind11::gil_scoped_release released;
            wait_task.wait_for(kSlice);
        }
        check_signals();
    }
    wait_task.rethrow();
}

ProgressThread::~ProgressThread() {
    if (queue_) {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->closed = true;
        queue_->changed.notify_one();
    }
}

} // namespace fct
