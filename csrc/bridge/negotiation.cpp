/* The negotiation of the shared-memory transport; see negotiation.hpp.
 *
 * Owns the table of negotiations and the counts of parameter groups by group name. The GIL guards
 * both. */
#include "negotiation.hpp"

#include "bridge.hpp"
#include "progress.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/csrc/utils/pybind.h>

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace {

bool is_set(const char *variable) {
    const char *value = std::getenv(variable);
    return value != nullptr && value[0] != '\0' && std::string(value) != "0";
}

bool is_chosen(const char *transport) {
    const char *choice = std::getenv("FSDP_C_TRANSPORT");
    return choice != nullptr && std::string(choice) == transport;
}

/* Whether this rank accepts shared memory. The user can veto it. A debug level and a flight
 * recorder veto it, because they observe gloo's own collectives. */
bool wants_shared_memory() {
    return !is_chosen("gloo") && c10d::debug_level() == c10d::DebugLevel::Off &&
           !is_set("TORCH_FR_BUFFER_SIZE") && !is_set("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

/* Whether the backend is torch's class and not a wrapper with the same name. torch does not ship
 * the header of the class. */
bool is_gloo(const c10d::Backend &backend) {
    return std::string(typeid(backend).name()) == "N4c10d16ProcessGroupGlooE";
}

/* CPUs in the affinity mask of this process, or 1 if the mask is unknown. */
int available_cpus() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    return 1;
}

} // namespace

namespace fct {

std::shared_ptr<Negotiation> negotiation_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group) {
    struct Entry {
        c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
        std::shared_ptr<Negotiation> negotiation;
    };
    static auto *const table = new std::unordered_map<const c10d::ProcessGroup *, Entry>();
    for (auto it = table->begin(); it != table->end();) {
        it = it->second.group.expired() ? table->erase(it) : std::next(it);
    }
    const auto found = table->find(group.get());
    if (found != table->end()) {
        return found->second.negotiation;
    }
    auto negotiation = std::make_shared<Negotiation>();
    table->emplace(group.get(),
                   Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), negotiation});
    return negotiation;
}

/* Number of parameter groups by the name of their process group, until round 1 is issued. */
static std::unordered_map<std::string, int64_t> &group_counts() {
    static auto *const all = new std::unordered_map<std::string, int64_t>();
    return *all;
}

void announce_user(const std::string &name) {
    group_counts()[name]++;
}

/* Integers of round 1: the number of this rank's fallback gathers (0: veto), then the fields of its
 * shm_ring_handle (0: no ring). */
constexpr int64_t kCapabilities = 4;

static void start_negotiation(Negotiation &negotiation,
                              const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                              const Attach &attach) {
    const auto fallback = group->getBackend(c10::DeviceType::CPU);
    if (group->getSize() < 2 || !is_gloo(*fallback)) {
        negotiation.state = Negotiation::State::declined;
        return;
    }
    const auto found = group_counts().extract(group->getGroupName());
    negotiation.fallback_gathers =
        std::max(negotiation.fallback_gathers, found.empty() ? 1 : found.mapped());
    shm_ring_handle handle{0, 0, 0};
    if (wants_shared_memory() && attach()) {
        negotiation.transport = ShmTransport::open();
        handle = negotiation.transport ? negotiation.transport->handle() : handle;
    }
    at::Tensor values = at::tensor({wants_shared_memory() ? negotiation.fallback_gathers : 0,
                                    handle.pid, handle.fd, handle.token},
                                   at::kLong);
    pybind11::gil_scoped_release released;
    negotiation.capabilities.start(*fallback, values);
}

static void decline(Negotiation &negotiation) {
    negotiation.state = Negotiation::State::declined;
    negotiation.transport.reset();
}

/* Waits for the round and applies its results, unless another thread has done so meanwhile. */
static void read_capabilities(Negotiation &negotiation) {
    const at::Tensor results = negotiation.capabilities.results().view({-1, kCapabilities});
    if (negotiation.state != Negotiation::State::pending) {
        return;
    }
    const at::Tensor counts = results.select(1, 0), pids = results.select(1, 1);
    negotiation.fallback_gathers = counts.max().item<int64_t>();
    negotiation.capabilities = {};
    if (!counts.all().item<bool>() || !pids.all().item<bool>()) {
        decline(negotiation);
        return;
    }
    for (int64_t rank = 0; rank < results.size(0); rank++) {
        const int64_t *row = results.const_data_ptr<int64_t>() + rank * kCapabilities;
        negotiation.hppandles.push_back({row[1], row[2], row[3]});
    }
    negotiation.state = Negotiation::State::connecting;
}

