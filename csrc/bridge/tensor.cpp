/* Tensors and their storages.
 *
 * Properties, aliases and storage memory use TensorImpl and StorageImpl directly. Every step calls
 * these functions for every parameter, and the dispatcher would take longer than they do.
 * Computations go through at:: below autograd and ADInplaceOrView. They record no history and bump
 * no version counters. */
#include "tensor.h"

#include "../kernels/pool.h"
#include "bridge.hpp"
#include "gil.hpp"
#include "memory.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

using fct::BelowAutograd;
using fct::Borrowed;
using fct::DeviceCall;
using fct::guarded;
using fct::impl;
using fct::new_handle;
using fct::view_half_as_real;

namespace {

void *first_element(const c10::TensorImpl *t, int64_t offset_bytes) {
    c10::StorageImpl *storage = t->unsafe_storage().unsafeGetStorageImpl();
    void *base = storage->mutable_data(); /* throws for wrappers without memory */
    return base == nullptr ? nullptr : static_cast<char *>(base) + offset_bytes;
}

/* Whether the tensor is a lazy conjugate or negative view. */
bool is_lazy(const c10::TensorImpl *t) {
    return t->key_set().has_any(
        c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}));
}

void read_facts(const c10::TensorImpl *t, fct_facts *out) {
    out->dtype = static_cast<fct_dtype>(c10::typeMetaToScalarType(t->dtype()));
    out->itemsize = static_cast<int64_t>(t->itemsize());
    out->device = fct::device(t->device());
    if (t->has_symbolic_sizes_strides()) {
        return;
    }
    out->numel = t->numel();
    if (t->layout() != c10::Layout::Strided || t->is_nested() || !t->has_storage()) {
        return;
    }
    out->storage_bytes = static_cast<int64_t>(t->unsafe_storage().nbytes());
    out->offset_bytes = t->storage_offset() * out->itemsize;
    out->contiguous = t->is_contiguous() && !is_lazy(t);
    out->data = first_element(t, out->offset_bytes);
    out->strided = out->data != nullptr || out->numel == 0 || !t->is_python_dispatch();
}

/* The number of storage elements from the first element of an alias to its last one, inclusive.
 * Throws on overflow. */
int64_t alias_extent(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    int64_t last = 0;
    bool empty = false, fits = true;
    for (size_t i = 0; i < sizes.size(); i++) {
        int64_t step = 0;
        TORCH_CHECK(sizes[i] >= 0 && strides[i] >= 0, "an alias with sizes ", sizes,
                    " and strides ", strides, " has a negative size or stride");
        if (sizes[i] == 0) {
            empty = true;
            continue;
        }
        fits = fits && !__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) &&
               !__builtin_add_overflow(last, step, &last);
    }
    TORCH_CHECK(empty || (fits && last < INT64_MAX), "an alias with sizes ", sizes, " and strides ",
                strides, " is too large");
    return empty ? 0 : last + 1;
}

void check_alias(const c10::TensorImpl *base, int64_t itemsize, c10::IntArrayRef sizes,
                 c10::IntArrayRef strides, int64_t offset) {
    TORCH_CHECK(base->layout() == c10::Layout::Strided && base->has_storage(),
                "an alias needs a dense tensor with a storage");
    const int64_t extent = alias_extent(sizes, strides);
    const int64_t bytes = static_cast<int64_t>(base->unsafe_storage().nbytes());
    int64_t end = 0;
    const bool fits = offset >= 0 && !__builtin_add_overflow(offset, extent, &end) &&
                      !__builtin_mul_overflow(end, itemsize, &end);
    TORCH_CHECK(fits && end <= bytes, "an alias with sizes ", sizes, ", strides ", strides,
                " and offset ", offset, " (", itemsize,
                " bytes per element) does not fit into a storage of ", bytes, " bytes");
}

/* The alias has the base's key set, so it is an inference tensor if the base is one. The
 * constructor removes Python keys. An alias of a conjugate view has the unconjugated values of the
 * memory. */
