/* Allocators of the buffers of collectives; see allocator.h. To add an allocator, add an entry to
 * kAllocators. */
#include "allocator.h"

#include "group.hpp"
#include "pyobject.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

using fct::guarded;

namespace {

struct Allocator {
    const char *name;
    bool (*serves)(fct_pg &pg, c10::Device device);
    at::Tensor (*empty)(fct_pg &pg, int64_t numel, c10::ScalarType type, c10::Device device);
};

/* ---- the backend of a process group, such as NCCL: it registers memory with the network ---- */

c10::intrusive_ptr<c10d::Backend> backend_of(fct_pg &pg, c10::Device device) {
    return pg.group->getBackend(device.type());
}

pybind11::object python_backend(fct_pg &pg, c10::Device device) {
    return pg.python.attr("_get_backend")(device);
}

bool backend_serves(fct_pg &pg, c10::Device device) {
    return pg.python ? python_backend(pg, device).attr("supports_tensor_alloc")(device).cast<bool>()
                     : backend_of(pg, device)->supportsTensorAlloc(device.index());
}

at::Tensor backend_empty(fct_pg &pg, int64_t numel, c10::ScalarType type, c10::Device device) {
    using namespace pybind11::literals;
    if (pg.python) {
        return python_backend(pg, device)
            .attr("allocate_tensor")(numel, "dtype"_a = type, "device"_a = device)
            .cast<at::Tensor>();
    }
    const auto backend = backend_of(pg, device);
    pybind11::gil_scoped_release released; /* registering memory with the network takes time */
    return backend->allocateTensor(numel, at::dtype(type).device(device));
}

/* ---- the table ---- */

constexpr Allocator kAllocators[] = {
    {"process group", &backend_serves, &backend_empty},
};

const Allocator &find_allocator(const std::string &name) {
    for (const Allocator &allocator : kAllocators) {
        if (name == allocator.name) {
            return allocator;
        }
    }
    TORCH_CHECK_VALUE(false, "no allocator is named '", name, "'");
}

} // namespace

struct fct_allocator {
    const Allocator &methods;
    fct::Handle pg;
};

extern "C" {

int fct_py_allocator(const char *name, PyObject *group, fct_allocator **out) {
    return guarded("fct_py_allocator", [&] {
        *out = new fct_allocator{find_allocator(name), fct::open_handle(group)};
    });
}

void fct_allocator_free(fct_allocator *allocator) {
    delete allocator;
}

int fct_allocator_serves(fct_allocator *allocator, fct_device device, bool *serves) {
    return guarded("fct_allocator_serves", [&] {
        *serves = allocator->methods.serves(*allocator->pg, fct::device(device));
    });
}

int fct_allocator_empty(fct_allocator *allocator, int64_t numel, fct_dtype dtype, fct_device device,
                        fct_tensor **out) {
    return guarded("fct_allocator_empty", [&] {
        const c10::InferenceMode no_inference(false);
        const fct::BelowAutograd below_autograd;
        const c10::Device torch_device = fct::device(device);
        const c10::ScalarType type = fct::scalar_type(dtype);
        at::Tensor buffer = allocator->methods.empty(*allocator->pg, numel, type, torch_device);
        TORCH_CHECK(buffer.numel() == numel && buffer.scalar_type() == type && buffer.dim() == 1 &&
                        buffer.device() == torch_device && buffer.is_contiguous(),
                    "allocate_tensor of the ", allocator->methods.name, " returned ",
                    buffer.sizes(), " of ", buffer.scalar_type(), " on ", buffer.device(),
                    "; expected a contiguous tensor of ", numel, " elements of ", type, " on ",
                    torch_device);
        *out = fct::new_handle(std::move(buffer));
    });
}

} // extern "C"
