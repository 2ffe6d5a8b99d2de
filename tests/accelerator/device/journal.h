/* What the simulated device saw: findings, counters, and each call that orders streams, which a
 * test may have dropped. */
#ifndef SIM_JOURNAL_H
#define SIM_JOURNAL_H

#include "clock.h"

#include <map>
#include <string>
#include <vector>

namespace sim {

/* A call that orders streams: "record", "wait", "work wait" (for a collective), "synchronize";
 * or one that could be wrong: "current" (asks for the current stream), "allocate". */
struct Call {
    const char *kind;
    int64_t stream;
    std::vector<uintptr_t> frames; /* inside the watched library, innermost first */
};

struct Journal {
    std::vector<std::string> findings;
    std::map<std::string, uint64_t> counts; /* operations by name, and "record", "wait" */
    std::vector<Call> calls;                /* only while a library is watched */
    uintptr_t watched_from = 0;             /* where the library lies; 0: none is watched */
    uintptr_t watched_to = 0;
    std::string fault;     /* what goes wrong, empty: nothing */
    int64_t fault_at = -1; /* at which call of the watched library */

    /* Notes the calls that come from the library whose file name has this in it, from now on; one
     * of them goes wrong. */
    void watch(const std::string &library, const std::string &what, int64_t at);
    void find(std::string text);
    void count(const char *name);
    /* Notes a call. True: the armed fault is to happen at this one. */
    bool note(const char *kind, c10::Stream stream, bool orders = true);

  private:
    /* Which kind of calls is noted and numbered: those that order, or the others. */
    bool noted_orders() const {
        return fault != "other stream" && fault != "early free";
    }
};

Journal &journal(); /* under world().mutex */

} // namespace sim

#endif
