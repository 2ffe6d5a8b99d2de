/* Findings, counters, the log of calls that order streams, and faults injected into these calls. */
#ifndef SIM_JOURNAL_H
#define SIM_JOURNAL_H

#include "../../harness/simulation/library_frames.h"
#include "clock.h"

#include <map>
#include <string>
#include <vector>

namespace sim {

/* A logged call. "record", "wait", "work wait" (for a collective) and "synchronize" order streams.
 * "current" (returns the current stream) and "allocate" are logged for the other faults. */
struct Call {
    const char *kind;
    int64_t stream;
    std::vector<uintptr_t> frames; /* of the logged library, innermost first */
};

struct Journal {
    std::vector<std::string> findings;
    std::map<std::string, uint64_t> counts; /* by name of operation or kind of call */
    std::vector<Call> calls;                /* calls from the logged library */
    LibraryFrames logged_library;
    std::string fault;     /* "drop", "wrong stream", "other stream", "early free", or empty */
    int64_t fault_at = -1; /* index of the logged call at which the fault happens */

    /* Starts logging the calls from the library whose path contains `library`, and arms the fault
     * `name` for the call of index `at`. An empty `library` stops the log. */
    void log_calls(const std::string &library, const std::string &name, int64_t at);
    void report(std::string text);
    void count(const char *name);
    /* Counts a call and logs it if it comes from the logged library. `orders`: the call orders
     * streams. Returns true if the armed fault must happen at this call. */
    bool log_call(const char *kind, c10::Stream stream, bool orders = true);

  private:
    /* Whether the log has the calls that order streams, or all other calls. The fault selects. */
    bool logs_ordering_calls() const {
        return fault != "other stream" && fault != "early free";
    }
};

Journal &journal(); /* under world().mutex */

} // namespace sim

#endif
