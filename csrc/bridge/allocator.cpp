/* Allocators of the buffers of collectives; see allocator.h. To add an allocator, add an entry to
 * kAllocators. */
#include "allocator.h"

#include "gil.hpp"
#include "group.hpp"
#include "pyobject.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

using fct::guarded;

namespace {

/* The object that an allocator calls. */
struct Source {
    pybind11::object object; /* the argument of fct_py_allocator */
    fct::Handle pg;          /* of `object` if that is a process group */
};

struct Allocator {
    const char *name;
    bool has_group; /* the source is a process group */
    bool (*serves)(const Source &source, c10::Device device);
    /* `user`: the process group of the collective; see fct_allocator_empty. */
    at::Tensor (*empty)(const Source &source, fct_pg *user, int64_t numel, c10::ScalarType type,
                        c10::Device device);
};

/* ---- the backend of a process group, such as NCCL: it registers memory with the network ---- */

c10::intrusive_ptr<c10d::Backend> backend_of(fct_pg &pg, c10::Device device) {
    return pg.group->getBackend(device.type());
}

pybind11::object python_backend(fct_pg &pg, c10::Device device) {
    return pg.python.attr("_get_backend")(device);
}

bool backend_serves(const Source &source, c10::Device device) {
    fct_pg &pg = *source.pg;
    const fct::HeldGil held;
    return pg.python ? python_backend(pg, device).attr("supports_tensor_alloc")(device).cast<bool>()
                     : backend_of(pg, device)->supportsTensorAlloc(device.index());
}

at::Tensor backend_empty(const Source &source, fct_pg *user, int64_t numel, c10::ScalarType type,
                         c10::Device device) {
    using namespace pybind11::literals;
    (void)user;
    fct_pg &pg = *source.pg;
    if (pg.python) {
        const fct::HeldGil held;
        return python_backend(pg, device)
            .attr("allocate_tensor")(numel, "dtype"_a = type, "device"_a = device)
            .cast<at::Tensor>();
    }
    const auto backend = backend_of(pg, device);
    const fct::ReleasedGil released; /* registering memory with the network takes time */
    return backend->allocateTensor(numel, at::dtype(type).device(device));
}

/* ---- torch's symmetric memory: a memory pool whose tensors all ranks of a group map ---- */

/* The source is a SymmMemAllGather or SymmMemReduceScatter of torch. Its call registers the tensors
 * with the process group, and then issues the collective. */
at::Tensor symmetric_empty(const Source &source, fct_pg *user, int64_t numel, c10::ScalarType type,
                           c10::Device device) {
    using namespace pybind11::literals;
    const fct::HeldGil held;
    const pybind11::object tensor = source.object.attr("allocate")(
        pybind11::make_tuple(numel), "dtype"_a = type, "device"_a = device);
    if (user != nullptr) {
        const auto memory = pybind11::module_::import("torch.distributed._symmetric_memory");
        const pybind11::object group = user->python ? user->python : pybind11::cast(user->group);
        memory.attr("rendezvous")(tensor, "group"_a = group.attr("group_name"));
    }
    return tensor.cast<at::Tensor>();
}

bool symmetric_serves(const Source &source, c10::Device device) {
    (void)source, (void)device;
    return true;
}

/* ---- the table ---- */

constexpr Allocator kAllocators[] = {
    {"process group", true, &backend_serves, &backend_empty},
    {"symmetric memory", false, &symmetric_serves, &symmetric_empty},
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
    Source source;
};

extern "C" {

int fct_py_allocator(const char *name, PyObject *source, fct_allocator **out) {
    return guarded("fct_py_allocator", [&] {
        const Allocator &methods = find_allocator(name);
        *out = new fct_allocator{
            methods,
            {pybind11::reinterpret_borrow<pybind11::object>(source),
             methods.has_group ? fct::open_handle(source) : fct::Handle(nullptr, &fct_pg_release)}};
    });
}

void fct_allocator_free(fct_allocator *allocator) {
    delete allocator;
}

int fct_allocator_serves(fct_allocator *allocator, fct_device device, bool *serves) {
    return guarded("fct_allocator_serves", [&] {
        *serves = allocator->methods.serves(allocator->source, fct::device(device));
    });
}

int fct_allocator_empty(fct_allocator *allocator, fct_pg *pg, int64_t numel, fct_dtype dtype,
                        fct_device device, fct_tensor **out) {
    return guarded("fct_allocator_empty", [&] {
        const c10::InferenceMode no_inference(false);
        const fct::BelowAutograd below_autograd;
        const c10::Device torch_device = fct::device(device);
        const c10::ScalarType type = fct::scalar_type(dtype);
        at::Tensor buffer =
            allocator->methods.empty(allocator->source, pg, numel, type, torch_device);
        TORCH_CHECK(buffer.numel() == numel && buffer.scalar_type() == type && buffer.dim() == 1 &&
                        buffer.device() == torch_device && buffer.is_contiguous(),
                    "the allocator '", allocator->methods.name, "' returned ", buffer.sizes(),
                    " of ", buffer.scalar_type(), " on ", buffer.device(),
                    "; expected a contiguous tensor of ", numel, " elements of ", type, " on ",
                    torch_device);
        *out = fct::new_handle(std::move(buffer));
    });
}

} // extern "C"
