/* Vector clocks of the simulated device: of streams, events and the host.
 *
 * An operation that a clock covers is complete whatever the timing. `world().mutex` guards all
 * state of the simulated device. */
#ifndef SIM_CLOCK_H
#define SIM_CLOCK_H

#include "../../harness/simulation/vector_clock.h"

#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 8;
constexpr auto kType = c10::DeviceType::PrivateUse1;

/* An operation on a stream, and its tick: the last access of a piece of memory. */
struct Epoch {
    int stream_index = -1; /* -1: no operation */
    Tick tick = 0;
    const char *name = "";
    uint64_t serial = 0; /* number of the operation, in the order of the host's calls */
};

struct StreamState {
    c10::Stream stream;
    Clock clock;
};

struct Device {
    Clock host; /* operations for which the host has waited */
    std::map<int64_t, int> stream_indices;
    int64_t next_stream = 1;
};

struct Event {
    Clock clock;
    bool recorded = false;
};

/* All clocks, the devices and the mutex. */
struct World {
    std::recursive_mutex mutex;
    std::array<Device, kDevices> devices;
    std::vector<StreamState> streams;
    uint64_t serial = 0;
    uint64_t late_seed = 0;            /* not 0: delays writes, see Memory::hide_unordered_writes */
    bool records_early_writes = false; /* see EarlyWrites */

    int index_of(c10::Stream stream);
    /* Begins an operation: joins the host's clock into the stream's and advances its tick. */
    Epoch begin(c10::Stream stream, const char *name);
    /* Whether the stream's next operation is ordered after `epoch`. */
    bool covers(int stream_index, const Epoch &epoch) const;
    std::string describe(const Epoch &epoch) const;
    void host_waits(c10::DeviceIndex device, const Clock &clock);
    void host_waits_for_all(c10::DeviceIndex device);
    /* Drops all clocks and stream indices, as if the devices were idle. */
    void reset();
};

World &world();

/* The calling thread's current device, and its current stream on each device. */
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

/* Converts between a stream and the handle that kernels get. */
void *handle_of(c10::Stream stream);
c10::Stream stream_of(void *handle);

} // namespace sim

#endif
