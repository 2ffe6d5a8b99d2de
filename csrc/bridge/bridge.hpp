/* Shared by the .cpp files of this directory: casts between C handles and libtorch's objects, the
 * translation of C++ exceptions to Python errors, fault injection, and references to the owners of
 * hooks.
 *
 * Invariant: no C++ exception leaves an extern "C" function. Most fallible functions pass their
 * body to guarded(). Functions that inject no faults call set_error() in a catch block. */
#ifndef FSDP_C_BRIDGE_BRIDGE_HPP
#define FSDP_C_BRIDGE_BRIDGE_HPP

#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <utility>

#include "autograd.h"
#include "types.h"

/* Whether the torch release is at least major.minor. */
#define FCT_TORCH_AT_LEAST(major, minor)                                                           \
    (TORCH_VERSION_MAJOR > (major) ||                                                              \
     (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace fct {

/* Conversions between a handle and the TensorImpl behind it. */
inline c10::TensorImpl *impl(const fct_tensor *t) {
    return const_cast<c10::TensorImpl *>(reinterpret_cast<const c10::TensorImpl *>(t));
}

inline fct_tensor *handle(c10::TensorImpl *impl) {
    return reinterpret_cast<fct_tensor *>(impl);
}

/* Moves the tensor's reference to the caller of the boundary. */
inline fct_tensor *new_handle(at::Tensor &&t) {
    return handle(t.unsafeReleaseTensorImpl());
}

/* An at::Tensor over a borrowed handle. Does not change the reference count. */
class Borrowed {
  public:
    explicit Borrowed(const fct_tensor *t)
        : tensor_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl(t))) {
    }
    Borrowed(const Borrowed &) = delete;
    Borrowed &operator=(const Borrowed &) = delete;
    ~Borrowed() {
        (void)tensor_.unsafeReleaseTensorImpl();
    }
    at::Tensor &operator*() {
        return tensor_;
    }
    at::Tensor *operator->() {
        return &tensor_;
    }

  private:
    at::Tensor tensor_;
};

/* A ComplexHalf tensor as real pairs, because the CPU has no arithmetic for ComplexHalf. */
inline at::Tensor view_half_as_real(const at::Tensor &t) {
    return t.scalar_type() == c10::ScalarType::ComplexHalf ? at::view_as_real(t) : t;
}

/* A scope in which calls of at:: run below autograd. They record no history and bump no version
 * counter. */
struct BelowAutograd {
    at::AutoDispatchBelowADInplaceOrView below;
};

inline c10::Device device(fct_device d) {
    return c10::Device(static_cast<c10::DeviceType>(d.type), d.index);
}

inline fct_device device(c10::Device d) {
    return fct_device{static_cast<int8_t>(d.type()), static_cast<int8_t>(d.index())};
}

/* Throws if `dtype` is not a valid ScalarType number. */
c10::ScalarType scalar_type(fct_dtype dtype);

/* Decrements the fault counter, and throws the injected fault when it reaches 0. */
void fault_point(const char *function);
/* Translates the current C++ exception to a Python error and returns -1. Call it in a catch block,
 * with the GIL, or in a scope of gil.h. */
int set_error() noexcept;
/* Throws the pending Python error as torch's python_error, which autograd's threads pass on. */
[[noreturn]] void throw_python_error();

template <typename Body> int guarded(const char *function, Body &&body) noexcept {
    try {
        fault_point(function);
        body();
        return 0;
    } catch (...) {
        return set_error();
    }
}

/* Whether functorch transforms are active on this thread: the dispatch key is included while the
 * stack of transforms is not empty. functorch's own function for this is in a library that torch's
 * wheels do not contain. */
inline bool functorch_active() {
    return c10::impl::tls_is_dispatch_key_included(
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

/* False once the interpreter finalizes. Then no Python object may be accessed. */
bool python_alive() noexcept;

/* A counted reference to a hook's owner. Any thread may destroy it, with or without the GIL. */
class HookRef {
  public:
    explicit HookRef(const fct_hook &hook) : hook_(hook) {
        hook_.retain(hook_.owner);
    }
    HookRef(HookRef &&other) noexcept : hook_(other.hook_) {
        other.hook_.owner = nullptr;
    }
    HookRef(const HookRef &) = delete;
    HookRef &operator=(const HookRef &) = delete;
    HookRef &operator=(HookRef &&) = delete;
    ~HookRef() {
        reset();
    }
    /* Takes the GIL and calls the hook. Throws python_error if the hook fails. No-op after reset().
     */
    void call() const;
    /* Releases the owner. Idempotent. */
    void reset() noexcept;

  private:
    fct_hook hook_;
};

} // namespace fct

#endif
