/* A c10d backend that moves the data of a process group through the shared memory of one host.
 *
 * torch's gloo backend gathers into a temporary buffer and copies that to the output. Its
 * reduce-scatter copies the input, all-reduces all of it and takes a slice. DirectBackend writes
 * each rank's data to shared memory once (shm_transport.hpp), and the peers read it from there. A
 * reduction adds in the order of gloo's ring (kernels/ring.h), so the bits are equal to gloo's.
 *
 * DirectBackend belongs to a process group of its own, which only this extension holds. Collectives
 * are the same ops of namespace c10d, so dispatch modes, patches and profilers see the same calls.
 *
 * A rank must receive what its peers send. All ranks of a group negotiate once whether, and from
 * which collective on, they use DirectBackend (negotiation.hpp). After that the choice depends only
 * on sizes and dtypes, which are equal on all ranks. A group uses gloo's collectives if its ranks
 * span hosts or if one of them has no shared memory.
 *
 * A collective that is larger than the ring makes progress only inside wait(). The progress thread
 * of the group waits for it (progress.hpp). Its operation type is UNKNOWN, as that of gloo's
 * reduce-scatter. */
#include "direct.hpp"

#include "../kernels/ring.h"
#include "all_reduce.hpp"
#include "shm_collective.hpp"

#include <ATen/record_function.h>

#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

using fct::RankShards;
using fct::ShmCollective;
using fct::ShmReduceScatter;
using fct::ShmTransport;

thread_local bool reduces_gradients = false; /* see set_gradient_all_reduce */

class DirectBackend : public c10d::Backend {
  public:
    DirectBackend(c10::intrusive_ptr<c10d::Backend> fallback,
                  std::shared_ptr<fct::Negotiation> negotiation)
        : Backend(fallback->getRank(), fallback->getSize()), fallback_(std::move(fallback)),
          negotiation_(std::move(negotiation)) {}
    DirectBackend(const DirectBackend &) = delete;
    DirectBackend &operator=(const DirectBackend &) = delete;
    ~DirectBackend() override {
        close_transport();
    }

