/* The log of findings, counts and calls, and the selection of the call that fails. */
#include "journal.h"

namespace sim {

Journal &journal() {
    static Journal *const only = new Journal;
    return *only;
}

void Journal::report(std::string text) {
    constexpr size_t kMaxFindings = 200;
    if (findings.size() < kMaxFindings) {
        findings.push_back(std::move(text));
    }
}

void Journal::count(const char *name) {
    counts[name]++;
}

void Journal::log_calls(const std::string &library, const std::string &name, int64_t at) {
    calls.clear();
    fault = name;
    fault_at = at;
    logged_library.select(library);
}

bool Journal::log_call(const char *kind, c10::Stream stream, bool orders) {
    counts[kind]++;
    if (!logged_library.is_selected() || orders != logs_ordering_calls()) {
        return false;
    }
    std::vector<uintptr_t> frames = logged_library.read();
    if (frames.empty()) {
        return false;
    }
    calls.push_back(Call{kind, stream.id(), std::move(frames)});
    return static_cast<int64_t>(calls.size()) - 1 == fault_at;
}

} // namespace sim