c10::TensorImpl *make_alias(c10::TensorImpl *base, caffe2::TypeMeta dtype, int32_t ndim,
                            const int64_t *sizes, const int64_t *strides, int64_t offset) {
    const c10::IntArrayRef shape(sizes, static_cast<size_t>(ndim));
    const c10::IntArrayRef steps(strides, static_cast<size_t>(ndim));
    check_alias(base, static_cast<int64_t>(dtype.itemsize()), shape, steps, offset);
    const c10::DispatchKeySet keys =
        base->key_set() -
        c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    auto result = c10::make_intrusive<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base->unsafe_storage()), keys, dtype);
    result->set_sizes_and_strides(shape, steps, offset);
    return result.release();
}

} // namespace

namespace fct {

c10::ScalarType scalar_type(fct_dtype dtype) {
    TORCH_CHECK(dtype >= 0 && dtype < static_cast<fct_dtype>(c10::ScalarType::NumOptions) &&
                    dtype != static_cast<fct_dtype>(c10::ScalarType::Undefined),
                "no such dtype number: ", dtype);
    return static_cast<c10::ScalarType>(dtype);
}

} // namespace fct

extern "C" {

void fct_tensor_retain(fct_tensor *t) {
    c10::raw::intrusive_ptr::incref(impl(t));
}

void fct_tensor_release(fct_tensor *t) {
    if (t != nullptr) {
        at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl(t)))
            .reset();
    }
}

/* A resizable storage owns memory of a torch allocator. The memory of an array, a DLPack capsule or
 * a file is not resizable, and may have owners without a reference to the storage. */
bool fct_tensor_is_sole(const fct_tensor *t) {
    const c10::TensorImpl *tensor = impl(t);
    if (c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl *>(tensor)) != 1 ||
        !tensor->has_storage() || tensor->unsafe_storage().use_count() != 1) {
        return false;
    }
    c10::StorageImpl *storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    return storage->resizable() && storage->pyobj_slot()->load_pyobj() == nullptr;
}

void fct_tensor_facts(const fct_tensor *t, fct_facts *out) {
    fct_facts facts = {};
    facts.dtype = FCT_NO_DTYPE;
    try {
        read_facts(impl(t), &facts);
    } catch (...) { /* a wrapper that refuses access, possibly with a Python error */
        const fct::HeldGil held;
        PyErr_Clear();
        facts.data = nullptr;
        facts.contiguous = false;
        facts.strided = false;
    }
    *out = facts;
}

fct_device fct_tensor_device(const fct_tensor *t) {
    return fct::device(impl(t)->device());
}

bool fct_tensor_requires_grad(const fct_tensor *t) {
    return impl(t)->requires_grad();
}

uint32_t fct_tensor_version(const fct_tensor *t) {
    return impl(t)->is_inference() ? 0 : impl(t)->version_counter().current_version();
}

void fct_tensor_bump(fct_tensor *t) {
    if (!impl(t)->is_inference()) {
        impl(t)->bump_version();
    }
}

void fct_tensor_share_version(fct_tensor *t, const fct_tensor *other) {
    if (!impl(t)->is_inference() && !impl(other)->is_inference()) {
        impl(t)->set_version_counter(impl(other)->version_counter());
    }
}

bool fct_tensor_is_view(const fct_tensor *t) {
    try {
        return Borrowed(t)->is_view();
    } catch (...) {
        return false;
    }
}

bool fct_tensor_is_like(const fct_tensor *t, const fct_tensor *other) {
    const c10::TensorImpl &a = *fct::impl(t), &b = *fct::impl(other);
    return a.sizes() == b.sizes() && a.strides() == b.strides() &&
           a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() &&
           a.device() == b.device() && a.key_set() == b.key_set() &&
           a.unsafe_storage().nbytes() == b.unsafe_storage().nbytes();
}

bool fct_dtype_is_floating(fct_dtype dtype) {
    return dtype >= 0 && dtype < static_cast<fct_dtype>(c10::ScalarType::NumOptions) &&
           c10::isFloatingType(static_cast<c10::ScalarType>(dtype));
}