    const std::string getBackendName() const override {
        return fallback_->getBackendName();
    }

    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                            const c10d::AllgatherOptions &options) override {
        auto transport = negotiation_->active_transport();
        if (!transport || !are_rank_shards(output, input)) {
            return fallback_->_allgather_base(output, input, options);
        }
        const at::Tensor shards = output.view({size_, input.numel()});
        if (shards[rank_].data_ptr() != input.data_ptr()) {
            shards[rank_].copy_(input);
        }
        auto collective = c10::make_intrusive<ShmCollective>(ShmCollective::Operation::all_gather,
                                                             Tensors{output, input});
        return start(std::move(collective), std::move(transport), RankShards::of_tensor(shards));
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = negotiation_->active_transport();
        if (!transport || !can_sum(output, options.reduceOp) || !are_rank_shards(input, output)) {
            return fallback_->_reduce_scatter_base(output, input, options);
        }
        const at::Tensor shards = input.view({size_, output.numel()});
        auto collective =
            c10::make_intrusive<ShmReduceScatter>(Tensors{output, input}, rank_, size_, average);
        return start(std::move(collective), std::move(transport), RankShards::of_tensor(shards));
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = negotiation_->active_transport();
        if (!transport || !reduces_gradients || tensors.size() != 1 || tensors[0].numel() == 0 ||
            !tensors[0].is_contiguous() || !can_sum(tensors[0], options.reduceOp)) {
            return fallback_->allreduce(tensors, options);
        }
        auto collective = c10::make_intrusive<fct::ShmAllReduce>(tensors[0], rank_, size_, average);
        const at::DisableRecordFunctionGuard no_record;
        collective->set_timeout(fallback_->getBackendOptions()->timeout);
        collective->start(std::move(transport));
        return collective;
    }

    /* Each chunk is 1-D and holds data of all ranks, in rank order. */
    WorkPtr gather_chunks(const Tensors &chunks, const fct_chunk_layout &layout) {
        const Tensors parts = view_by_rank(chunks);
        auto collective =
            c10::make_intrusive<ShmCollective>(ShmCollective::Operation::all_gather, parts);
        collective->release_on_completion();
        return start(std::move(collective), require_transport(),
                     RankShards::of_chunks(parts, layout));
    }
    WorkPtr reduce_chunks(const at::Tensor &output, const Tensors &chunks,
                          const fct_chunk_layout &layout, bool average) {
        const Tensors parts = view_by_rank(chunks);
        RankShards shards = RankShards::of_chunks(parts, layout);
        TORCH_CHECK(shards.bytes == output.nbytes() && shards.type == output.scalar_type(),
                    "the rank shard of a reduce-scatter has ", shards.bytes, " bytes, its output ",
                    output.nbytes());
        Tensors tensors{output};
        tensors.insert(tensors.end(), parts.begin(), parts.end());
        auto collective =
            c10::make_intrusive<ShmReduceScatter>(std::move(tensors), rank_, size_, average);
        collective->release_on_completion();
        return start(std::move(collective), require_transport(), std::move(shards));
    }

    /* The methods below forward to the fallback. They are called only inside a ScopedDirectBackend,
     * by another thread or by the handler of a collective. */
    c10::intrusive_ptr<Options> getBackendOptions() override {
        return fallback_->getBackendOptions();
    }
    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
        return fallback_->broadcast(tensors, options);
    }
    WorkPtr allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        return fallback_->allreduce_sparse(tensors, options);
    }
    WorkPtr allreduce_coalesced(Tensors &tensors,
                                const c10d::AllreduceCoalescedOptions &options) override {
        return fallback_->allreduce_coalesced(tensors, options);
    }
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
        return fallback_->reduce(tensors, options);
    }
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &options) override {
        return fallback_->allgather(outputs, inputs, options);
    }
    WorkPtr allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs,
                                const c10d::AllgatherOptions &options) override {
        return fallback_->allgather_coalesced(outputs, inputs, options);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override {
        return fallback_->allgather_into_tensor_coalesced(outputs, inputs, options);
    }
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs,
                   const c10d::GatherOptions &options) override {
        return fallback_->gather(outputs, inputs, options);
    }
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                    const c10d::ScatterOptions &options) override {
        return fallback_->scatter(outputs, inputs, options);
    }
    WorkPtr reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                           const c10d::ReduceScatterOptions &options) override {
        return fallback_->reduce_scatter(outputs, inputs, options);
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &options) override {
        return fallback_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
    }
    WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &to,
                          std::vector<int64_t> &from,
                          const c10d::AllToAllOptions &options) override {
        return fallback_->alltoall_base(output, input, to, from, options);
    }
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                     const c10d::AllToAllOptions &options) override {
        return fallback_->alltoall(outputs, inputs, options);
    }
    void monitoredBarrier(const c10d::BarrierOptions &options, bool wait_all) override {
        fallback_->monitoredBarrier(options, wait_all);
    }
    void setSequenceNumberForGroup() override {
        fallback_->setSequenceNumberForGroup();
    }
    uint64_t getSequenceNumberForGroup() override {
        return fallback_->getSequenceNumberForGroup();
    }
    WorkPtr send(Tensors &tensors, int to, int tag) override {
        return fallback_->send(tensors, to, tag);
    }
    WorkPtr recv(Tensors &tensors, int from, int tag) override {
        return fallback_->recv(tensors, from, tag);
    }
    WorkPtr recvAnysource(Tensors &tensors, int tag) override {
        return fallback_->recvAnysource(tensors, tag);
    }
    WorkPtr barrier(const c10d::BarrierOptions &options) override {
        return fallback_->barrier(options);
    }
    /* The process group sets the timeout of the fallback itself. */
    void setTimeout(std::chrono::milliseconds) override {}
    void shutdown() override {
        close_transport();
    }
    void abort() override {
        close_transport();
    }

  private:
    /* Called at the end of the group. Later collectives use gloo, which reports the end. */
    void close_transport() {
        negotiation_->state = fct::Negotiation::State::declined;
        negotiation_->handles.clear();
        if (const auto transport = std::exchange(negotiation_->transport, nullptr)) {
            transport->abort("the process group has ended");
        }
    }

    /* Throws without a transport: gloo has no collectives of separate chunks. */
    std::shared_ptr<ShmTransport> require_transport() const {
        auto transport = negotiation_->active_transport();
        TORCH_CHECK(transport, "the process group has ended");
        return transport;
    }

    /* Views of chunks as [ranks, elements]. */
    Tensors view_by_rank(const Tensors &chunks) const {
        Tensors views;
        views.reserve(chunks.size());
        for (const at::Tensor &chunk : chunks) {
            views.push_back(chunk.view({size_, -1}));
        }
        return views;
    }

    WorkPtr start(c10::intrusive_ptr<ShmCollective> collective,
                  std::shared_ptr<ShmTransport> transport, RankShards shards) {
        const at::DisableRecordFunctionGuard no_record;
        collective->set_timeout(fallback_->getBackendOptions()->timeout);
        collective->start(std::move(transport), std::move(shards), rank_);
        return collective;
    }

    /* Whether the kernels add the dtype in the order of gloo's ring. */
    static bool can_sum(const at::Tensor &tensor, const c10d::ReduceOp &op) {
        return (op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::SUM) &&
               fck_ring_supports(static_cast<fck_dtype>(tensor.scalar_type())) != 0;
    }

    /* Other layouts go to gloo, which handles or refuses them. */
    bool are_rank_shards(const at::Tensor &all, const at::Tensor &shard) const {
        return all.dim() == 1 && shard.dim() == 1 && all.is_contiguous() && shard.is_contiguous() &&
               all.scalar_type() == shard.scalar_type() && all.numel() == shard.numel() * size_ &&
               shard.numel() > 0;
    }

    c10::intrusive_ptr<c10d::Backend> fallback_;
    std::shared_ptr<fct::Negotiation> negotiation_;
};

} // namespace

