/* What the ranks of a process group agree upon, before rows go from memory to memory. */
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

/* An answer: how many gathers will be torch's for this rank, 0: all; and where its board is. */
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
    if (wanted() && !chosen("sockets") && attach()) {
        agreement.office = Office::open();
        offer = agreement.office ? agreement.office->offer() : offer;
    }
    at::Tensor answer = at::tensor(
        {wanted() ? agreement.first : 0, offer.process, offer.file, offer.token}, at::kLong);
    pybind11::gil_scoped_release released;
    agreement.question.ask(*engine, answer);
}

static void take_answers(Agreement &agreement) {
    const at::Tensor answers = agreement.question.answers().view({-1, kAnswer});
    const at::Tensor first = answers.select(1, 0);
    agreement.state =
        first.all().item<bool>() ? Agreement::State::direct : Agreement::State::declined;
    agreement.first = first.max().item<int64_t>();
    if (agreement.state == Agreement::State::declined || !answers.select(1, 1).all().item<bool>()) {
        agreement.office.reset();
    }
    for (int64_t rank = 0; agreement.office && rank < answers.size(0); rank++) {
        const int64_t *row = answers.const_data_ptr<int64_t>() + rank * kAnswer;
        agreement.offers.push_back({row[1], row[2], row[3]});
    }
    agreement.question = {};
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

/* What a rank says: whether it has found the others' boards, and has few processors for it. */
enum class Found : int64_t { no, yes, yes_but_crowded };

static void take_found(Agreement &agreement) {
    const at::Tensor found = agreement.found.answers();
    if (Found(found.min().item<int64_t>()) == Found::no) {
        agreement.office.reset();
    } else if (Found(found.max().item<int64_t>()) == Found::yes_but_crowded && agreement.office) {
        agreement.office->crowd();
    }
    agreement.found = {};
}

/* In two steps: at the first direct exchange each rank looks for the others' boards and says
 * whether it has found them; and when so many gathers were issued after it that one of them has
 * been waited for, all have said it. */
std::shared_ptr<Office> office_of(Agreement &agreement, c10d::Backend &engine, Use use) {
    if (!agreement.offers.empty()) {
        const auto offers = std::exchange(agreement.offers, {});
        const auto office =
            std::exchange(agreement.office, nullptr); /* none if the question fails */
        const bool joined = office->join(engine.getRank(), engine.getSize(), offers);
        const bool crowded = processors() < 2 * engine.getSize();
        const Found found = !joined ? Found::no : crowded ? Found::yes_but_crowded : Found::yes;
        agreement.found.ask(engine, at::full({1}, static_cast<int64_t>(found), at::kLong));
        agreement.office = office;
    } else if (agreement.found.is_open() && use != Use::reduce &&
               agreement.direct_gathers >= agreement.first) {
        const pybind11::gil_scoped_acquire gil;
        take_found(agreement);
    }
    agreement.direct_gathers += use != Use::reduce ? 1 : 0;
    return agreement.found.is_open() ? nullptr : agreement.office;
}

bool is_copied(const Agreement &agreement, size_t row_bytes) {
    return agreement.state == Agreement::State::direct && !agreement.paused &&
           agreement.offers.empty() && !agreement.found.is_open() && agreement.office &&
           agreement.office->copies(row_bytes);
}

bool goes_directly(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                   Use use, const Attach &attach) {
    using State = Agreement::State;
    if (agreement.state == State::open && !agreement.question.is_open()) {
        ask(agreement, group, attach);
    }
    const auto early = [&] { return use != Use::reduce && agreement.gathers < agreement.first; };
    if (agreement.state == State::open && !early()) {
        take_answers(agreement);
    }
    return agreement.state == State::direct && !early();
}

} // namespace fct
