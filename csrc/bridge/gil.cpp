/* The GIL during calls for devices with streams; see gil.h. Owns the state of each thread. */
#include "gil.hpp"

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace {

thread_local bool gil_scope = false;             /* this thread is in a scope */
thread_local PyThreadState *gil_taker = nullptr; /* to take the GIL again; NULL: not released */

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
    if (gil_taker != nullptr && !holds_gil(gil_taker)) {
        PyEval_RestoreThread(std::exchange(gil_taker, nullptr));
    }
}

} // namespace

namespace fct {

bool gil_is_released() noexcept {
    return gil_taker != nullptr;
}

void begin_device_call() noexcept {
    if (gil_taker == nullptr && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
        gil_taker = PyEval_SaveThread();
    }
}

void end_device_call() noexcept {
    if (!gil_scope) {
        take_gil();
    }
}

} // namespace fct

extern "C" {

void fct_gil_enter(void) {
    gil_scope = true;
}

void fct_gil_leave(void) {
    gil_scope = false;
    take_gil();
}

} // extern "C"
