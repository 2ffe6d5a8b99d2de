/* Handles of process groups, and the kinds of their backends.
 *
 * A group is resolved once, by name, and its handle caches the kinds of its backends. A group whose
 * Python type is a subclass of ProcessGroup is called through its Python methods. torch's
 * PyProcessGroup does not forward all_gather_single and reduce_scatter_single to Python overrides,
 * nor _allgather_base and _reduce_scatter_base, their names before torch 2.13. */
#include "group.hpp"

#include "gil.hpp"
#include "pyobject.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <unordered_map>

using fct::BackendKind;
using fct::guarded;

namespace {

BackendKind kind_of_name(const std::string &name) {
    if (name == "gloo") {
        return BackendKind::gloo;
    }
    if (name == "fake") {
        return BackendKind::fake;
    }
    for (const char *backend : {"nccl", "ncclx", "rccl", "xccl", "hccl", "mccl"}) {
        if (name == backend) {
            return BackendKind::nccl_like;
        }
    }
    return BackendKind::other;
}

/* All handles, by group: users of a group share one handle and its progress thread. The GIL guards
 * the table. */
using Handles = std::unordered_map<const c10d::ProcessGroup *, fct_pg *>;

Handles &handles() {
    static auto *const table = new Handles();
    return *table;
}

/* Returns the handle of `group`, and creates it at the first call. `object` is the Python object of
 * the group. */
fct_pg *get_handle(c10::intrusive_ptr<c10d::ProcessGroup> group, pybind11::object object) {
    const auto entry = handles().find(group.get());
    if (entry != handles().end()) {
        entry->second->owners++;
        return entry->second;
    }
    auto pg = std::make_unique<fct_pg>();
    pg->group = std::move(group);
    const pybind11::handle type = reinterpret_cast<PyObject *>(Py_TYPE(object.ptr()));
    if (!type.is(pybind11::type::of<c10d::ProcessGroup>())) {
        pg->python = std::move(object);
    }
    handles().emplace(pg->group.get(), pg.get());
    return pg.release();
}

} // namespace

namespace fct {

BackendKind backend_kind(fct_pg *pg, c10::DeviceType type) {
    if (pg->python) {
        return BackendKind::python;
    }
    const auto index = static_cast<size_t>(type);
    if (index >= kDeviceTypes) {
        return BackendKind::other;
    }
    if (pg->kinds[index] == BackendKind::unknown) {
        try {
            pg->kinds[index] = kind_of_name(pg->group->getBackend(type)->getBackendName());
        } catch (...) {
            /* No backend for this device: the collective raises. A later call may find one. */
            return BackendKind::other;
        }
    }
    return pg->kinds[index];
}

Handle open_handle(PyObject *obj) {
    auto object = pybind11::reinterpret_borrow<pybind11::object>(obj);
    auto group = pybind11::cast<c10::intrusive_ptr<c10d::ProcessGroup>>(object);
    TORCH_CHECK_TYPE(group, "expected a process group, not None"); /* the cast accepts None */
    return {get_handle(std::move(group), std::move(object)), &fct_pg_release};
}

} // namespace fct

extern "C" {

int fct_pg_resolve(const char *name, fct_pg **out) {
    return guarded("fct_pg_resolve", [&] {
        const fct::HeldGil held;
        auto group = c10d::resolve_process_group(name);
        pybind11::object object = pybind11::cast(group);
        *out = get_handle(std::move(group), std::move(object));
    });
}

int fct_py_pg(PyObject *obj, fct_pg **out) {
    return guarded("fct_py_pg", [&] { *out = fct::open_handle(obj).release(); });
}

void fct_pg_retain(fct_pg *pg) {
    pg->owners++;
}

void fct_pg_release(fct_pg *pg) {
    if (pg == nullptr || --pg->owners > 0) {
        return;
    }
    handles().erase(pg->group.get());
    auto group = std::move(pg->group);
    auto shm_group = std::move(pg->shm_group);
    delete pg;
    /* The destructor of a group joins threads that may need the GIL. */
    pybind11::gil_scoped_release released;
    shm_group.reset();
    group.reset();
}

/* torch's FSDP2 does not check whether the backend supports PREMUL_SUM; it only avoids it on MTIA.
 * Only gloo is known to refuse it, so fsdp_c divides the gradients for gloo. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device) {
    return fct::backend_kind(pg, static_cast<c10::DeviceType>(device.type)) != BackendKind::gloo;
}

} // extern "C"
