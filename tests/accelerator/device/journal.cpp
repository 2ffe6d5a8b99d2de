/* Findings, counters and faults. */
#include "journal.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <cstring>

namespace sim {

Journal &journal() {
    static Journal *const only = new Journal;
    return *only;
}

void Journal::find(std::string text) {
    constexpr size_t kEnough = 200;
    if (findings.size() < kEnough) {
        findings.push_back(std::move(text));
    }
}

void Journal::count(const char *name) {
    counts[name]++;
}

namespace {

/* Where in the watched library the call came from: offsets of its frames. */
std::vector<uintptr_t> frames_in(const std::string &library) {
    std::array<void *, 48> stack{};
    const int depth = backtrace(stack.data(), static_cast<int>(stack.size()));
    std::vector<uintptr_t> found;
    for (int i = 0; i < depth; i++) {
        Dl_info info{};
        if (dladdr(stack.at(static_cast<size_t>(i)), &info) != 0 && info.dli_fname != nullptr &&
            std::strstr(info.dli_fname, library.c_str()) != nullptr) {
            found.push_back(reinterpret_cast<uintptr_t>(stack.at(static_cast<size_t>(i))) -
                            reinterpret_cast<uintptr_t>(info.dli_fbase));
        }
    }
    return found;
}

} // namespace

bool Journal::note(const char *kind, c10::Stream stream) {
    counts[kind]++;
    if (watched.empty()) {
        return false;
    }
    std::vector<uintptr_t> frames = frames_in(watched);
    if (frames.empty()) {
        return false;
    }
    calls.push_back(Call{kind, stream.id(), std::move(frames)});
    return static_cast<int64_t>(calls.size()) - 1 == fault_at;
}

} // namespace sim
