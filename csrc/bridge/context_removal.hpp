/* Removes Python's context variables from torch's thread-local state while gloo copies it. */
#ifndef FSDP_C_BRIDGE_CONTEXT_REMOVAL_HPP
#define FSDP_C_BRIDGE_CONTEXT_REMOVAL_HPP

#include "bridge.hpp"

#include <ATen/ThreadLocalPythonObjects.h>

#include <memory>
#include <utility>

namespace fct {

/* Removes the contextvars.Context of Python from torch's thread-local state, and restores it at the
 * end of the scope. Since torch 2.13 every backward stores the context there, and gloo's works copy
 * the state. gloo's threads would need the GIL to destroy their works. A thread that waits for the
 * GIL while the interpreter finalizes ends the process by std::terminate. Does nothing before torch
 * 2.13. */
class ScopedContextRemoval {
  public:
    ScopedContextRemoval(const ScopedContextRemoval &) = delete;
    ScopedContextRemoval &operator=(const ScopedContextRemoval &) = delete;
#if FCT_TORCH_AT_LEAST(2, 13)
    ScopedContextRemoval() {
        if (at::impl::ThreadLocalPythonObjects::contains(kKey)) {
            context_ = at::impl::ThreadLocalPythonObjects::get(kKey);
            at::impl::ThreadLocalPythonObjects::erase(kKey);
        }
    }
    ~ScopedContextRemoval() {
        if (context_) {
            at::impl::ThreadLocalPythonObjects::set(kKey, std::move(context_));
        }
    }

  private:
    static constexpr const char *kKey = "context";
    std::shared_ptr<c10::SafePyObject> context_;
#else
    ScopedContextRemoval() {}
#endif
};

} // namespace fct

#endif
