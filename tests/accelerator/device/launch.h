/* One operation on the device: what it uses, and that it runs. */
#ifndef SIM_LAUNCH_H
#define SIM_LAUNCH_H

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace sim {

/* An operation that is being issued to a stream. The accesses are noted as they are named; the host
 * executes it at once. */
class Launch {
  public:
    Launch(const char *name, c10::Stream stream);
    Launch(const Launch &) = delete;
    Launch &operator=(const Launch &) = delete;
    ~Launch();
    void reads(const at::Tensor &tensor);
    void writes(const at::Tensor &tensor);
    void uses(const void *from, size_t bytes, bool write);
    void host_waits(); /* the host goes on when the stream is done with it */
    Clock done() const;

  private:
    c10::Stream stream_;
    Epoch epoch_;
    std::vector<Bytes> replaced_; /* what reads see other bytes of, put back in the end */
    std::vector<std::pair<uintptr_t, uintptr_t>> written_;
    at::DisableRecordFunctionGuard alone_; /* what executes it is no operator of the host's own */
    void tensor(const at::Tensor &tensor, bool write);
};

bool on_device(const at::Tensor &tensor);
/* The same memory as a tensor on the CPU. */
at::Tensor as_host(const at::Tensor &tensor);

} // namespace sim

#endif
