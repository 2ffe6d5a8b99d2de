/* Waits that run signal handlers; see wait.hpp. The progress thread (progress.h) calls no
 * Python and never takes the GIL, not even to destroy a work. */
#include "wait.hpp"

#include "gil.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace {

constexpr int64_t kSliceMs = 100;

/* The object of a progress_job. The task's completion orders the accesses to `error`. */
struct BackgroundWait {
    c10::intrusive_ptr<c10d::Work> work; /* used by the progress thread only; reset by run_wait() */
    std::exception_ptr error;
};

void run_wait(void *object) {
    auto *wait = static_cast<BackgroundWait *>(object);
    try {
        /* The thread-local state of the issuing thread is not copied, because it contains Python
         * objects. Only these two settings are made. */
        const c10::AutoGradMode no_grad(false);
        const at::AutoDispatchBelowADInplaceOrView below;
        wait->work->wait();
    } catch (...) {
        wait->error = std::current_exception();
    }
    wait->work.reset();
}

void destroy_wait(void *object) {
    delete static_cast<BackgroundWait *>(object);
}

void check_signals(const fct::WaitStop &stop) {
    const fct::HeldGil held;
    if (PyErr_CheckSignals() != 0) {
        fct::throw_python_error();
    }
    if (!stop.text.empty()) {
        throw std::runtime_error(stop.text);
    }
}

} // namespace

namespace fct {

WaitTask wait_in_background(progress_thread &thread, c10::intrusive_ptr<c10d::Work> work) {
    auto wait = std::make_unique<BackgroundWait>();
    wait->work = std::move(work);
    progress_task *task = progress_thread_add(&thread, {wait.get(), &run_wait, &destroy_wait});
    if (task == nullptr) {
        return nullptr;
    }
    (void)wait.release();
    return {task, &progress_task_release};
}

void wait_in_slices(c10d::Work &work, const WaitStop &stop) {
    constexpr auto slice = std::chrono::milliseconds(kSliceMs);
    while (!work.isCompleted()) {
        {
            const ReleasedGil released;
            const auto start = std::chrono::steady_clock::now();
            try {
                work.wait(slice);
                return;
            } catch (const std::exception &) {
                /* After a timeout of the slice the loop continues. After a failure of the
                 * collective isCompleted() is true. Other errors are thrown, or this loop would
                 * spin. */
                if (std::chrono::steady_clock::now() - start < slice / 2 && !work.isCompleted()) {
                    throw;
                }
            }
        }
        check_signals(stop);
    }
    work.wait(); /* throws the collective's error; does not block */
}

void wait_in_slices(progress_task &task, const WaitStop &stop) {
    while (!progress_task_is_done(&task)) {
        {
            const ReleasedGil released;
            progress_task_wait(&task, kSliceMs);
        }
        check_signals(stop);
    }
    const auto *wait = static_cast<const BackgroundWait *>(progress_task_object(&task));
    if (wait->error) {
        std::rethrow_exception(wait->error);
    }
}

} // namespace fct
