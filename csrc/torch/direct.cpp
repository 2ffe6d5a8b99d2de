/* All-gathers and reduce-scatters on the CPU without detours.
 *
 * torch's gloo backend gathers into a buffer of its own and copies that out; its reduce-scatter
 * copies the input, all-reduces all of it and takes a slice: twice the bytes on the wire, and as
 * much memory again. Direct is a backend over that one, and moves with its sends and receives:
 * every rank receives the others' rows where they belong, and adds what it got in the order in
 * which the all-reduce would have (kernels/ring.h), so that the bits are the same.
 *
 * It is a c10d backend, in a process group of its own that only this extension has: the collectives
 * are the ops of namespace c10d that they always were, and whoever counts, patches or records those
 * sees no difference. Sends and receives are not ops, and profilers do not see them.
 *
 * What one rank sends another must receive. So whether a group is used in this way is agreed upon
 * once by all of its ranks, and from then on depends only on what is the same everywhere: sizes and
 * element types.
 *
 * gloo can only block for a message, and one that times out takes all its connections down. So an
 * exchange is waited for by the group's helper thread (waiter.h): its operation type is unknown, as
 * that of gloo's reduce-scatter. */
#include "direct.h"

#include "../kernels/ring.h"
#include "bridge.h"
#include "waiter.h"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/* User's messages rarely have tags as large as these. The lowest bits count. */
constexpr uint32_t kTagBase = 0x46000000;
constexpr uint32_t kTagCount = 0x00ffffff;

/* One exchange: its messages, and the memory that they use. */
class Exchange : public c10d::Work {
  public:
    Exchange(const char *title, Tensors held)
        : Work(-1, c10d::OpType::UNKNOWN, title), held_(std::move(held)) {}

    void received_by(WorkPtr message) {
        receives_.push_back(std::move(message));
    }
    void sent_by(WorkPtr message) {
        sends_.push_back(std::move(message));
    }

    /* By the helper, or by torch's functions on the caller's thread; later calls know how it ended,
     * for a message can be waited for only once. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
        if (!isCompleted()) {
            std::exception_ptr error;
            try {
                wait_for(receives_, timeout);
                arrived();
                wait_for(sends_, timeout);
            } catch (...) {
                error = std::current_exception();
            }
            finish(error);
        }
        if (exception()) {
            std::rethrow_exception(exception());
        }
        return true;
    }

  protected:
    /* All rows are here. */
    virtual void arrived() {}

    Tensors held_;

  private:
    static void wait_for(const std::vector<WorkPtr> &messages, std::chrono::milliseconds timeout) {
        for (const WorkPtr &message : messages) {
            TORCH_CHECK(message->wait(timeout), "an exchange of rows was aborted");
        }
    }

    std::vector<WorkPtr> receives_; /* go before what they use */
    std::vector<WorkPtr> sends_;
};

/* The rows of a reduce-scatter: held_ is the output, the input, and room for what comes. */
class Sum : public Exchange {
  public:
    Sum(const char *title, Tensors held, std::vector<const void *> rows, int64_t rank, bool average)
        : Exchange(title, std::move(held)), rows_(std::move(rows)), rank_(rank), average_(average) {
    }

  protected:
    void arrived() override {
        const at::Tensor &output = held_[0];
        const auto world = static_cast<int64_t>(rows_.size());
        fck_ring_sum(static_cast<fck_dtype>(output.scalar_type()), output.mutable_data_ptr(),
                     rows_.data(), world, held_[1].numel(), rank_ * output.numel(), output.numel());
        if (average_) {
            output.div_(world);
        }
    }

  private:
    std::vector<const void *> rows_;
    int64_t rank_;
    bool average_;
};