int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out) {
    return guarded("fct_tensor_empty", [&] {
        /* A parameter that is created in inference mode may be trained later. */
        const c10::InferenceMode no_inference(false);
        const BelowAutograd below_autograd;
        const c10::ScalarType type = fct::scalar_type(dtype);
        if (device.type == FCT_DEVICE_CPU) {
            *out = new_handle(fct::pooled_empty(numel, type));
            return;
        }
        const c10::Device torch_device = fct::device(device);
        const DeviceCall call(torch_device.type());
        *out = new_handle(at::empty({numel}, at::dtype(type).device(torch_device)));
    });
}

void fct_memory_begin_round(void) {
    fck_pool_begin_round();
}

void fct_memory_trim(void) {
    fck_pool_trim();
}

int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                     const int64_t *strides, int64_t offset, fct_tensor **out) {
    return guarded("fct_tensor_alias", [&] {
        *out =
            fct::handle(make_alias(impl(base), impl(base)->dtype(), ndim, sizes, strides, offset));
    });
}

int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                        const int64_t *strides, int64_t offset, fct_tensor **out) {
    return guarded("fct_tensor_alias_as", [&] {
        const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(fct::scalar_type(dtype));
        *out = fct::handle(make_alias(impl(base), type, ndim, sizes, strides, offset));
    });
}

int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out) {
    return guarded("fct_tensor_contiguous", [&] {
        const BelowAutograd below_autograd;
        const DeviceCall call(impl(t)->device_type());
        *out = new_handle(Borrowed(t)->resolve_conj().resolve_neg().contiguous());
    });
}

int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out) {
    return guarded("fct_tensor_cast", [&] {
        const BelowAutograd below_autograd;
        Borrowed from(t);
        const c10::ScalarType type = fct::scalar_type(dtype);
        const DeviceCall call(impl(t)->device_type());
        if (from->is_complex() && !c10::isComplexType(type)) {
            *out = new_handle(at::real(*from).to(type).contiguous());
        } else {
            *out = new_handle(from->to(type));
        }
    });
}

int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out) {
    return guarded("fct_tensor_zeros_like", [&] {
        const BelowAutograd below_autograd;
        const DeviceCall call(impl(t)->device_type());
        *out = new_handle(at::zeros_like(*Borrowed(t)));
    });
}

int fct_tensor_cut(fct_tensor *t, int32_t dim, int64_t start, int64_t length, int64_t padded,
                   fct_tensor **local, fct_tensor **flat) {
    return guarded("fct_tensor_cut", [&] {
        const c10::NoGradGuard no_grad;
        const DeviceCall call(impl(t)->device_type());
        const at::Tensor source = Borrowed(t)->narrow(dim, start, length);
        std::vector<int64_t> sizes = source.sizes().vec();
        sizes.at(static_cast<size_t>(dim)) = padded;
        const at::Tensor memory =
            length == padded ? source.new_empty(sizes) : source.new_zeros(sizes);
        at::Tensor unpadded = memory.narrow(dim, 0, length).detach(); /* detach returns no view */
        if (source.numel() > 0) {
            unpadded.copy_(source);
        }
        at::Tensor one_dim = memory.view({memory.numel()});
        *local = new_handle(std::move(unpadded));
        *flat = new_handle(std::move(one_dim));
    });
}

int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src) {
    return guarded("fct_tensor_copy", [&] {
        const BelowAutograd below_autograd;
        const DeviceCall call(impl(dst)->device_type());
        Borrowed(dst)->copy_(*Borrowed(src));
    });
}

int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src) {
    return guarded("fct_tensor_upload", [&] {
        const BelowAutograd below_autograd;
        Borrowed to(dst);
        Borrowed from(src);
        const fct::ReleasedGil released;
        to->copy_(*from, /*non_blocking=*/true);
    });
}

int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out) {
    return guarded("fct_tensor_to_host", [&] {
        const BelowAutograd below_autograd;
        Borrowed from(t);
        at::Tensor copy;
        {
            const fct::ReleasedGil released;
            copy = from->to(c10::Device(c10::kCPU), from->scalar_type(), non_blocking);
        }
        *out = new_handle(std::move(copy));
    });
}

int fct_tensor_add(fct_tensor *dst, const fct_tensor *src) {
    return guarded("fct_tensor_add", [&] {
        const BelowAutograd below_autograd;
        const DeviceCall call(impl(dst)->device_type());
        view_half_as_real(*Borrowed(dst)).add_(view_half_as_real(*Borrowed(src)));
        if (!impl(dst)->is_inference()) {
            impl(dst)->bump_version();
        }
    });
}

