/* The negotiation of the ranks of a process group on shared memory; see negotiation.h. */
#include "negotiation.h"

#include "bridge.h"
#include "progress.h"

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

/* Whether this rank wants it: not where somebody looks at what gloo itself does. */
bool wants_shared_memory() {
    return !is_chosen("gloo") && c10d::debug_level() == c10d::DebugLevel::Off &&
           !is_set("TORCH_FR_BUFFER_SIZE") && !is_set("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

/* The backend itself, and not what wraps or replaces it under its name: its class is not in the
 * headers that can be included. */
bool is_gloo(const c10d::Backend &backend) {
    return std::string(typeid(backend).name()) == "N4c10d16ProcessGroupGlooE";
}

/* That this process may use; one where that is not known. */
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
    static auto *const known = new std::unordered_map<const c10d::ProcessGroup *, Entry>();
    for (auto it = known->begin(); it != known->end();) {
        it = it->second.group.expired() ? known->erase(it) : std::next(it);
    }
    const auto found = known->find(group.get());
    if (found != known->end()) {
        return found->second.negotiation;
    }
    auto made = std::make_shared<Negotiation>();
    known->emplace(group.get(), Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made});
    return made;
}

/* Parameter groups by the names of process groups, until those are asked. */
static std::unordered_map<std::string, int64_t> &users() {
    static auto *const all = new std::unordered_map<std::string, int64_t>();
    return *all;
}

void announce_user(const std::string &name) {
    users()[name]++;
}

/* An answer: the number of gathers that gloo is to move for this rank (0: all), and the three
 * numbers of its handle (0: it has no shared memory). */
constexpr int64_t kCapabilities = 4;

static void start_negotiation(Negotiation &negotiation,
                              const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                              const Attach &attach) {
    const auto fallback = group->getBackend(c10::DeviceType::CPU);
    if (group->getSize() < 2 || !is_gloo(*fallback)) {
        negotiation.state = Negotiation::State::declined;
        return;
    }
    const auto found = users().extract(group->getGroupName());
    negotiation.fallback_gathers =
        std::max(negotiation.fallback_gathers, found.empty() ? 1 : found.mapped());
    shm_ring_handle handle{0, 0, 0};
    if (wants_shared_memory() && attach()) {
        negotiation.transport = ShmTransport::open();
        handle = negotiation.transport ? negotiation.transport->handle() : handle;
    }
    at::Tensor answer = at::tensor({wants_shared_memory() ? negotiation.fallback_gathers : 0,
                                    handle.pid, handle.fd, handle.token},
                                   at::kLong);
    pybind11::gil_scoped_release released;
    negotiation.capabilities.start(*fallback, answer);
}

static void decline(Negotiation &negotiation) {
    negotiation.state = Negotiation::State::declined;
    negotiation.transport.reset();
}

/* Blocks until all ranks have answered. Another thread may take the answers meanwhile. */
static void read_capabilities(Negotiation &negotiation) {
    const at::Tensor answers = negotiation.capabilities.results().view({-1, kCapabilities});
    if (negotiation.state != Negotiation::State::pending) {
        return;
    }
    const at::Tensor first = answers.select(1, 0), processes = answers.select(1, 1);
    negotiation.fallback_gathers = first.max().item<int64_t>();
    negotiation.capabilities = {};
    if (!first.all().item<bool>() || !processes.all().item<bool>()) {
        decline(negotiation);
        return;
    }
    for (int64_t rank = 0; rank < answers.size(0); rank++) {
        const int64_t *row = answers.const_data_ptr<int64_t>() + rank * kCapabilities;
        negotiation.handles.push_back({row[1], row[2], row[3]});
    }
    negotiation.state = Negotiation::State::connecting;
}

void NegotiationRound::start(c10d::Backend &fallback, at::Tensor answer) {
    const at::DisableRecordFunctionGuard unseen;
    results_ = at::empty({fallback.getSize() * answer.numel()}, at::kLong);
    work_ = fallback._allgather_base(results_, answer);
}

at::Tensor NegotiationRound::results() const {
    const auto held = work_;
    const at::Tensor answers = results_;
    wait_in_slices(*held);
    return answers;
}

bool NegotiationRound::is_pending() const {
    return work_.defined();
}

/* A rank's answer to the second question: whether it has mapped all files, and whether the ranks
 * have fewer than two processors each. */
enum class Connected : int64_t { no, yes, yes_oversubscribed };

/* Maps the other ranks' files and asks whether all ranks have done so. */
static void connect_ranks(Negotiation &negotiation, c10d::Backend &fallback) {
    const pybind11::gil_scoped_release released;
    const auto handles = std::exchange(negotiation.handles, {});
    const auto transport = std::exchange(negotiation.transport, nullptr);
    negotiation.state =
        Negotiation::State::declined; /* stays so if the question cannot be issued */
    const bool joined = transport->connect(fallback.getRank(), fallback.getSize(), handles);
    const bool oversubscribed = available_cpus() < 2 * fallback.getSize();
    const Connected found = !joined          ? Connected::no
                            : oversubscribed ? Connected::yes_oversubscribed
                                             : Connected::yes;
    negotiation.connected_after = negotiation.gathers + negotiation.fallback_gathers;
    negotiation.connection.start(fallback, at::full({1}, static_cast<int64_t>(found), at::kLong));
    negotiation.transport = transport;
    negotiation.state = Negotiation::State::connecting;
}

/* Blocks until all ranks have answered. Another thread may take the answers meanwhile. */
static void read_connection(Negotiation &negotiation) {
    const at::Tensor found = negotiation.connection.results();
    if (negotiation.state != Negotiation::State::connecting) {
        return;
    }
    negotiation.connection = {};
    if (Connected(found.min().item<int64_t>()) == Connected::no) {
        decline(negotiation);
        return;
    }
    if (Connected(found.max().item<int64_t>()) == Connected::yes_oversubscribed) {
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
