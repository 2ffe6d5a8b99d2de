/* Time on the simulated device: vector clocks of streams, of events and of the host.
 *
 * A lane is a stream of a device under a small number. Every operation is a tick of its lane; a
 * clock says, for each lane, up to which tick everything has happened before. What a clock covers
 * needs no luck to be over. One lock (`world()`) guards all of it. */
#ifndef SIM_CLOCK_H
#define SIM_CLOCK_H

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

using Tick = uint64_t;

class Clock {
  public:
    void join(const Clock &other);
    bool covers(int lane, Tick tick) const;
    bool covers(const Clock &other) const;
    Tick advance(int lane); /* the lane's next tick */

  private:
    std::vector<Tick> ticks_; /* by lane; what is missing is 0 */
};

/* What was done to memory last: by which operation, and when. */
struct Epoch {
    int lane = -1; /* -1: nobody */
    Tick tick = 0;
    const char *name = "";
    uint64_t serial = 0; /* of the operation, in the order of the host's calls */
};

struct Lane {
    c10::Stream stream;
    Clock clock;
};

struct Device {
    Clock host; /* what the host knows to be over */
    std::map<int64_t, int> lanes;
    int64_t next_stream = 1;
};

struct Event {
    Clock clock;
    bool recorded = false;
};

/* All clocks, the devices and the lock. */
struct World {
    std::recursive_mutex mutex;
    std::array<Device, kDevices> devices;
    std::vector<Lane> lanes;
    uint64_t serial = 0;
    bool checks = true;
    uint64_t late_seed = 0; /* not 0: writes that nobody has waited for may come late, see Memory */
    bool foresees = false;  /* writes that may come early are noted, see Foresight */

    int lane(c10::Stream stream);
    /* A tick of the stream for an operation of that name, after all that the host knows. */
    Epoch begin(c10::Stream stream, const char *name);
    bool covers(int lane, const Epoch &epoch) const;
    std::string describe(const Epoch &epoch) const;
    void host_waits(c10::DeviceIndex device, const Clock &clock);
    void host_waits_for_all(c10::DeviceIndex device);
    /* Everything that was queued is over; lanes are numbered anew. */
    void forget();
};

World &world();

/* This thread's device and the current stream of each. */
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

/* The handle that kernels get for a stream, and back. */
void *handle_of(c10::Stream stream);
c10::Stream stream_of(void *handle);

} // namespace sim

#endif