class Direct : public c10d::Backend {
  public:
    Direct(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<fct::Agreement> agreement)
        : Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)),
          agreement_(std::move(agreement)) {}

    const std::string getBackendName() const override {
        return engine_->getBackendName();
    }

    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                            const c10d::AllgatherOptions &options) override {
        if (!rows_fit(output, input)) {
            return engine_->_allgather_base(output, input, options);
        }
        at::Tensor own = row(output, rank_, input.numel());
        if (own.data_ptr() != input.data_ptr()) {
            own.copy_(input);
        }
        auto exchange = c10::make_intrusive<Exchange>("gloo:all_gather", Tensors{output, input});
        const int tag = next_tag();
        const at::DisableRecordFunctionGuard unseen;
        for (int peer : peers()) {
            exchange->received_by(receive(row(output, peer, input.numel()), peer, tag));
        }
        for (int peer : peers()) {
            exchange->sent_by(send(input, peer, tag));
        }
        return exchange;
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        const bool sums = (average || options.reduceOp == c10d::ReduceOp::SUM) &&
                          fck_ring_knows(static_cast<fck_dtype>(output.scalar_type())) != 0;
        if (!sums || !rows_fit(input, output)) {
            return engine_->_reduce_scatter_base(output, input, options);
        }
        const int64_t n = output.numel();
        at::Tensor room = at::empty({(size_ - 2) * n}, output.options());
        std::vector<const void *> rows(static_cast<size_t>(size_));
        Tensors arriving;
        for (int peer : peers()) {
            const auto i = static_cast<int64_t>(arriving.size());
            arriving.push_back(i == 0 ? output : row(room, i - 1, n));
            rows[static_cast<size_t>(peer)] = arriving.back().const_data_ptr();
        }
        rows[static_cast<size_t>(rank_)] = row(input, rank_, n).const_data_ptr();
        auto exchange = c10::make_intrusive<Sum>(
            "gloo:reduce_scatter", Tensors{output, input, room}, std::move(rows), rank_, average);
        const int tag = next_tag();
        const at::DisableRecordFunctionGuard unseen;
        for (size_t i = 0; i < arriving.size(); i++) {
            exchange->received_by(receive(arriving[i], peers()[i], tag));
        }
        for (int peer : peers()) {
            exchange->sent_by(send(row(input, peer, n), peer, tag));
        }
        return exchange;
    }

    /* All else is the engine's. It is asked for only while this stands in the engine's place
     * (DirectBackendIn), by another thread or by who handles the collective. */
    c10::intrusive_ptr<Options> getBackendOptions() override {
        return engine_->getBackendOptions();
    }
    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
        return engine_->broadcast(tensors, options);
    }
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        return engine_->allreduce(tensors, options);
    }
    WorkPtr allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        return engine_->allreduce_sparse(tensors, options);
    }
    WorkPtr allreduce_coalesced(Tensors &tensors,
                                const c10d::AllreduceCoalescedOptions &options) override {
        return engine_->allreduce_coalesced(tensors, options);
    }
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
        return engine_->reduce(tensors, options);
    }
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &options) override {
        return engine_->allgather(outputs, inputs, options);
    }
    WorkPtr allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs,
                                const c10d::AllgatherOptions &options) override {
        return engine_->allgather_coalesced(outputs, inputs, options);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override {
        return engine_->allgather_into_tensor_coalesced(outputs, inputs, options);
    }
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs,
                   const c10d::GatherOptions &options) override {
        return engine_->gather(outputs, inputs, options);
    }
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                    const c10d::ScatterOptions &options) override {
        return engine_->scatter(outputs, inputs, options);
    }
    WorkPtr reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                           const c10d::ReduceScatterOptions &options) override {
        return engine_->reduce_scatter(outputs, inputs, options);
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &options) override {
        return engine_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
    }
    WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &to,
                          std::vector<int64_t> &from,
                          const c10d::AllToAllOptions &options) override {
        return engine_->alltoall_base(output, input, to, from, options);
    }
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                     const c10d::AllToAllOptions &options) override {
        return engine_->alltoall(outputs, inputs, options);
    }
    void monitoredBarrier(const c10d::BarrierOptions &options, bool wait_all) override {
        engine_->monitoredBarrier(options, wait_all);
    }
    void setSequenceNumberForGroup() override {
        engine_->setSequenceNumberForGroup();
    }
    uint64_t getSequenceNumberForGroup() override {
        return engine_->getSequenceNumberForGroup();
    }
    WorkPtr send(Tensors &tensors, int to, int tag) override {
        return engine_->send(tensors, to, tag);
    }
    WorkPtr recv(Tensors &tensors, int from, int tag) override {
        return engine_->recv(tensors, from, tag);
    }
    WorkPtr recvAnysource(Tensors &tensors, int tag) override {
        return engine_->recvAnysource(tensors, tag);
    }
    WorkPtr barrier(const c10d::BarrierOptions &options) override {
        return engine_->barrier(options);
    }
    /* A group that this was put into tells the engine itself. */
    void setTimeout(std::chrono::milliseconds) override {}
    void shutdown() override {}
    void abort() override {}

  private:
    /* All other ranks, each rank's next one first, so that no rank is everybody's first. */
    std::vector<int> peers() const {
        std::vector<int> all;
        for (int hop = 1; hop < size_; hop++) {
            all.push_back((rank_ + hop) % size_);
        }
        return all;
    }

    static at::Tensor row(const at::Tensor &rows, int64_t index, int64_t numel) {
        return rows.narrow(0, index * numel, numel);
    }

    /* What gloo would refuse, too, is left to it. */
    bool rows_fit(const at::Tensor &rows, const at::Tensor &one) const {
        return rows.dim() == 1 && one.dim() == 1 && rows.is_contiguous() && one.is_contiguous() &&
               rows.scalar_type() == one.scalar_type() && rows.numel() == one.numel() * size_ &&
               one.numel() > 0;
    }

    int next_tag() {
        return static_cast<int>(kTagBase + (agreement_->messages++ & kTagCount));
    }

    WorkPtr receive(const at::Tensor &to, int peer, int tag) {
        Tensors one{to};
        return engine_->recv(one, peer, tag);
    }

    WorkPtr send(const at::Tensor &from, int peer, int tag) {
        Tensors one{from};
        return engine_->send(one, peer, tag);
    }

    c10::intrusive_ptr<c10d::Backend> engine_;
    std::shared_ptr<fct::Agreement> agreement_;
};

