/* Waits for CPU works. While a thread waits, it runs signal handlers; see wait.cpp. */
#ifndef FSDP_C_BRIDGE_WAIT_HPP
#define FSDP_C_BRIDGE_WAIT_HPP

#include "progress.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace fct {

/* A counted reference to a task of the progress thread. */
using WaitTask = std::shared_ptr<progress_task>;

/* Adds a work to the progress thread, which waits for it. Returns null if the thread cannot be
 * started. */
WaitTask wait_in_background(progress_thread &thread, c10::intrusive_ptr<c10d::Work> work);

/* Both functions block until completion, and throw the error of the work. The caller holds the GIL.
 * They wait in slices of 0.1 s with the GIL released, and run signal handlers between slices. An
 * exception of a handler is thrown, and the work continues in the background. A Work must support
 * isCompleted() and wait(timeout). */
void wait_in_slices(c10d::Work &work);
void wait_in_slices(progress_task &task);

} // namespace fct

#endif
