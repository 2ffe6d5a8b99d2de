/* The negotiation between the ranks of a process group about the shared-memory transport. */
#ifndef FSDP_C_BRIDGE_NEGOTIATION_HPP
#define FSDP_C_BRIDGE_NEGOTIATION_HPP

#include "shm_transport.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fct {

/* One round of a negotiation: an all-gather of a few integers of each rank. */
class NegotiationRound {
  public:
    /* Issues the all-gather over the fallback backend and does not wait for it. */
    void start(c10d::Backend &fallback, at::Tensor values);
    /* Waits, and returns the integers of all ranks in rank order. Runs signal handlers, needs the
     * GIL, and may be called again after a handler raised. */
    at::Tensor results() const;
    bool is_pending() const;

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* fills `results_` */
    at::Tensor results_;
};

/* Whether the collectives of one process group use shared memory. The ranks negotiate once, in two
 * rounds. All users of the group share the object.
 *
 *     pending     The results of round 1 are not read yet. In it each rank sends whether it accepts
 *                 shared memory, the handle of its ring, and its number of parameter groups.
 *     connecting  All ranks accept. In round 2 each rank sends whether it mapped all rings. A rank
 *                 issues round 2 before its first gather or reduction after round 1, which is the
 *                 same collective on all ranks.
 *     accepted    All ranks have mapped all rings.
 *     declined    The fallback backend, gloo, moves the data.
 *
 * A rank does not wait where it issues a round, because its peers may be anywhere in their
 * programs. So gloo moves the `fallback_gathers` gathers that follow a round. That number is the
 * largest number of parameter groups on any rank. A rank that issues one gather more has waited for
 * an earlier one, which its peers issued after they had issued the round. */
struct Negotiation {
    enum class State : uint8_t { pending, connecting, accepted, declined };
    State state = State::pending;
    /* Set by the user, on all ranks at the same point of their programs. */
    bool paused = false;
    /* Gathers that gloo has moved. */
    int64_t gathers = 0;
    /* Gathers that gloo moves after each round. While pending, this rank's own number. */
    int64_t fallback_gathers = 0;
    /* The value of `gathers` at which round 2 may be waited for. Set when round 2 is issued. */
    int64_t connected_after = 0;
    NegotiationRound capabilities; /* round 1 */
    NegotiationRound connection;   /* round 2, see Connected */
    /* Handles of all ranks, between round 1 and the mapping of the rings. */
    std::vector<shm_ring_handle> handles;
    std::shared_ptr<ShmTransport> transport; /* null if declined */

    /* The transport of the next collective, or null if gloo moves its data. */
    std::shared_ptr<ShmTransport> active_transport() const;
};

/* The collective for which a transport is requested. A reduce-scatter follows a gather that has
 * been waited for, so it may wait for round 1. All-reduces count as gathers: replicated groups have
 * nothing else. A query is not a collective. It waits for both rounds, so all ranks must make it at
 * the same point. */
enum class Use : uint8_t { gather, reduce, all_reduce, query };

/* The negotiation of `group`, shared by all callers while the group lives. Needs the GIL. */
std::shared_ptr<Negotiation> negotiation_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* Whether the next collective of `group` uses shared memory. Issues the rounds below the
 * dispatcher, so dispatch modes do not observe them. Declines without a round if the backend is not
 * torch's gloo. Waits run signal handlers, and an interrupted call may be repeated. A rank offers
 * its ring only if `attach` succeeds, so that the group's end closes the transport. Idempotent
 * until the caller increments `gathers`. Needs the GIL. */
using Attach = std::function<bool()>;
bool uses_shared_memory(Negotiation &negotiation,
                        const c10::intrusive_ptr<c10d::ProcessGroup> &group, Use use,
                        const Attach &attach);

/* Whether a gather of rank shards of `row_bytes` bytes, issued now, would take CPU time from
 * computation: see ShmTransport::is_cpu_bound. */
bool is_cpu_bound(const Negotiation &negotiation, size_t row_bytes);

/* Counts a parameter group that gathers over the process group `name`. Has no effect after round 1
 * was issued. Needs the GIL. */
void announce_user(const std::string &name);

} // namespace fct

#endif
