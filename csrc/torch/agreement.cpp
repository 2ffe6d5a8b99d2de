/* The agreement of the ranks of a process group on shared memory; see agreement.h. */
#include "agreement.h"

#include "bridge.h"
#include "waiter.h"

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

bool set(const char *variable) {
    const char *value = std::getenv(variable);
    return value != nullptr && value[0] != '\0' && std::string(value) != "0";
}

bool chosen(const char *transport) {
    const char *choice = std::getenv("FSDP_C_TRANSPORT");
    return choice != nullptr && std::string(choice) == transport;
}

/* Whether this rank wants it: not where somebody looks at what gloo itself does. */
bool wanted() {
    return !chosen("gloo") && c10d::debug_level() == c10d::DebugLevel::Off &&
           !set("TORCH_FR_BUFFER_SIZE") && !set("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

/* The backend itself, and not what wraps or replaces it under its name: its class is not in the
 * headers that can be included. */
bool is_gloo(const c10d::Backend &backend) {
    return std::string(typeid(backend).name()) == "N4c10d16ProcessGroupGlooE";
}

/* That this process may use; one where that is not known. */
int processors() {
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

std::shared_ptr<Agreement> agreement_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group) {
    struct Entry {
        c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
        std::shared_ptr<Agreement> agreement;
    };
    static auto *const known = new std::unordered_map<const c10d::ProcessGroup *, Entry>();
    for (auto it = known->begin(); it != known->end();) {
        it = it->second.group.expired() ? known->erase(it) : std::next(it);
    }
    const auto found = known->find(group.get());
    if (found != known->end()) {
        return found->second.agreement;
    }
    auto made = std::make_shared<Agreement>();
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
 * numbers of its offer (0: it has no shared memory). */
constexpr int64_t kAnswer = 4;

static void ask(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                const Attach &attach) {
    const auto engine = group->getBackend(c10::DeviceType::CPU);
    if (group->getSize() < 2 || !is_gloo(*engine)) {
        agreement.state = Agreement::State::declined;
        return;
    }
    const auto found = users().extract(group->getGroupName());
    agreement.first = std::max(agreement.first, found.empty() ? 1 : found.mapped());
    fcb_offer offer{0, 0, 0};
    if (wanted() && attach()) {
        agreement.office = Office::open();
        offer = agreement.office ? agreement.office->offer() : offer;
    }
    at::Tensor answer = at::tensor(
        {wanted() ? agreement.first : 0, offer.process, offer.file, offer.token}, at::kLong);
    pybind11::gil_scoped_release released;
    agreement.question.ask(*engine, answer);
}

static void decline(Agreement &agreement) {
    agreement.state = Agreement::State::declined;
    agreement.office.reset();
}

/* Blocks until all ranks have answered. Another thread may take the answers meanwhile. */
static void take_answers(Agreement &agreement) {
    const at::Tensor answers = agreement.question.answers().view({-1, kAnswer});
    if (agreement.state != Agreement::State::open) {
        return;
    }
    const at::Tensor first = answers.select(1, 0), processes = answers.select(1, 1);
    agreement.first = first.max().item<int64_t>();
    agreement.question = {};
    if (!first.all().item<bool>() || !processes.all().item<bool>()) {
        decline(agreement);
        return;
    }
    for (int64_t rank = 0; rank < answers.size(0); rank++) {
        const int64_t *row = answers.const_data_ptr<int64_t>() + rank * kAnswer;
        agreement.offers.push_back({row[1], row[2], row[3]});
    }
    agreement.state = Agreement::State::joining;
}

void Question::ask(c10d::Backend &engine, at::Tensor answer) {
    const at::DisableRecordFunctionGuard unseen;
    answers_ = at::empty({engine.getSize() * answer.numel()}, at::kLong);
    work_ = engine._allgather_base(answers_, answer);
}

at::Tensor Question::answers() const {
    const auto held = work_;
    const at::Tensor answers = answers_;
    wait_in_slices(*held);
    return answers;
}

bool Question::is_open() const {
    return work_.defined();
}

/* A rank's answer to the second question: whether it has mapped all files, and whether the ranks
 * have fewer than two processors each. */
enum class Found : int64_t { no, yes, yes_but_crowded };

/* Maps the other ranks' files and asks whether all ranks have done so. */
static void join(Agreement &agreement, c10d::Backend &engine) {
    const pybind11::gil_scoped_release released;
    const auto offers = std::exchange(agreement.offers, {});
    const auto office = std::exchange(agreement.office, nullptr);
    agreement.state = Agreement::State::declined; /* stays so if the question cannot be issued */
    const bool joined = office->join(engine.getRank(), engine.getSize(), offers);
    const bool crowded = processors() < 2 * engine.getSize();
    const Found found = !joined ? Found::no : crowded ? Found::yes_but_crowded : Found::yes;
    agreement.join_after = agreement.gathers + agreement.first;
    agreement.found.ask(engine, at::full({1}, static_cast<int64_t>(found), at::kLong));
    agreement.office = office;
    agreement.state = Agreement::State::joining;
}

/* Blocks until all ranks have answered. Another thread may take the answers meanwhile. */
static void take_found(Agreement &agreement) {
    const at::Tensor found = agreement.found.answers();
    if (agreement.state != Agreement::State::joining) {
        return;
    }
    agreement.found = {};
    if (Found(found.min().item<int64_t>()) == Found::no) {
        decline(agreement);
        return;
    }
    if (Found(found.max().item<int64_t>()) == Found::yes_but_crowded) {
        agreement.office->crowd();
    }
    agreement.state = Agreement::State::direct;
}

std::shared_ptr<Office> Agreement::office_in_use() const {
    return state == State::direct ? office : nullptr;
}

bool is_copied(const Agreement &agreement, size_t row_bytes) {
    const auto office = agreement.office_in_use();
    return office && !agreement.paused && office->copies(row_bytes);
}

bool goes_directly(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                   Use use, const Attach &attach) {
    using State = Agreement::State;
    if (agreement.state == State::open && !agreement.question.is_open()) {
        ask(agreement, group, attach);
    }
    const bool is_gather = use == Use::gather || use == Use::all_reduce;
    const auto gathers_below = [&](int64_t count) {
        return is_gather && agreement.gathers < count;
    };
    if (agreement.state == State::open && !gathers_below(agreement.first)) {
        take_answers(agreement);
    }
    if (agreement.state == State::joining && !agreement.found.is_open() &&
        !gathers_below(agreement.first)) {
        join(agreement, *group->getBackend(c10::DeviceType::CPU));
    }
    if (agreement.state == State::joining && agreement.found.is_open() && use != Use::reduce &&
        !gathers_below(agreement.join_after)) {
        take_found(agreement);
    }
    return agreement.state == State::direct;
}

} // namespace fct
