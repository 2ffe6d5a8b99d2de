/* The log of findings, counts and calls, and the selection of the call that fails. */
#include "journal.h"

#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>

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

namespace {

struct Range {
    uintptr_t base = 0, end = 0;
    const char *library_name;
};

/* dl_iterate_phdr callback: finds the address range of the library. */
int find_range(dl_phdr_info *info, size_t, void *data) {
    auto *const range = static_cast<Range *>(data);
    if (std::strstr(info->dlpi_name, range->library_name) == nullptr) {
        return 0;
    }
    range->base = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto &segment = info->dlpi_phdr[i];
        range->end =
            std::max<uintptr_t>(range->end, range->base + segment.p_vaddr + segment.p_memsz);
    }
    return 1;
}

} // namespace

void Journal::log_calls(const std::string &library, const std::string &name, int64_t at) {
    calls.clear();
    fault = name;
    fault_at = at;
    library_begin = library_end = 0;
    if (!library.empty()) {
        Range range{0, 0, library.c_str()};
        dl_iterate_phdr(&find_range, &range);
        library_begin = range.base;
        library_end = range.end;
    }
}

bool Journal::log_call(const char *kind, c10::Stream stream, bool orders) {
    counts[kind]++;
    if (library_end == 0 || orders != logs_ordering_calls()) {
        return false;
    }
    std::array<void *, 48> stack{};
    const int depth = backtrace(stack.data(), static_cast<int>(stack.size()));
    std::vector<uintptr_t> frames;
    for (int i = 0; i < depth; i++) {
        const auto address = reinterpret_cast<uintptr_t>(stack.at(static_cast<size_t>(i)));
        if (address >= library_begin && address < library_end) {
            frames.push_back(address - library_begin);
        }
    }
    if (frames.empty()) {
        return false;
    }
    calls.push_back(Call{kind, stream.id(), std::move(frames)});
    return static_cast<int64_t>(calls.size()) - 1 == fault_at;
}

} // namespace sim
