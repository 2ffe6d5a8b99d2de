/* One operation on the device, with its accesses. */
#ifndef SIM_LAUNCH_H
#define SIM_LAUNCH_H

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace sim {

/* An operation that the host issues to a stream and executes immediately, while this object lives.
 * Call reads(), writes() and access() before the operation is executed. */
class Launch {
  public:
    Launch(const char *name, c10::Stream stream);
    Launch(const Launch &) = delete;
    Launch &operator=(const Launch &) = delete;
    ~Launch();
    void reads(const at::Tensor &tensor);
    void writes(const at::Tensor &tensor);
    void access(const void *from, size_t bytes, bool write);
    void host_waits(); /* the host waits until the operation is complete */
    Clock end_clock() const;

  private:
    c10::Stream stream_;
    Epoch epoch_;
    std::vector<Bytes> replaced_; /* changed for reads; the destructor restores them */
    std::vector<std::pair<uintptr_t, uintptr_t>> written_; /* without the tensors below */
    std::vector<at::Tensor> written_tensors_;
    /* Keeps host.cpp from recording the CPU operators that execute the operation. */
    at::DisableRecordFunctionGuard profiling_guard_;
    void access_tensor(const at::Tensor &tensor, bool write);
    void record(uintptr_t from, uintptr_t to, bool write);
    void restore(const Bytes &bytes) const;
};

bool on_device(const at::Tensor &tensor);
/* Returns a CPU tensor over the same memory. */
at::Tensor as_host(const at::Tensor &tensor);

} // namespace sim

#endif
