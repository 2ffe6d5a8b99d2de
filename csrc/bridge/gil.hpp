/* RAII classes for the GIL. gil.h has the scopes of the core. All classes are valid on a thread
 * whose scope has released the GIL. */
#ifndef FSDP_C_BRIDGE_GIL_HPP
#define FSDP_C_BRIDGE_GIL_HPP

#include "bridge.hpp"

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <optional>

#include "gil.h"

namespace fct {

/* Whether a scope of this thread has released the GIL. */
bool gil_is_released() noexcept;
/* Before and after a call for a device with streams: begin releases the GIL, and end takes the GIL
 * again outside of scopes. Under a dispatch mode, which is Python code, the GIL stays held. */
void begin_device_call() noexcept;
void end_device_call() noexcept;

/* Surrounds a call that launches or allocates on a device. */
class DeviceCall {
  public:
    explicit DeviceCall(c10::DeviceType type)
        : has_streams_(type != c10::DeviceType::CPU && type != c10::DeviceType::Meta) {
        if (has_streams_) {
            begin_device_call();
        }
    }
    DeviceCall(const DeviceCall &) = delete;
    DeviceCall &operator=(const DeviceCall &) = delete;
    ~DeviceCall() {
        if (has_streams_) {
            end_device_call();
        }
    }

  private:
    bool has_streams_;
};

/* Releases the GIL for code that blocks, or that needs locks of threads that may wait for the
 * GIL. */
class ReleasedGil {
  public:
    ReleasedGil() {
        if (!gil_is_released()) {
            released_.emplace();
        }
    }

  private:
    std::optional<pybind11::gil_scoped_release> released_;
};

/* Takes the GIL for code that needs Python. */
class HeldGil {
  public:
    HeldGil() {
        if (gil_is_released()) {
            held_.emplace();
        }
    }

  private:
    std::optional<pybind11::gil_scoped_acquire> held_;
};

} // namespace fct

#endif
