/* Process groups as the files of this directory share them: see group.cpp. */
#ifndef FSDP_C_TORCH_GROUP_H
#define FSDP_C_TORCH_GROUP_H

#include "bridge.h"
#include "direct.h"
#include "progress.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>

namespace fct {

/* How the backend that serves a device behaves. */
enum class Kind : uint8_t { unknown = 0, gloo, nccl_like, fake, python, other };

constexpr size_t kDeviceTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

} // namespace fct

struct fct_pg {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    pybind11::object python; /* the Python object where the group is a Python class, else empty */
    std::array<fct::Kind, fct::kDeviceTypes> kinds{}; /* by device type; filled when asked for */
    std::shared_ptr<fct::Negotiation> negotiation;    /* once rows have been moved on the CPU */
    c10::intrusive_ptr<c10d::ProcessGroup> direct;    /* where it was agreed upon */
    fct::ProgressThread progress_thread;
    size_t owners = 1;
};

namespace fct {

/* How the backend that serves devices of a type behaves. */
Kind kind_for(fct_pg *pg, c10::DeviceType type);

using Handle = std::unique_ptr<fct_pg, decltype(&fct_pg_release)>;

/* A handle of a ProcessGroup object, new or shared. */
Handle open_object(PyObject *obj);

} // namespace fct

#endif