void NegotiationRound::start(c10d::Backend &fallback, at::Tensor values) {
    const at::DisableRecordFunctionGuard no_record;
    results_ = at::empty({fallback.getSize() * values.numel()}, at::kLong);
    work_ = fallback._allgather_base(results_, values);
}

at::Tensor NegotiationRound::results() const {
    const auto work = work_;
    const at::Tensor results = results_;
    wait_in_slices(*work);
    return results;
}

bool NegotiationRound::is_pending() const {
    return work_.defined();
}

/* The integer of round 2: whether a rank mapped all rings, and whether it has fewer than two CPUs
 * for each rank. */
enum class Connected : int64_t { no, yes, yes_oversubscribed };

/* Maps the peers' rings and issues round 2. */
static void connect_ranks(Negotiation &negotiation, c10d::Backend &fallback) {
    const pybind11::gil_scoped_release released;
    const auto handles = std::exchange(negotiation.hppandles, {});
    const auto transport = std::exchange(negotiation.transport, nullptr);
    /* Remains if the round cannot be issued. */
    negotiation.state = Negotiation::State::declined;
    const bool connected = transport->connect(fallback.getRank(), fallback.getSize(), handles);
    const bool oversubscribed = available_cpus() < 2 * fallback.getSize();
    const Connected value = !connected       ? Connected::no
                            : oversubscribed ? Connected::yes_oversubscribed
                                             : Connected::yes;
    negotiation.connected_after = negotiation.gathers + negotiation.fallback_gathers;
    negotiation.connection.start(fallback, at::full({1}, static_cast<int64_t>(value), at::kLong));
    negotiation.transport = transport;
    negotiation.state = Negotiation::State::connecting;
}

/* Waits for the round and applies its results, unless another thread has done so meanwhile. */
static void read_connection(Negotiation &negotiation) {
    const at::Tensor connected = negotiation.connection.results();
    if (negotiation.state != Negotiation::State::connecting) {
        return;
    }
    negotiation.connection = {};
    if (Connected(connected.min().item<int64_t>()) == Connected::no) {
        decline(negotiation);
        return;
    }
    if (Connected(connected.max().item<int64_t>()) == Connected::yes_oversubscribed) {
        negotiation.transport->set_oversubscribed();
    }
    negotiation.state = Negotiation::State::accepted;
}

std::shared_ptr<ShmTransport> Negotiation::active_transport() const {
    return state == State::accepted ? transport : nullptr;
}

bool is_cpu_bound(const Negotiation &negotiation, size_t row_bytes) {
    const auto transport = negotiation.active_transport();
    return transport && !negotiation.paused && transport->is_cpu_bound(row_bytes);
}

bool uses_shared_memory(Negotiation &negotiation,
                        const c10::intrusive_ptr<c10d::ProcessGroup> &group, Use use,
                        const Attach &attach) {
    using State = Negotiation::State;
    if (negotiation.state == State::pending && !negotiation.capabilities.is_pending()) {
        start_negotiation(negotiation, group, attach);
    }
    const bool is_gather = use == Use::gather || use == Use::all_reduce;
    const auto gathers_below = [&](int64_t count) {
        return is_gather && negotiation.gathers < count;
    };
    if (negotiation.state == State::pending && !gathers_below(negotiation.fallback_gathers)) {
        read_capabilities(negotiation);
    }
    if (negotiation.state == State::connecting && !negotiation.connection.is_pending() &&
        !gathers_below(negotiation.fallback_gathers)) {
        connect_ranks(negotiation, *group->getBackend(c10::DeviceType::CPU));
    }
    if (negotiation.state == State::connecting && negotiation.connection.is_pending() &&
        use != Use::reduce && !gathers_below(negotiation.connected_after)) {
        read_connection(negotiation);
    }
    return negotiation.state == State::accepted;
}

} // namespace fct