int fct_tensor_div(fct_tensor *t, double divisor) {
    return guarded("fct_tensor_div", [&] {
        const BelowAutograd below_autograd;
        const DeviceCall call(impl(t)->device_type());
        view_half_as_real(*Borrowed(t)).div_(divisor);
    });
}

int fct_tensor_set_requires_grad(fct_tensor *t, bool value) {
    return guarded("fct_tensor_set_requires_grad", [&] { Borrowed(t)->requires_grad_(value); });
}

int fct_tensor_set_grad_dtype(fct_tensor *t, fct_dtype dtype) {
    return guarded("fct_tensor_set_grad_dtype", [&] {
        std::optional<at::ScalarType> value;
        if (dtype != FCT_NO_DTYPE) {
            value = fct::scalar_type(dtype);
        }
        Borrowed(t)->set_grad_dtype(value);
    });
}

int fct_storage_alloc(fct_tensor *t, int64_t nbytes) {
    return guarded("fct_storage_alloc", [&] {
        TORCH_CHECK(impl(t)->has_storage(), "a tensor without a storage cannot be given memory");
        c10::StorageImpl *storage = impl(t)->unsafe_storage().unsafeGetStorageImpl();
        const int64_t current = static_cast<int64_t>(storage->nbytes());
        if (current == nbytes) {
            return;
        }
        TORCH_CHECK(nbytes >= 0 && current == 0, "cannot give ", nbytes,
                    " bytes to a storage that holds ", current);
        TORCH_CHECK(storage->resizable() && storage->allocator() != nullptr,
                    "Trying to resize storage that is not resizable");
        c10::OptionalDeviceGuard guard;
        if (storage->device_type() != c10::DeviceType::CPU &&
            storage->device_type() != c10::DeviceType::Meta) {
            guard.reset_device(storage->device());
        }
        const DeviceCall call(storage->device_type());
        storage->set_data_ptr_noswap(storage->allocator()->allocate(static_cast<size_t>(nbytes)));
        storage->set_nbytes(static_cast<size_t>(nbytes));
    });
}

void fct_storage_free(fct_tensor *t) {
    if (!impl(t)->has_storage()) {
        return;
    }
    c10::StorageImpl *storage = impl(t)->unsafe_storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    storage->set_nbytes(static_cast<size_t>(0));
}

bool fct_storage_can_free(const fct_tensor *t) {
    if (!impl(t)->has_storage()) {
        return true;
    }
    const c10::StorageImpl *storage = impl(t)->unsafe_storage().unsafeGetStorageImpl();
    return storage->resizable() || storage->nbytes() == 0;
}

bool fct_storage_is_shared(const fct_tensor *t) {
    return impl(t)->has_storage() && impl(t)->unsafe_storage().use_count() != 1;
}

void fct_storage_move(fct_tensor *from, fct_tensor *to) {
    c10::StorageImpl *source = impl(from)->unsafe_storage().unsafeGetStorageImpl();
    c10::StorageImpl *target = impl(to)->unsafe_storage().unsafeGetStorageImpl();
    const size_t bytes = source->nbytes();
    c10::DataPtr memory = source->set_data_ptr(c10::DataPtr(nullptr, source->device()));
    source->set_nbytes(static_cast<size_t>(0));
    target->set_data_ptr_noswap(std::move(memory));
    target->set_nbytes(bytes);
}

bool fct_grad_has(const fct_tensor *t) {
    return Borrowed(t)->grad().defined();
}

const void *fct_grad_identity(const fct_tensor *t) {
    return Borrowed(t)->grad().unsafeGetTensorImpl();
}

void fct_grad_take(fct_tensor *t, fct_tensor **out) {
    Borrowed tensor(t);
    *out = tensor->grad().defined()
               ? new_handle(std::exchange(tensor->mutable_grad(), at::Tensor()))
               : nullptr;
}

void fct_grad_put(fct_tensor *t, fct_tensor *grad) {
    Borrowed(t)->mutable_grad() = *Borrowed(grad);
}

} // extern "C"
