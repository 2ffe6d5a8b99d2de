/* The device itself, and the functions that tests call through ctypes. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <sstream>

#include "../../harness/simulation/library_frames.h"
#include "sim.h"

namespace sim {

Device &device() {
    static Device *const only = [] { /* never freed: threads may run at exit */
                                     auto *const made = new Device;
                                     made->streams.push_back(std::make_unique<Stream>());
                                     return made;
    }();
    return *only;
}

Thread &thread() {
    static thread_local Thread state;
    return state;
}

void count(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().counts[name]++;
}

void report(const std::string &text) {
    constexpr size_t kMaxFindings = 200;
    if (device().findings.size() < kMaxFindings) {
        device().findings.push_back(text);
    }
}

bool holds_gil() {
    using Check = int (*)();
    static const auto check = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    return check != nullptr && check() != 0;
}

bool is_due(long &calls) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    return calls > 0 && --calls == 0;
}

/* ---- seeded bugs ---- */

namespace {

struct Call {
    const char *kind;
    std::vector<uintptr_t> frames; /* of the logged library, innermost first */
};

std::vector<Call> calls;
LibraryFrames logged_library;
std::string fault_kind;
long fault_at = -1;
std::vector<uintptr_t> fault_frames;
long fault_countdown = 0; /* calls with fault_frames until the fault; 0: no fault */

} // namespace

bool log_call(const char *kind) {
    if (!logged_library.is_selected()) {
        return false;
    }
    std::vector<uintptr_t> frames = logged_library.read();
    if (frames.empty()) {
        return false;
    }
    const bool matches_kind = fault_kind == kind;
    const bool is_site = matches_kind && fault_frames == frames && is_due(fault_countdown);
    calls.push_back(Call{kind, std::move(frames)});
    return is_site || (matches_kind && static_cast<long>(calls.size()) - 1 == fault_at);
}

} // namespace sim

/* ---- control ---- */

using sim::device;

extern "C" {

/* Returns the field of Settings with this name, or NULL. */
static long *find_setting(const char *name) {
    sim::Settings &s = device().settings;
    const std::map<std::string, long *> fields = {
        {"checks", &s.checks},
        {"copies", &s.copies},
        {"incomplete", &s.incomplete},
        {"memory_mib", &s.memory_mib},
        {"fail_malloc", &s.fail_malloc},
        {"malloc_failures", &s.malloc_failures},
        {"fail_nccl", &s.fail_nccl},
        {"nccl_error", &s.nccl_error},
        {"nccl_async", &s.nccl_async},
        {"fail_launch", &s.fail_launch},
        {"fail_operator", &s.fail_operator},
        {"fail_device", &s.fail_device},
        {"stopped", &s.stopped},
        {"hang_nccl", &s.hang_nccl},
        {"malloc_failures_left", &s.malloc_failures_left},
        {"execute", &s.execute},
        {"order_seed", &s.order_seed},
        {"idle_ms", &s.idle_ms},
        {"wrong_slice", &s.wrong_slice},
        {"wrong_shard", &s.wrong_shard},
        {"missing_rank", &s.missing_rank},
    };
    const auto field = fields.find(name);
    return field != fields.end() ? field->second : nullptr;
}

/* Sets a field of Settings. Returns 0 if there is no such field. */
int sim_set(const char *name, long value) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    long *const field = find_setting(name);
    if (field != nullptr) {
        *field = value;
    }
    return field != nullptr ? 1 : 0;
}

/* Returns a field of Settings, or -1 if there is no such field. */
long sim_get(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    const long *const field = find_setting(name);
    return field != nullptr ? *field : -1;
}

/* Returns lines "name\tcount", sorted. The text is valid until the next call. */
const char *sim_counts() {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    static std::string text;
    std::ostringstream lines;
    for (const auto &[name, value] : device().counts) {
        lines << name << "\t" << value << "\n";
    }
    text = lines.str();
    return text.c_str();
}

/* Returns finding number `index`, or NULL. */
const char *sim_finding(size_t index) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    return index < device().findings.size() ? device().findings[index].c_str() : nullptr;
}

/* Drops findings, counts and recorded accesses. */
void sim_reset() {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().findings.clear();
    device().counts.clear();
    device().accesses = {};
}

/* Starts the log of calls from the library whose path contains `library` (empty: stops it). The
 * call of index `at` does not order streams if it has the kind `kind`. */
void sim_log_calls(const char *library, const char *kind, long at) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    sim::calls.clear();
    sim::fault_kind = kind;
    sim::fault_at = at;
    sim::fault_countdown = 0;
    sim::logged_library.select(library);
}

/* Starts the log as sim_log_calls() does. Call number `occurrence` (from 1) with the kind and the
 * frames does not order streams, whatever the number of other calls. */
void sim_break_call(const char *library, const char *kind, const uintptr_t *frames, int count,
                    long occurrence) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    sim_log_calls(library, kind, -1);
    sim::fault_frames.assign(frames, frames + count);
    sim::fault_countdown = occurrence;
}

/* Writes the kind and at most `capacity` frames of logged call `index`. Returns the number of
 * frames, or -1 without such a call. */
int sim_call(size_t index, const char **kind, uintptr_t *frames, int capacity) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    if (index >= sim::calls.size()) {
        return -1;
    }
    const sim::Call &call = sim::calls[index];
    const int count = std::min(capacity, static_cast<int>(call.frames.size()));
    std::copy_n(call.frames.begin(), count, frames);
    *kind = call.kind;
    return count;
}

/* Checks an access of the host, if the memory is pinned. */
void sim_access_on_host(const void *data, size_t bytes, int write) {
    sim::access_on_host(data, bytes, write != 0);
}

/* Generated functions, which replace those that are not simulated, call this function or the next
 * one. */
int sim_not_supported(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().counts[std::string("not supported: ") + name]++;
    return cudaErrorNotSupported;
}

int sim_without_effect(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().counts[std::string("without effect: ") + name]++;
    return 0;
}

/* Sets the number of ranks of the next communicator that ncclCommSplit makes. */
void sim_announce_split(int size) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().split_sizes.push_back(size);
}
}
