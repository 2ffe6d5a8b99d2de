/* Device memory and pinned memory: anonymous mappings, which take no memory before they are
 * written. */
#include <sys/mman.h>

#include <cstring>

#include "sim.h"

namespace sim {

namespace {

struct Allocation {
    size_t bytes = 0;
    Kind kind = Kind::kNone;
};

std::map<uintptr_t, Allocation> &allocations() {
    static auto *const all = new std::map<uintptr_t, Allocation>; /* under the device's mutex */
    return *all;
}

} // namespace

void *allocate(size_t bytes, Kind kind) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    Device &state = device();
    const size_t size = bytes == 0 ? 1 : bytes;
    if (kind == Kind::kDevice) {
        count("malloc");
        if (holds_gil()) {
            count("malloc with GIL");
        }
        if (state.settings.stopped != 0) {
            return nullptr;
        }
        const bool fails = state.settings.malloc_failures_left > 0;
        if (fails || is_due(state.settings.fail_malloc)) {
            state.settings.malloc_failures_left =
                (fails ? state.settings.malloc_failures_left : state.settings.malloc_failures) - 1;
            count("malloc failed");
            return nullptr;
        }
        if (state.used + size > static_cast<size_t>(state.settings.memory_mib) << 20) {
            count("malloc failed");
            return nullptr;
        }
    }
    void *const address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return nullptr;
    }
    allocations()[reinterpret_cast<uintptr_t>(address)] = Allocation{size, kind};
    if (kind == Kind::kDevice) {
        state.used += size;
    }
    return address;
}

bool release(void *address) {
    finish_all(); /* cudaFree waits for the device */
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    const auto found = allocations().find(reinterpret_cast<uintptr_t>(address));
    if (found == allocations().end()) {
        return address == nullptr;
    }
    if (found->second.kind == Kind::kDevice) {
        count("free");
        device().used -= found->second.bytes;
    }
    device().accesses.forget(found->first, found->first + found->second.bytes);
    munmap(address, found->second.bytes);
    allocations().erase(found);
    return true;
}

Kind kind_of(const void *address) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto next = allocations().upper_bound(at);
    if (next == allocations().begin()) {
        return Kind::kNone;
    }
    const auto found = std::prev(next);
    return at < found->first + found->second.bytes ? found->second.kind : Kind::kNone;
}

namespace {

/* Executes a copy as the work of an operation. Pageable memory is read at once, as the driver does,
 * and written before this function returns. */
void submit_copy(const Operation &by, void *dst, const void *src, size_t bytes) {
    if (kind_of(src) != Kind::kNone) {
        submit(by, [=] {
            std::memmove(dst, src, bytes);
            return true;
        });
    } else {
        const auto *const first = static_cast<const char *>(src);
        auto source = std::make_shared<std::vector<char>>(first, first + bytes);
        submit(by, [=, source = std::move(source)] {
            std::memcpy(dst, source->data(), bytes);
            return true;
        });
    }
    if (kind_of(dst) == Kind::kNone) {
        Clock clock;
        {
            const std::lock_guard<std::recursive_mutex> lock(device().mutex);
            clock = device().streams[static_cast<size_t>(by.stream)]->clock;
        }
        finish(clock);
    }
}

} // namespace

void copy(const Operation &by, void *dst, const void *src, size_t bytes) {
    const bool within_device = kind_of(dst) == Kind::kDevice && kind_of(src) == Kind::kDevice;
    access(by, src, bytes, false);
    access(by, dst, bytes, true);
    if (executes()) {
        submit_copy(by, dst, src, bytes);
        return;
    }
    bool captured = false;
    if (by.stream >= 0) {
        const std::lock_guard<std::recursive_mutex> lock(device().mutex);
        captured = device().streams[static_cast<size_t>(by.stream)]->capture != nullptr;
    }
    if (!captured && dst != src && (!within_device || device().settings.copies != 0)) {
        std::memmove(dst, src, bytes);
    }
}

} // namespace sim