bool set(const char *variable) {
    const char *value = std::getenv(variable);
    return value != nullptr && value[0] != '\0' && std::string(value) != "0";
}

/* Whether this rank wants it: not where somebody looks at what gloo itself does. */
bool wanted() {
    const char *choice = std::getenv("FSDP_C_TRANSPORT");
    return (choice == nullptr || std::string(choice) != "gloo") &&
           c10d::debug_level() == c10d::DebugLevel::Off && !set("TORCH_FR_BUFFER_SIZE") &&
           !set("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

/* The backend itself, and not what wraps or replaces it under its name: its class is not in the
 * headers that can be included. */
bool is_gloo(const c10d::Backend &backend) {
    return std::string(typeid(backend).name()) == "N4c10d16ProcessGroupGlooE";
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

void agree(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group) {
    if (agreement.state != Agreement::State::open) {
        return;
    }
    if (!agreement.question) {
        const auto engine = group->getBackend(c10::DeviceType::CPU);
        if (group->getSize() < 2 || !is_gloo(*engine)) {
            agreement.state = Agreement::State::declined;
            return;
        }
        at::Tensor answer = at::full({1}, wanted() ? 1 : 0, at::kLong);
        agreement.answers = at::empty({group->getSize()}, at::kLong);
        pybind11::gil_scoped_release released;
        agreement.question = engine->_allgather_base(agreement.answers, answer);
    }
    const auto held = agreement.question;
    wait_in_slices(*held);
    agreement.state = agreement.answers.all().item<bool>() ? Agreement::State::direct
                                                           : Agreement::State::declined;
    agreement.question.reset();
    agreement.answers.reset();
}

c10::intrusive_ptr<c10d::ProcessGroup> direct(const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                                              std::shared_ptr<Agreement> agreement) {
    auto backend =
        c10::make_intrusive<Direct>(group->getBackend(c10::DeviceType::CPU), std::move(agreement));
    auto made = c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), group->getRank(),
                                                        group->getSize());
    made->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    made->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    made->setGroupName(group->getGroupName());
    made->setGroupDesc(group->getGroupDesc());
    return made;
}

/* A type under which the group has no backend, or has the direct one from before. */
static c10d::ProcessGroup::BackendType free_type(const c10d::ProcessGroup &group) {
    using Type = c10d::ProcessGroup::BackendType;
    for (const Type type : {Type::CUSTOM, Type::MPI, Type::UCC}) {
        try {
            if (dynamic_cast<Direct *>(group.getBackend(type).get()) != nullptr) {
                return type;
            }
        } catch (const std::exception &) {
            return type; /* there is none */
        }
    }
    TORCH_CHECK(false, "the process group has backends of all types");
}

DirectBackendIn::DirectBackendIn(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 const c10::intrusive_ptr<c10d::ProcessGroup> &direct) {
    const auto now = group->getBackend(c10::DeviceType::CPU);
    if (dynamic_cast<Direct *>(now.get()) == nullptr) { /* else somebody around this has done it */
        group->setBackend(c10::DeviceType::CPU, free_type(*group),
                          direct->getBackend(c10::DeviceType::CPU));
        group_ = std::move(group);
    }
}

DirectBackendIn::~DirectBackendIn() {
    if (group_) {
        /* The group has this one already and takes it again. */
        using Type = c10d::ProcessGroup::BackendType;
        group_->setBackend(c10::DeviceType::CPU, Type::GLOO, group_->getBackend(Type::GLOO));
    }
}

} // namespace fct
