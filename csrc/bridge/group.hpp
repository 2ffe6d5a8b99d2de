/* Handles of process groups: see group.cpp. */
#ifndef FSDP_C_BRIDGE_GROUP_HPP
#define FSDP_C_BRIDGE_GROUP_HPP

#include "bridge.hpp"
#include "group.h"
#include "wait.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <memory>

namespace fct {

/* The kind of a backend: the dtypes that it supports, and how its works are waited for. */
enum class BackendKind : uint8_t { unknown = 0, gloo, nccl_like, fake, python, other };

constexpr size_t kDeviceTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

} // namespace fct

struct fct_pg {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    pybind11::object python; /* the object if the group is a Python class, else empty */
    /* By device type; filled on first use. */
    std::array<fct::BackendKind, fct::kDeviceTypes> kinds{};
    std::shared_ptr<void> *attachment = nullptr; /* see fct_pg_attachment; filled on first use */
    c10::intrusive_ptr<c10d::ProcessGroup> shm_group; /* see make_shm_group; filled on first use */
    std::unique_ptr<progress_thread, decltype(&progress_thread_free)> progress{
        progress_thread_new(), &progress_thread_free}; /* null: no memory */
    /* Shared with the works of the group, which may outlive the handle. */
    std::shared_ptr<fct::WaitStop> stop = std::make_shared<fct::WaitStop>();
    std::atomic<size_t> owners{1}; /* fct_pg_retain needs no GIL */
};

namespace fct {

/* Returns the kind of the backend for a device type. */
BackendKind backend_kind(fct_pg *pg, c10::DeviceType type);

using Handle = std::unique_ptr<fct_pg, decltype(&fct_pg_release)>;

/* Returns a new reference to the handle of a ProcessGroup object. A group has one handle, which its
 * users share. */
Handle open_handle(PyObject *obj);

} // namespace fct

#endif
