/* A c10d backend that moves the data of a process group through the shared memory of one host.
 *
 * torch's gloo backend gathers into a temporary buffer and copies the buffer to the output. Its
 * reduce-scatter copies the input, all-reduces the whole copy and takes a slice. ShmBackend writes
 * each rank's data to shared memory once (csrc/transport), and the peers read the data there. A
 * reduction adds in the order of gloo's ring (kernels/ring.h), so the bits are equal to gloo's.
 *
 * ShmBackend belongs to a process group of its own, which only this extension holds. Collectives
 * are the same ops of namespace c10d, so dispatch modes, patches and profilers observe the same
 * calls.
 *
 * All ranks of a group must use the same backend for a collective. They negotiate once whether they
 * use ShmBackend, and from which collective on (transport/negotiation.h). After that the choice
 * depends only on sizes and dtypes, which are equal on all ranks. A group uses gloo's collectives
 * if its ranks span hosts, or if a rank has no shared memory.
 *
 * Collectives progress only while a thread waits for one or polls one. If messages of a collective
 * do not fit into the ring at issue, peers wait for this progress. So the progress thread of the
 * group waits for such a collective (progress.h). Its work has the operation type UNKNOWN, like
 * gloo's reduce-scatter. */
#include "shm_backend.hpp"

#include "shm_work.hpp"

#include <ATen/record_function.h>

#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

using fct::RankShards;
using fct::ShmTransportPtr;
using fct::ShmWork;

thread_local bool reduces_gradients = false; /* see set_gradient_all_reduce */

class ShmBackend : public c10d::Backend {
  public:
    ShmBackend(c10::intrusive_ptr<c10d::Backend> fallback, const fct_shm_methods &methods,
               shm_negotiation *negotiation)
        : Backend(fallback->getRank(), fallback->getSize()), fallback_(std::move(fallback)),
          methods_(methods), negotiation_(negotiation) {
        methods_.retain_negotiation(negotiation_);
    }
    ShmBackend(const ShmBackend &) = delete;
    ShmBackend &operator=(const ShmBackend &) = delete;
    ~ShmBackend() override {
        methods_.close_negotiation(negotiation_);
        methods_.release_negotiation(negotiation_);
    }

    const std::string getBackendName() const override {
        return fallback_->getBackendName();
    }

    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                            const c10d::AllgatherOptions &options) override {
        auto transport = active_transport();
        if (!transport || !are_rank_shards(output, input)) {
            return fallback_->_allgather_base(output, input, options);
        }
        const at::Tensor shards = output.view({size_, input.numel()});
        if (shards[rank_].data_ptr() != input.data_ptr()) {
            shards[rank_].copy_(input);
        }
        auto work =
            c10::make_intrusive<ShmWork>(methods_, FCT_OP_ALL_GATHER, Tensors{output, input});
        return start(std::move(work), std::move(transport), RankShards::of_tensor(shards));
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = active_transport();
        if (!transport || !can_sum(output, options.reduceOp) || !are_rank_shards(input, output)) {
            return fallback_->_reduce_scatter_base(output, input, options);
        }
        const at::Tensor shards = input.view({size_, output.numel()});
        auto work = c10::make_intrusive<ShmWork>(methods_, FCT_OP_REDUCE_SCATTER,
                                                 Tensors{output, input}, average);
        return start(std::move(work), std::move(transport), RankShards::of_tensor(shards));
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = active_transport();
        if (!transport || !reduces_gradients || tensors.size() != 1 || tensors[0].numel() == 0 ||
            !tensors[0].is_contiguous() || !can_sum(tensors[0], options.reduceOp)) {
            return fallback_->allreduce(tensors, options);
        }
        auto work =
            c10::make_intrusive<ShmWork>(methods_, FCT_OP_ALL_REDUCE, Tensors{tensors[0]}, average);
        return start(std::move(work), std::move(transport), {});
    }

    /* Each chunk is 1-D and contains data of all ranks, in rank order. */
    WorkPtr gather_chunks(const Tensors &chunks, const fct_chunk_layout &layout) {
        const Tensors parts = view_by_rank(chunks);
        auto work = c10::make_intrusive<ShmWork>(methods_, FCT_OP_ALL_GATHER, parts);
        work->release_on_completion();
        return start(std::move(work), require_transport(), RankShards::of_chunks(parts, layout));
    }
    WorkPtr reduce_chunks(const at::Tensor &output, const Tensors &chunks,
                          const fct_chunk_layout &layout, bool average) {
        const Tensors parts = view_by_rank(chunks);
        const RankShards shards = RankShards::of_chunks(parts, layout);
        TORCH_CHECK(shards.bytes == output.nbytes() && shards.type == output.scalar_type(),
                    "the rank shard of a reduce-scatter has ", shards.bytes, " bytes, its output ",
                    output.nbytes());
        Tensors tensors{output};
        tensors.insert(tensors.end(), parts.begin(), parts.end());
        auto work = c10::make_intrusive<ShmWork>(methods_, FCT_OP_REDUCE_SCATTER,
                                                 std::move(tensors), average);
        work->release_on_completion();
        return start(std::move(work), require_transport(), shards);
    }

    /* The methods up to barrier() forward to the fallback. They are called only inside a
     * ScopedShmBackend, by another thread, or by a dispatch mode that handles a collective. */
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
        methods_.close_negotiation(negotiation_);
    }
    void abort() override {
        methods_.close_negotiation(negotiation_);
    }

  private:
    /* The transport of the next collective; null if the fallback moves its data. */
    ShmTransportPtr active_transport() const {
        return {methods_.active_transport(negotiation_), methods_.release_transport};
    }

    /* Throws if there is no transport, because gloo has no collectives of separate chunks. */
    ShmTransportPtr require_transport() const {
        auto transport = active_transport();
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

    WorkPtr start(c10::intrusive_ptr<ShmWork> work, ShmTransportPtr transport,
                  const RankShards &shards) {
        const at::DisableRecordFunctionGuard no_record;
        shm_request request = {};
        request.rank = static_cast<int>(rank_);
        request.world = static_cast<int>(size_);
        request.timeout_ms = fallback_->getBackendOptions()->timeout.count();
        work->start(std::move(transport), request, shards);
        return work;
    }

    /* Whether the transport can sum this dtype, in the order of gloo's ring. */
    bool can_sum(const at::Tensor &tensor, const c10d::ReduceOp &op) const {
        return (op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::SUM) &&
               methods_.can_sum(static_cast<fct_dtype>(tensor.scalar_type()));
    }

    /* Other layouts go to gloo, which handles or refuses them. */
    bool are_rank_shards(const at::Tensor &all, const at::Tensor &shard) const {
        return all.dim() == 1 && shard.dim() == 1 && all.is_contiguous() && shard.is_contiguous() &&
               all.scalar_type() == shard.scalar_type() && all.numel() == shard.numel() * size_ &&
               shard.numel() > 0;
    }

    c10::intrusive_ptr<c10d::Backend> fallback_;
    const fct_shm_methods &methods_;
    shm_negotiation *const negotiation_; /* holds one reference */
};

} // namespace

