/* Vector clocks, and the current device and streams of each thread. */
#include "clock.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace sim {

World &world() {
    static World *const only = new World; /* never freed: threads may run at exit */
    return *only;
}

int World::index_of(c10::Stream stream) {
    auto &indices = devices.at(static_cast<size_t>(stream.device_index())).stream_indices;
    const auto found = indices.find(stream.id());
    if (found != indices.end()) {
        return found->second;
    }
    const int index = static_cast<int>(streams.size());
    streams.push_back(StreamState{stream, {}});
    indices.emplace(stream.id(), index);
    return index;
}

Epoch World::begin(c10::Stream stream, const char *name) {
    const int index = index_of(stream);
    Clock &clock = streams[static_cast<size_t>(index)].clock;
    clock.join(devices.at(static_cast<size_t>(stream.device_index())).host);
    return Epoch{index, clock.advance(index), name, ++serial};
}

bool World::covers(int stream_index, const Epoch &epoch) const {
    return epoch.stream_index < 0 ||
           streams[static_cast<size_t>(stream_index)].clock.covers(epoch.stream_index, epoch.tick);
}

std::string World::describe(const Epoch &epoch) const {
    const c10::Stream stream = streams[static_cast<size_t>(epoch.stream_index)].stream;
    std::ostringstream text;
    text << epoch.name << " (operation " << epoch.serial << ", device "
         << static_cast<int>(stream.device_index()) << ", stream " << stream.id() << ")";
    return text.str();
}

void World::host_waits(c10::DeviceIndex device, const Clock &clock) {
    devices.at(static_cast<size_t>(device)).host.join(clock);
}

void World::host_waits_for_all(c10::DeviceIndex device) {
    for (const StreamState &state : streams) {
        if (state.stream.device_index() == device) {
            host_waits(device, state.clock);
        }
    }
}

void World::reset() {
    streams.clear();
    for (Device &device : devices) {
        device.host = {};
        device.stream_indices.clear();
    }
}

namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<int64_t, kDevices> this_stream{};

} // namespace

c10::DeviceIndex current_device() {
    return this_device;
}

void set_current_device(c10::DeviceIndex device) {
    TORCH_CHECK(device >= 0 && device < kDevices, "no simulated device ", static_cast<int>(device));
    this_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
    const c10::DeviceIndex index = device < 0 ? this_device : device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index),
                       this_stream.at(static_cast<size_t>(index)));
}

void set_current_stream(c10::Stream stream) {
    this_stream.at(static_cast<size_t>(stream.device_index())) = stream.id();
}

c10::Stream new_stream(c10::DeviceIndex device) {
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    const c10::DeviceIndex index = device < 0 ? this_device : device;
    const int64_t id = world().devices.at(static_cast<size_t>(index)).next_stream++;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
}

void *handle_of(c10::Stream stream) {
    const auto number = static_cast<uintptr_t>(stream.id()) * kDevices +
                        static_cast<uintptr_t>(stream.device_index());
    return reinterpret_cast<void *>(number + 1); /* never NULL, which means no stream */
}

c10::Stream stream_of(void *handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle) - 1;
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(number % kDevices));
    return c10::Stream(c10::Stream::UNSAFE, device, static_cast<int64_t>(number / kDevices));
}

} // namespace sim
