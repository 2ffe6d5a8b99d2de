/* Vector clocks, for tests/accelerator/device and tests/cuda/runtime.
 *
 * Each stream has an index. Every operation is one tick of its stream. A clock stores, for each
 * stream index, the tick up to which all operations are ordered before the clock's owner. */
#ifndef SIMULATION_VECTOR_CLOCK_H
#define SIMULATION_VECTOR_CLOCK_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

using Tick = uint64_t;

class Clock {
  public:
    void join(const Clock &other) {
        if (ticks_.size() < other.ticks_.size()) {
            ticks_.resize(other.ticks_.size());
        }
        for (size_t i = 0; i < other.ticks_.size(); i++) {
            ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
        }
    }

    bool covers(int stream_index, Tick tick) const {
        const auto index = static_cast<size_t>(stream_index);
        return tick == 0 || (index < ticks_.size() && ticks_[index] >= tick);
    }

    bool covers(const Clock &other) const {
        for (size_t i = 0; i < other.ticks_.size(); i++) {
            if (!covers(static_cast<int>(i), other.ticks_[i])) {
                return false;
            }
        }
        return true;
    }

    Tick tick_of(int stream_index) const {
        const auto index = static_cast<size_t>(stream_index);
        return index < ticks_.size() ? ticks_[index] : 0;
    }

    /* Returns the stream's next tick. */
    Tick advance(int stream_index) {
        const auto index = static_cast<size_t>(stream_index);
        if (ticks_.size() <= index) {
            ticks_.resize(index + 1);
        }
        return ++ticks_[index];
    }

  private:
    std::vector<Tick> ticks_; /* by stream index; missing entries are 0 */
};

} // namespace sim

#endif
