/* Waits for CPU works. While a thread waits, it runs signal handlers; see wait.cpp. */
#ifndef FSDP_C_BRIDGE_WAIT_HPP
#define FSDP_C_BRIDGE_WAIT_HPP

#include "progress.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>

namespace fct {

/* Ends the waits for collectives of a process group; see fct_pg_stop_waits. */
struct WaitStop {
    std::string text; /* "": waits continue. The GIL guards it. */
};

/* A counted reference to a task of the progress thread. */
using WaitTask = std::shared_ptr<progress_task>;

/* Adds a work to the progress thread, which waits for it. Returns null if the thread cannot be
 * started. */
WaitTask wait_in_background(progress_thread &thread, c10::intrusive_ptr<c10d::Work> work);

/* Both functions block until completion, and throw the error of the work. The caller holds the GIL.
 * They wait in slices of 0.1 s with the GIL released. Between slices they run signal handlers, and
 * read `stop`. An exception of a handler, or the text of `stop` as RuntimeError, is thrown, and the
 * work continues in the background. A Work must support isCompleted() and wait(timeout). */
void wait_in_slices(c10d::Work &work, const WaitStop &stop);
void wait_in_slices(progress_task &task, const WaitStop &stop);

} // namespace fct

#endif