namespace fct {

bool set_gradient_all_reduce(bool gradients) {
    return std::exchange(reduces_gradients, gradients);
}

bool is_cpu_bound(const c10d::Work &work) {
    const auto *shm_work = dynamic_cast<const ShmWork *>(&work);
    return shm_work != nullptr && shm_work->is_cpu_bound();
}

bool rank_checksum(const c10d::Work &work, size_t run, int64_t rank, uint64_t *checksum) {
    const auto *shm_work = dynamic_cast<const ShmWork *>(&work);
    return shm_work != nullptr && shm_work->rank_checksum(run, rank, checksum);
}

static ShmBackend &backend_of(c10d::ProcessGroup &shm_group) {
    return dynamic_cast<ShmBackend &>(*shm_group.getBackend(c10::DeviceType::CPU));
}

c10::intrusive_ptr<c10d::Work> gather_chunks(c10d::ProcessGroup &shm_group,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout) {
    return backend_of(shm_group).gather_chunks(chunks, layout);
}

c10::intrusive_ptr<c10d::Work> reduce_chunks(c10d::ProcessGroup &shm_group,
                                             const at::Tensor &output,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout, bool average) {
    return backend_of(shm_group).reduce_chunks(output, chunks, layout, average);
}

using Type = c10d::ProcessGroup::BackendType;

static c10::intrusive_ptr<c10d::Backend> backend_at(const c10d::ProcessGroup &group, Type type) {
    try {
        return group.getBackend(type);
    } catch (const std::exception &) {
        return nullptr; /* the group has no backend of this type */
    }
}

/* A backend type that the group does not use, or under which it has a ShmBackend already. */
static Type unused_type(const c10d::ProcessGroup &group) {
    for (const Type type : {Type::UCC, Type::MPI, Type::CUSTOM}) {
        const auto backend = backend_at(group, type);
        if (!backend || dynamic_cast<ShmBackend *>(backend.get()) != nullptr) {
            return type;
        }
    }
    TORCH_CHECK(false, "the process group has no unused backend type");
}

/* Makes gloo the CPU backend of the group again. */
static void restore_gloo(c10d::ProcessGroup &group) {
    group.setBackend(c10::DeviceType::CPU, Type::GLOO, group.getBackend(Type::GLOO));
}

bool add_shm_backend(c10d::ProcessGroup &group, const fct_shm_methods &methods,
                     shm_negotiation *negotiation) {
    if (backend_at(group, Type::GLOO) != group.getBackend(c10::DeviceType::CPU)) {
        return false;
    }
    group.setBackend(c10::DeviceType::CPU, unused_type(group),
                     c10::make_intrusive<ShmBackend>(group.getBackend(c10::DeviceType::CPU),
                                                     methods, negotiation));
    restore_gloo(group);
    return true;
}

c10::intrusive_ptr<c10d::ProcessGroup>
make_shm_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group) {
    const auto backend = backend_at(*group, unused_type(*group));
    TORCH_CHECK(backend, "the process group has no shared-memory backend");
    auto shm_group = c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), group->getRank(),
                                                             group->getSize());
    shm_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    shm_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    shm_group->setGroupName(group->getGroupName());
    shm_group->setGroupDesc(group->getGroupDesc());
    return shm_group;
}

ScopedShmBackend::ScopedShmBackend(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   const c10::intrusive_ptr<c10d::ProcessGroup> &shm_group) {
    const auto current = group->getBackend(c10::DeviceType::CPU);
    /* An outer ScopedShmBackend may have replaced the backend already. */
    if (dynamic_cast<ShmBackend *>(current.get()) == nullptr) {
        group->setBackend(c10::DeviceType::CPU, unused_type(*group),
                          shm_group->getBackend(c10::DeviceType::CPU));
        group_ = std::move(group);
    }
}

ScopedShmBackend::~ScopedShmBackend() {
    if (group_) {
        restore_gloo(*group_);
    }
}

} // namespace fct
