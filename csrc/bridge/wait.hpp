/* Waits for works of the CPU that run signal handlers; see wait.cpp. */
#ifndef FSDP_C_BRIDGE_WAIT_HPP
#define FSDP_C_BRIDGE_WAIT_HPP

#include "../transport/progress.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace fct {

/* A counted reference to a task of the progress thread. */
using WaitTask = std::shared_ptr<progress_task>;

/* Lets the progress thread wait for a work. Returns null if it could not be started. */
WaitTask wait_in_background(progress_thread &thread, c10::intrusive_ptr<c10d::Work> work);

/* Both block until completion, and throw the error of the work. Call them with the GIL. They
 * release it while they block, and run signal handlers every 0.1 s. An exception of a handler is
 * thrown, and the work continues in the background. A Work must support isCompleted() and
 * wait(timeout). */
void wait_in_slices(c10d::Work &work);
void wait_in_slices(progress_task &task);

} // namespace fct

#endif
