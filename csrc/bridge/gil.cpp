/* The GIL during calls for devices with streams; see gil.h. Owns the state of each thread. */
#include "gil.hpp"

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace {

thread_local bool in_scope = false;                /* of fct_gil_enter */
thread_local PyThreadState *saved_state = nullptr; /* NULL: the GIL is not released */

/* Returns true if this thread holds the GIL. Python functions that run in a scope, such as
 * __torch_dispatch__, take the GIL. */
bool holds_gil(const PyThreadState *state) {
#if PY_VERSION_HEX >= 0x030d0000
    return PyThreadState_GetUnchecked() == state;
#else
    return _PyThreadState_UncheckedGet() == state;
#endif
}

void take_gil() {
    if (saved_state != nullptr && !holds_gil(saved_state)) {
        PyEval_RestoreThread(std::exchange(saved_state, nullptr));
    }
}

} // namespace

namespace fct {

bool gil_is_released() noexcept {
    return saved_state != nullptr;
}

void begin_device_call() noexcept {
    if (saved_state == nullptr && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
        saved_state = PyEval_SaveThread();
    }
}

void end_device_call() noexcept {
    if (!in_scope) {
        take_gil();
    }
}

} // namespace fct

extern "C" {

void fct_gil_enter(void) {
    in_scope = true;
}

void fct_gil_leave(void) {
    in_scope = false;
    take_gil();
}

} // extern "C"
