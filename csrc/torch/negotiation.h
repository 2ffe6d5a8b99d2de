/* Whether the ranks of a process group use shared memory: the questions, and their answers. */
#ifndef FSDP_C_TORCH_NEGOTIATION_H
#define FSDP_C_TORCH_NEGOTIATION_H

#include "shm_transport.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fct {

/* Numbers of each rank that all are to know. */
class NegotiationRound {
  public:
    /* Sends this rank's, and waits for nobody. */
    void start(c10d::Backend &fallback, at::Tensor answer);
    /* All ranks' numbers, in their order; sees signals, with the GIL, and can be called again. */
    at::Tensor results() const;
    bool is_pending() const;

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* fills the answers */
    at::Tensor results_;
};

/* Whether the ranks of one process group move rows through shared memory. The ranks agree once, in
 * two questions; everybody who uses the group shares the object.
 *
 *     open      no answers to the first question yet. It asks whether a rank wants shared memory,
 *               where its file is, and how many gathers may be in flight without a wait.
 *     joining   all ranks handle memory. The second question asks whether a rank has mapped the
 *               files of all others. It is issued before the first gather or reduction after the
 *               answers, which is the same one on all ranks.
 *     direct    all ranks have mapped all files.
 *     declined  gloo's collectives move the rows.
 *
 * No rank waits where it issues a question, because its peers may be anywhere in their programs. So
 * gloo moves the gathers that follow a question. Their number, `first`, is the largest number of
 * parameter groups on any rank. A rank that issues one gather more has waited for one before, which
 * its peers issued after they answered. */
struct Negotiation {
    enum class State : uint8_t { pending, connecting, accepted, declined };
    State state = State::pending;
    bool paused = false; /* all ranks set it at the same point of their programs */
    int64_t gathers = 0; /* that gloo moved */
    int64_t fallback_gathers =
        0; /* gathers to be gloo's after a question; this rank's own while open */
    int64_t connected_after =
        0; /* value of `gathers` from which on the second question's answers are
                               there; set when it is asked */
    NegotiationRound capabilities;
    NegotiationRound connection; /* the second question, see Connected */
    std::vector<shm_ring_handle>
        handles; /* all ranks', while joining, until this rank has mapped them */
    std::shared_ptr<ShmTransport> transport; /* empty if declined */

    /* The transport of the next collective; empty if gloo moves its rows. */
    std::shared_ptr<ShmTransport> active_transport() const;
};

/* A collective's use of rows. A reduce-scatter follows a gather that has been waited for, so it may
 * wait for the first question. All-reduces count as gathers: some groups have nothing else. A query
 * is no collective: it waits for all answers, and all ranks make it at the same point. */
enum class Use : uint8_t { gather, reduce, all_reduce, query };

/* The negotiation of `group`, kept while anybody has it or the group lives. Needs the GIL. */
std::shared_ptr<Negotiation> negotiation_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* Whether the next gather or reduction of `group` goes through shared memory. Issues the questions,
 * which dispatch modes do not see; declines without one where the backend is not gloo's own. A wait
 * for answers sees signals; an interrupted call can be repeated. A rank handles memory if `attach`
 * makes the group's end close the transport. Idempotent until the caller has counted the gather in
 * `gathers`. Call it with the GIL. */
using Attach = std::function<bool()>;
bool uses_shared_memory(Negotiation &negotiation,
                        const c10::intrusive_ptr<c10d::ProcessGroup> &group, Use use,
                        const Attach &attach);

/* Whether rows of so many bytes would be copied in computation's time, if they were posted now. */
bool is_cpu_bound(const Negotiation &negotiation, size_t row_bytes);

/* Counts a parameter group that gathers over the process group of that name, if it has not been
 * asked yet. Needs the GIL. */
void announce_user(const std::string &name);

} // namespace fct

#endif