namespace fct {

bool set_gradient_all_reduce(bool rows) {
    return std::exchange(reduces_gradients, rows);
}

bool is_cpu_bound(const c10d::Work &work) {
    const auto *collective = dynamic_cast<const ShmCollective *>(&work);
    return collective != nullptr && collective->is_cpu_bound();
}

static DirectBackend &backend_of(c10d::ProcessGroup &direct) {
    return dynamic_cast<DirectBackend &>(*direct.getBackend(c10::DeviceType::CPU));
}

c10::intrusive_ptr<c10d::Work> gather_chunks(c10d::ProcessGroup &direct,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout) {
    return backend_of(direct).gather_chunks(chunks, layout);
}

c10::intrusive_ptr<c10d::Work> reduce_chunks(c10d::ProcessGroup &direct, const at::Tensor &output,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout, bool average) {
    return backend_of(direct).reduce_chunks(output, chunks, layout, average);
}

using Type = c10d::ProcessGroup::BackendType;

static c10::intrusive_ptr<c10d::Backend> backend_at(const c10d::ProcessGroup &group, Type type) {
    try {
        return group.getBackend(type);
    } catch (const std::exception &) {
        return nullptr; /* the group has no backend of this type */
    }
}

/* A backend type that the group does not use, or under which it has a DirectBackend already. */
static Type free_type(const c10d::ProcessGroup &group) {
    for (const Type type : {Type::UCC, Type::MPI, Type::CUSTOM}) {
        const auto found = backend_at(group, type);
        if (!found || dynamic_cast<DirectBackend *>(found.get()) != nullptr) {
            return type;
        }
    }
    TORCH_CHECK(false, "the process group has no unused backend type");
}

/* Makes gloo the CPU backend of the group again. */
static void restore_gloo(c10d::ProcessGroup &group) {
    group.setBackend(c10::DeviceType::CPU, Type::GLOO, group.getBackend(Type::GLOO));
}

bool attach_backend(c10d::ProcessGroup &group, const std::shared_ptr<Negotiation> &negotiation) {
    if (backend_at(group, Type::GLOO) != group.getBackend(c10::DeviceType::CPU)) {
        return false;
    }
    group.setBackend(
        c10::DeviceType::CPU, free_type(group),
        c10::make_intrusive<DirectBackend>(group.getBackend(c10::DeviceType::CPU), negotiation));
    restore_gloo(group);
    return true;
}

c10::intrusive_ptr<c10d::ProcessGroup>
make_direct_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                  std::shared_ptr<Negotiation> negotiation) {
    auto backend = backend_at(*group, free_type(*group));
    if (!backend) {
        backend = c10::make_intrusive<DirectBackend>(group->getBackend(c10::DeviceType::CPU),
                                                     std::move(negotiation));
    }
    auto made = c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), group->getRank(),
                                                        group->getSize());
    made->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    made->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    made->setGroupName(group->getGroupName());
    made->setGroupDesc(group->getGroupDesc());
    return made;
}

ScopedDirectBackend::ScopedDirectBackend(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                         const c10::intrusive_ptr<c10d::ProcessGroup> &direct) {
    const auto now = group->getBackend(c10::DeviceType::CPU);
    /* An outer ScopedDirectBackend may have replaced the backend already. */
    if (dynamic_cast<DirectBackend *>(now.get()) == nullptr) {
        group->setBackend(c10::DeviceType::CPU, free_type(*group),
                          direct->getBackend(c10::DeviceType::CPU));
        group_ = std::move(group);
    }
}

ScopedDirectBackend::~ScopedDirectBackend() {
    if (group_) {
        restore_gloo(*group_);
    }
}

} // namespace fct
