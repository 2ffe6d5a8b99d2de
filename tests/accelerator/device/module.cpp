/* The Python module of the simulated device. */
#include "early_writes.h"
#include "journal.h"
#include "memory.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {

void register_hooks();
void define_group(py::module &m);
void define_kernels(py::module &m);

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

py::list calls() {
    const Lock lock(world().mutex);
    py::list entries;
    for (const Call &call : journal().calls) {
        entries.append(py::make_tuple(call.kind, call.stream, call.frames));
    }
    return entries;
}

py::list snapshot() {
    const Lock lock(world().mutex);
    py::list entries;
    for (const Block *const block : memory().used_blocks()) {
        py::dict entry;
        entry["address"] = block->start;
        entry["bytes"] = block->requested;
        entry["device"] = block->device;
        entry["stream"] = block->stream.id();
        entry["label"] = block->label;
        entry["serial"] = block->serial;
        entries.append(entry);
    }
    return entries;
}

void log_calls(const std::string &library, const std::string &fault, int64_t at) {
    const Lock lock(world().mutex);
    journal().log_calls(library, fault, at);
}

void reset() {
    const Lock lock(world().mutex);
    world().reset();
    memory().reset();
    journal().counts.clear();
    journal().findings.clear();
}

void define_early_writes(py::module &m) {
    m.def("record_early_writes", [] {
        const Lock lock(world().mutex);
        early_writes().start_recording();
    });
    m.def("replay_recorded_writes", [] {
        const Lock lock(world().mutex);
        return early_writes().start_replay();
    });
    m.def("stop_early_writes", [] {
        const Lock lock(world().mutex);
        early_writes().stop();
    });
}

void define_memory(py::module &m) {
    m.def("memory_allocated", [](int device) {
        const Lock lock(world().mutex);
        return memory().usage(device).now;
    });
    m.def("max_memory_allocated", [](int device) {
        const Lock lock(world().mutex);
        return memory().usage(device).peak;
    });
    m.def("memory_reserved", [](int device) {
        const Lock lock(world().mutex);
        return memory().usage(device).reserved;
    });
    m.def("reset_peak", [](int device) {
        const Lock lock(world().mutex);
        memory().usage(device).peak = memory().usage(device).now;
    });
    m.def("name_storage", [](uintptr_t storage, const std::string &text) {
        const Lock lock(world().mutex);
        memory().set_name(reinterpret_cast<const void *>(storage), text);
    });
    m.def("snapshot", &snapshot);
}

void define_journal(py::module &m) {
    m.def("findings", [] {
        const Lock lock(world().mutex);
        return journal().findings;
    });
    m.def("clear_findings", [] {
        const Lock lock(world().mutex);
        journal().findings.clear();
    });
    m.def("counts", [] {
        const Lock lock(world().mutex);
        return journal().counts;
    });
    m.def("clear_counts", [] {
        const Lock lock(world().mutex);
        journal().counts.clear();
    });
    m.def("delay_writes", [](uint64_t seed) {
        const Lock lock(world().mutex);
        world().late_seed = seed;
    });
    m.def("log_calls", &log_calls);
    m.def("calls", &calls);
    m.def("reset", &reset);
}

} // namespace

} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    sim::register_hooks();
    m.def("set_device", [](int index) { sim::set_current_device(c10::DeviceIndex(index)); });
    m.def("current_device", [] { return static_cast<int>(sim::current_device()); });
    m.attr("device_count") = sim::kDevices;
    sim::define_memory(m);
    sim::define_journal(m);
    sim::define_early_writes(m);
    sim::define_group(m);
    sim::define_kernels(m);
}
