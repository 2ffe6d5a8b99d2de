/* A c10d backend that moves the rows of a process group through the shared memory of one host.
 *
 * torch's gloo backend gathers into a temporary buffer and copies that to the output. Its
 * reduce-scatter copies the input, all-reduces all of it and takes a slice. DirectBackend writes each
 * rank's rows to shared memory once (transport.h), and the peers read them from there. It adds the
 * rows of a reduction in the order of gloo's ring (kernels/ring.h), so the bits are gloo's.
 *
 * DirectBackend stands in a process group of its own, which only this extension holds. The collectives
 * are the same ops of namespace c10d, so dispatch modes, patches and profilers see the same calls.
 *
 * A rank must receive what its peers send. So all ranks of a group agree once on whether, and from
 * which collective on, they use DirectBackend (negotiation.h). From then on the choice depends on sizes and
 * element types only, which are the same on all ranks. A group whose ranks span hosts, or one of
 * whose ranks has no shared memory, uses gloo's collectives.
 *
 * A collective that does not fit into the shared memory at once makes progress only inside wait().
 * The group's progress_thread thread waits for it (wait_task.h): its operation type is unknown, as that of
 * gloo's reduce-scatter. */
#include "direct.h"

#include "../kernels/ring.h"
#include "all_reduce.h"
#include "shm_collective.h"

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

thread_local bool reduces_gradients = false; /* see all_reduces_rows */

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
        const at::Tensor rows = output.view({size_, input.numel()});
        if (rows[rank_].data_ptr() != input.data_ptr()) {
            rows[rank_].copy_(input);
        }
        auto collective = c10::make_intrusive<ShmCollective>(ShmCollective::Operation::all_gather,
                                                             Tensors{output, input});
        return start(std::move(collective), std::move(transport), RankShards::of_tensor(rows));
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = negotiation_->active_transport();
        if (!transport || !can_sum(output, options.reduceOp) || !are_rank_shards(input, output)) {
            return fallback_->_reduce_scatter_base(output, input, options);
        }
        const at::Tensor rows = input.view({size_, output.numel()});
        auto collective =
            c10::make_intrusive<ShmReduceScatter>(Tensors{output, input}, rank_, size_, average);
        return start(std::move(collective), std::move(transport), RankShards::of_tensor(rows));
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        const bool average = options.reduceOp == c10d::ReduceOp::AVG;
        auto transport = negotiation_->active_transport();
        if (!transport || !reduces_gradients || tensors.size() != 1 || tensors[0].numel() == 0 ||
            !tensors[0].is_contiguous() || !can_sum(tensors[0], options.reduceOp)) {
            return fallback_->allreduce(tensors, options);
        }
        auto collective = c10::make_intrusive<fct::ShmAllReduce>(tensors[0], rank_, size_, average);
        const at::DisableRecordFunctionGuard unseen;
        collective->set_timeout(fallback_->getBackendOptions()->timeout);
        collective->start(std::move(transport));
        return collective;
    }

    /* Chunks are 1-D: the parts of all ranks, one after the other. */
    WorkPtr gather_chunks(const Tensors &chunks, const fct_chunk_layout &layout) {
        const Tensors parts = by_rank(chunks);
        auto collective =
            c10::make_intrusive<ShmCollective>(ShmCollective::Operation::all_gather, parts);
        collective->release_on_completion();
        return start(std::move(collective), require_transport(),
                     RankShards::of_chunks(parts, layout));
    }
    WorkPtr reduce_chunks(const at::Tensor &output, const Tensors &chunks,
                          const fct_chunk_layout &layout, bool average) {
        const Tensors parts = by_rank(chunks);
        RankShards rows = RankShards::of_chunks(parts, layout);
        TORCH_CHECK(rows.bytes == output.nbytes() && rows.type == output.scalar_type(), "a row of ",
                    rows.bytes, " bytes is reduced into ", output.nbytes());
        Tensors held{output};
        held.insert(held.end(), parts.begin(), parts.end());
        auto collective =
            c10::make_intrusive<ShmReduceScatter>(std::move(held), rank_, size_, average);
        collective->release_on_completion();
        return start(std::move(collective), require_transport(), std::move(rows));
    }

    /* All else is the fallback's. It is asked for only while this stands in the fallback's place
     * (ScopedDirectBackend), by another thread or by who handles the collective. */
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
    /* A group that this was put into tells the fallback itself. */
    void setTimeout(std::chrono::milliseconds) override {}
    void shutdown() override {
        close_transport();
    }
    void abort() override {
        close_transport();
    }

  private:
    /* At the group's end. Later collectives of this rank are gloo's, which reports the end. */
    void close_transport() {
        negotiation_->state = fct::Negotiation::State::declined;
        negotiation_->handles.clear();
        if (const auto transport = std::exchange(negotiation_->transport, nullptr)) {
            transport->abort("the process group has ended");
        }
    }

    /* Separate chunks have no equivalent among gloo's collectives. */
    std::shared_ptr<ShmTransport> require_transport() const {
        auto transport = negotiation_->active_transport();
        TORCH_CHECK(transport, "the process group has ended");
        return transport;
    }

    Tensors by_rank(const Tensors &chunks) const {
        Tensors rows;
        rows.reserve(chunks.size());
        for (const at::Tensor &chunk : chunks) {
            rows.push_back(chunk.view({size_, -1}));
        }
        return rows;
    }

    WorkPtr start(c10::intrusive_ptr<ShmCollective> collective,
                  std::shared_ptr<ShmTransport> transport, RankShards rows) {
        const at::DisableRecordFunctionGuard unseen;
        collective->set_timeout(fallback_->getBackendOptions()->timeout);
        collective->start(std::move(transport), std::move(rows), rank_);
        return collective;
    }

    /* In the order of gloo's ring. */
    static bool can_sum(const at::Tensor &row, const c10d::ReduceOp &op) {
        return (op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::SUM) &&
               fck_ring_knows(static_cast<fck_dtype>(row.scalar_type())) != 0;
    }

    /* gloo handles, or refuses, other layouts. */
    bool are_rank_shards(const at::Tensor &rows, const at::Tensor &one) const {
        return rows.dim() == 1 && one.dim() == 1 && rows.is_contiguous() && one.is_contiguous() &&
               rows.scalar_type() == one.scalar_type() && rows.numel() == one.numel() * size_ &&
               one.numel() > 0;
    }

    c10::intrusive_ptr<c10d::Backend> fallback_;
    std::shared_ptr<fct::Negotiation> negotiation_;
};

} // namespace

