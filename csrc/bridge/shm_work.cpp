/* c10d::Work objects of collectives over shared memory; see shm_work.hpp. csrc/transport moves the
 * data. This file owns the tensors, divides averages, and translates errors to exceptions. */
#include "shm_work.hpp"

#include "bridge.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace fct {

/* ---- rank shards ---- */

static shm_segment segment_of(const at::Tensor &chunk, int64_t offset, int64_t numel,
                              size_t begin) {
    const size_t size = chunk.element_size();
    return {static_cast<char *>(chunk.mutable_data_ptr()) + static_cast<size_t>(offset) * size,
            static_cast<size_t>(chunk.stride(0)) * size, begin, static_cast<size_t>(numel) * size};
}

RankShards RankShards::of_tensor(const at::Tensor &tensor) {
    TORCH_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1,
                "rank shards need a tensor [ranks, elements]");
    const shm_segment segment = segment_of(tensor, 0, tensor.size(1), 0);
    return {{segment}, tensor.scalar_type(), segment.bytes};
}

RankShards RankShards::of_chunks(const std::vector<at::Tensor> &chunks,
                                 const fct_chunk_layout &layout) {
    RankShards shards;
    shards.type = chunks.at(0).scalar_type();
    shards.checksums = layout.checksums;
    std::vector<int64_t> filled(chunks.size(), 0);
    for (size_t i = 0; i < layout.count; i++) {
        const fct_run &run = layout.runs[i];
        const at::Tensor &chunk = chunks.at(run.chunk);
        TORCH_CHECK(chunk.dim() == 2 && chunk.stride(1) == 1 &&
                        chunk.scalar_type() == shards.type && run.offset == filled[run.chunk] &&
                        run.numel > 0,
                    "run ", i, " of a rank shard does not continue chunk ", run.chunk);
        filled[run.chunk] += run.numel;
        shards.segments.push_back(segment_of(chunk, run.offset, run.numel, shards.bytes));
        shards.bytes += shards.segments.back().bytes;
    }
    for (size_t k = 0; k < chunks.size(); k++) {
        TORCH_CHECK(chunks[k].size(1) == filled[k], "chunk ", k, " has ", chunks[k].size(1),
                    " elements for each rank; the runs of a rank shard cover ", filled[k]);
    }
    return shards;
}

/* ---- works ---- */

static const char *profiling_title(fct_op_kind kind) {
    static const char *const titles[] = {"gloo:all_gather", "gloo:reduce_scatter",
                                         "gloo:all_reduce"};
    return titles[kind];
}

static c10d::OpType op_type(fct_op_kind kind) {
    static constexpr c10d::OpType types[] = {
        c10d::OpType::_ALLGATHER_BASE, c10d::OpType::_REDUCE_SCATTER_BASE, c10d::OpType::ALLREDUCE};
    return types[kind];
}

static const char *dtype_name(int32_t dtype) {
    const bool valid = dtype >= 0 && dtype < static_cast<int32_t>(c10::ScalarType::NumOptions);
    return valid ? c10::toString(static_cast<c10::ScalarType>(dtype)) : "?";
}

static_assert(static_cast<int>(c10::ScalarType::NumOptions) <= 0x40, "tags have 6 bits for dtypes");

/* A scope in which operators run without the dispatch modes and transforms of this thread. Any
 * thread may complete a collective, and it holds the mutex of the transport: no Python code may
 * run. */
struct WithoutModes {
    c10::impl::ExcludeDispatchKeyGuard excluded{
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                             c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                             c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

ShmWork::ShmWork(const fct_shm_methods &methods, fct_op_kind kind, std::vector<at::Tensor> tensors,
                 bool average)
    : Work(-1, c10d::OpType::UNKNOWN, profiling_title(kind)), methods_(methods), kind_(kind),
      tensors_(std::move(tensors)), average_(average) {}

ShmWork::~ShmWork() {
    methods_.free_collective(collective_);
}

void ShmWork::release_on_completion() {
    release_on_completion_ = true;
}

void ShmWork::start(ShmTransportPtr transport, shm_request request, const RankShards &shards) {
    const at::Tensor &first = tensors_[0];
    request.kind = kind_;
    request.dtype = static_cast<int32_t>(first.scalar_type());
    request.itemsize = first.element_size();
    request.segments = shards.segments.data();
    request.segment_count = shards.segments.size();
    request.bytes = kind_ == FCT_OP_ALL_REDUCE ? first.nbytes() : shards.bytes;
    request.checksums = shards.checksums;
    request.output = static_cast<char *>(first.mutable_data_ptr());
    request.dtype_name = &dtype_name;
    world_ = request.world;
    transport_ = std::move(transport);
    collective_ = methods_.new_collective(&request);
    TORCH_CHECK(collective_ != nullptr, "no memory for a collective over shared memory");
    char error[SHM_ERROR_BYTES];
    /* The transport takes this reference, unless the submission fails. */
    (void)c10::intrusive_ptr<ShmWork>::reclaim_copy(this).release();
    switch (methods_.start(collective_, transport_.get(), {this, &complete, &release}, error)) {
    case SHM_SUBMIT_FAILED:
        release(this);
        TORCH_CHECK(false, error);
        break;
    case SHM_SUBMIT_WRITTEN:
        opType_ = op_type(kind_); /* a pending work keeps UNKNOWN; see shm_work.hpp */
        break;
    case SHM_SUBMIT_PENDING:
        break;
    }
}

bool ShmWork::is_cpu_bound() const {
    return methods_.is_cpu_bound(collective_);
}

bool ShmWork::rank_checksum(size_t segment, int64_t rank, uint64_t *checksum) const {
    return methods_.rank_checksum(collective_, segment, rank, checksum);
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
    char error[SHM_ERROR_BYTES];
    if (!isCompleted() &&
        methods_.wait(collective_, transport_.get(), timeout.count(), error) < 0) {
        TORCH_CHECK(false, error);
    }
    if (exception()) {
        std::rethrow_exception(exception());
    }
    return true;
}

bool ShmWork::isCompleted() {
    if (!Work::isCompleted()) {
        methods_.progress(transport_.get());
    }
    return Work::isCompleted();
}

/* ---- completion, by any thread ---- */

void ShmWork::complete(void *self, const char *error) {
    static_cast<ShmWork *>(self)->finish_collective(error);
}

void ShmWork::release(void *self) {
    (void)c10::intrusive_ptr<ShmWork>::reclaim(static_cast<ShmWork *>(self));
}

void ShmWork::finish_collective(const char *error) {
    std::exception_ptr outcome;
    try {
        TORCH_CHECK(error == nullptr, error);
        const c10::AutoGradMode no_grad(false);
        const at::AutoDispatchBelowADInplaceOrView below;
        const WithoutModes without_modes;
        if (average_) {
            tensors_[0].div_(world_);
        }
        if (release_on_completion_) {
            methods_.drop_segments(collective_);
            tensors_.clear();
        }
    } catch (...) {
        outcome = std::current_exception();
    }
    finish(outcome);
}

} // namespace fct
