/* What the .cpp files of this directory share: casts between the C handles and libtorch's objects,
 * the one place where C++ exceptions become Python errors, the fault point, and the owner of a
 * call-back.
 *
 * Rules: no C++ exception leaves an extern "C" function; every fallible function is a body passed
 * to guarded(). */
#ifndef FSDP_C_TORCH_BRIDGE_H
#define FSDP_C_TORCH_BRIDGE_H

#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <utility>

#include "torch_abi.h"

/* Where torch releases differ. */
#define FCT_TORCH_AT_LEAST(major, minor)                                                           \
    (TORCH_VERSION_MAJOR > (major) ||                                                              \
     (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace fct {

inline c10::TensorImpl *impl(const fct_tensor *t) {
    return const_cast<c10::TensorImpl *>(reinterpret_cast<const c10::TensorImpl *>(t));
}

inline fct_tensor *handle(c10::TensorImpl *impl) {
    return reinterpret_cast<fct_tensor *>(impl);
}

/* Hands a tensor's reference to the caller of the boundary. */
inline fct_tensor *give(at::Tensor &&t) {
    return handle(t.unsafeReleaseTensorImpl());
}

/* An at::Tensor on top of a borrowed handle: neither takes nor drops a reference. */
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

/* For calls into at::, below autograd: no history, no version bumped. */
struct Quiet {
    at::AutoDispatchBelowADInplaceOrView below;
};

inline c10::Device device(fct_device d) {
    return c10::Device(static_cast<c10::DeviceType>(d.type), d.index);
}

inline fct_device device(c10::Device d) {
    return fct_device{static_cast<int8_t>(d.type()), static_cast<int8_t>(d.index())};
}

/* Throws where the boundary does not know such a dtype. */
c10::ScalarType scalar_type(fct_dtype dtype);

/* Throws the injected fault when it is due. */
void fault_point(const char *function);
/* Inside a catch block: makes the current C++ exception the Python error; returns -1. Needs the
 * GIL. */
int set_error() noexcept;
/* A Python error is set: throws it as torch's python_error, which survives autograd's threads. */
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

/* Whether functorch transforms are active on this thread. Its own header needs a library that torch
 * does not ship; this key is on while its stack is not empty. */
inline bool functorch_active() {
    return c10::impl::tls_is_dispatch_key_included(
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

/* False once the interpreter is going down: then nothing may touch Python objects any more. */
bool python_alive() noexcept;

/* One counted reference to a hook's owner. May die on any thread, with or without the GIL. */
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
    /* Calls the hook with the GIL held; throws python_error where it failed. Nothing after reset().
     */
    void call() const;
    /* Drops the owner early; idempotent. */
    void reset() noexcept;

  private:
    fct_hook hook_;
};

} // namespace fct

#endif