namespace fct {

bool all_reduces_rows(bool rows) {
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
        return nullptr; /* there is none */
    }
}

/* A type under which the group has no backend, or has the direct one from before. */
static Type free_type(const c10d::ProcessGroup &group) {
    for (const Type type : {Type::UCC, Type::MPI, Type::CUSTOM}) {
        const auto found = backend_at(group, type);
        if (!found || dynamic_cast<DirectBackend *>(found.get()) != nullptr) {
            return type;
        }
    }
    TORCH_CHECK(false, "the process group has backends of all types");
}

/* The group has gloo's already and takes it again. */
static void put_gloo_back(c10d::ProcessGroup &group) {
    group.setBackend(c10::DeviceType::CPU, Type::GLOO, group.getBackend(Type::GLOO));
}

bool attach_backend(c10d::ProcessGroup &group, const std::shared_ptr<Negotiation> &negotiation) {
    if (backend_at(group, Type::GLOO) != group.getBackend(c10::DeviceType::CPU)) {
        return false;
    }
    group.setBackend(
        c10::DeviceType::CPU, free_type(group),
        c10::make_intrusive<DirectBackend>(group.getBackend(c10::DeviceType::CPU), negotiation));
    put_gloo_back(group);
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
    if (dynamic_cast<DirectBackend *>(now.get()) ==
        nullptr) { /* else somebody around this has done it */
        group->setBackend(c10::DeviceType::CPU, free_type(*group),
                          direct->getBackend(c10::DeviceType::CPU));
        group_ = std::move(group);
    }
}

ScopedDirectBackend::~ScopedDirectBackend() {
    if (group_) {
        put_gloo_back(*group_);
    }
}

} // namespace fct
