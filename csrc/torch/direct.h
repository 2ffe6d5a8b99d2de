/* Process groups whose rows go from memory to memory: see direct.cpp. */
#ifndef FSDP_C_TORCH_DIRECT_H
#define FSDP_C_TORCH_DIRECT_H

#include "torch_abi.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fct {

/* What the ranks of one process group have agreed upon, once, and where its messages stand. All who
 * use the group share it.
 *
 * The question goes out in front of the group's first gather, and nobody waits for it there: the
 * other ranks may be anywhere in their programs. So the first gathers are torch's, on all ranks as
 * many as the rank with most parameter groups has: of one gather more, one before it has been
 * waited for, and the question was answered then. */
struct Agreement {
    enum class State : uint8_t { open, direct, declined };
    State state = State::open;
    bool paused = false;                     /* by all ranks at the same point of their programs */
    std::atomic<uint32_t> messages{0};       /* exchanges so far: the same on every rank */
    int64_t gathers = 0;                     /* that were torch's */
    int64_t first = 0;                       /* gathers that are; this rank's own while open */
    c10::intrusive_ptr<c10d::Work> question; /* while it is under way, and what it fills */
    at::Tensor answers;
};

/* What is done with rows: reductions follow gathers that have been waited for, and so may wait. */
enum class Use : uint8_t { gather, reduce };

/* The agreement of `group`, kept while anybody has it or the group lives. Needs the GIL. */
std::shared_ptr<Agreement> agreement_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* Whether the next gather or reduction of `group` is direct. Asks all ranks, once, whether they
 * want that over the CPU's backend, by a collective that dispatch modes do not see; without a
 * question where the backend is not gloo's own. A wait for the answers sees signals; what was
 * interrupted can be called again. */
bool goes_directly(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                   Use use);

/* Counts a parameter group that gathers over the process group of that name, if it has not been
 * asked yet. Needs the GIL. */
void announce_user(const std::string &name);

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
