/* Process groups whose rows go from memory to memory: see direct.cpp. */
#ifndef FSDP_C_TORCH_DIRECT_H
#define FSDP_C_TORCH_DIRECT_H

#include "torch_abi.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace fct {

/* What the ranks of one process group have agreed upon, once, and where its messages stand. All who
 * use the group share it. */
struct Agreement {
    enum class State : uint8_t { open, direct, declined };
    State state = State::open;
    bool paused = false;                     /* by all ranks at the same point of their programs */
    std::atomic<uint32_t> messages{0};       /* exchanges so far: the same on every rank */
    c10::intrusive_ptr<c10d::Work> question; /* while it is under way, and what it fills */
    at::Tensor answers;
};

/* The agreement of `group`, kept while anybody has it or the group lives. Needs the GIL. */
std::shared_ptr<Agreement> agreement_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* A collective of its own, not seen by dispatch modes: asks whether all ranks want direct
 * exchanges over the CPU's backend of `group`. Sees signals; what was interrupted can be called
 * again. Without a question where the backend is not gloo's own. */
void agree(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* A group of the same name and ranks, whose all-gathers and reduce-scatters on the CPU are direct.
 */
c10::intrusive_ptr<c10d::ProcessGroup> direct(const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                                              std::shared_ptr<Agreement> agreement);

/* See torch_abi.h, of the same names; `direct` is a group that direct() made. */
c10::intrusive_ptr<c10d::Work> gather_pieces(c10d::ProcessGroup &direct,
                                             const std::vector<at::Tensor> &pieces);
c10::intrusive_ptr<c10d::Work> reduce_pieces(c10d::ProcessGroup &direct, const at::Tensor &output,
                                             const std::vector<at::Tensor> &pieces, bool average);

/* While one lives, the CPU's backend of `group` itself is the direct one of `direct`: for whoever
 * looks at the group that a collective is called with. Made and ended with the GIL. */
class DirectBackendIn {
  public:
    DirectBackendIn(c10::intrusive_ptr<c10d::ProcessGroup> group,
                    const c10::intrusive_ptr<c10d::ProcessGroup> &direct);
    DirectBackendIn(const DirectBackendIn &) = delete;
    DirectBackendIn &operator=(const DirectBackendIn &) = delete;
    ~DirectBackendIn();

  private:
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

} // namespace fct

#endif
