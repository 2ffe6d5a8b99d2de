/* Collectives over shared memory; see shm_collective.hpp.
 *
 * A message holds a part of each rank shard that it carries. Parts are multiples of a cache line,
 * so no element is split between messages. */
#include "shm_collective.hpp"

#include "../kernels/ring.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fct {

constexpr auto kSlice = std::chrono::milliseconds(100);

/* ---- rank shards ---- */

static RankShards::Segment segment_of(const at::Tensor &chunk, int64_t offset, int64_t numel,
                                      size_t begin) {
    const size_t size = chunk.element_size();
    return {static_cast<char *>(chunk.mutable_data_ptr()) + static_cast<size_t>(offset) * size,
            static_cast<size_t>(chunk.stride(0)) * size, begin, static_cast<size_t>(numel) * size};
}

RankShards RankShards::of_tensor(const at::Tensor &tensor) {
    TORCH_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1,
                "rank shards need a tensor [ranks, elements]");
    const Segment all = segment_of(tensor, 0, tensor.size(1), 0);
    return {{all}, tensor.scalar_type(), static_cast<size_t>(tensor.size(0)), all.bytes};
}

RankShards RankShards::of_chunks(const std::vector<at::Tensor> &chunks,
                                 const fct_chunk_layout &layout) {
    RankShards shards;
    shards.type = chunks.at(0).scalar_type();
    shards.count = static_cast<size_t>(chunks[0].size(0));
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

/* ---- all collectives ---- */

struct OperationInfo {
    const char *profiling_title;
    const char *name; /* in error messages */
    c10d::OpType type;
};

static const OperationInfo &info_of(ShmCollective::Operation operation) {
    static const OperationInfo all[] = {
        {"gloo:all_gather", "all_gather", c10d::OpType::_ALLGATHER_BASE},
        {"gloo:reduce_scatter", "reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE},
        {"gloo:all_reduce", "all_reduce", c10d::OpType::ALLREDUCE},
    };
    return all[static_cast<size_t>(operation)];
}

ShmCollective::ShmCollective(Operation operation, std::vector<at::Tensor> tensors)
    : Work(-1, c10d::OpType::UNKNOWN, info_of(operation).profiling_title),
      tensors_(std::move(tensors)), operation_(operation) {}

void ShmCollective::release_on_completion() {
    release_on_completion_ = true;
}

void ShmCollective::set_timeout(std::chrono::milliseconds timeout) {
    timeout_ = timeout;
}

void ShmCollective::release_tensors() {
    shards_.segments.clear();
    tensors_.clear();
}

bool ShmCollective::wait(std::chrono::milliseconds timeout) {
    if (!isCompleted()) {
        wait_for_transport(timeout);
    }
    if (exception()) {
        std::rethrow_exception(exception());
    }
    return true;
}

bool ShmCollective::isCompleted() {
    if (!Work::isCompleted()) {
        transport_->progress();
    }
    return Work::isCompleted();
}

void ShmCollective::complete(const std::exception_ptr &error) {
    std::exception_ptr outcome = error;
    if (!outcome) {
        try {
            const c10::AutoGradMode no_grad(false);
            const at::AutoDispatchBelowADInplaceOrView below;
            on_completion();
            if (release_on_completion_) {
                release_tensors();
            }
        } catch (...) {
            outcome = std::current_exception();
        }
    }
    finish(outcome);
}

constexpr size_t kLine = 64; /* bytes of a cache line */

void ShmCollective::submit(std::shared_ptr<ShmTransport> transport, at::ScalarType type,
                           size_t shard_bytes) {
    transport_ = std::move(transport);
    type_ = type;
    shard_bytes_ = shard_bytes;
    size_t bytes = 0;
    for (size_t message = 0; message < message_count(); message++) {
        bytes += message_bytes(message);
    }
    cpu_bound_ = transport_->is_cpu_bound(bytes);
    start_time_ = std::chrono::steady_clock::now();
    auto self = c10::intrusive_ptr<c10::intrusive_ptr_target>::reclaim_copy(this);
    if (transport_->submit(*this, std::move(self))) {
        opType_ = info_of(operation_).type;
    }
}

bool ShmCollective::is_cpu_bound() const {
    return cpu_bound_;
}

/* Packs the operation, the dtype and the bytes of a rank shard in cache lines. The size is included
 * because collectives of different sizes may have messages of the same size. */
uint32_t ShmCollective::tag() const {
    const auto lines = static_cast<uint32_t>((shard_bytes_ + kLine - 1) / kLine);
    return lines << 8 | static_cast<uint32_t>(type_) << 2 | static_cast<uint32_t>(operation_);
}

std::string ShmCollective::describe_tag(uint32_t tag) const {
    const uint32_t operation = tag & 3, type = tag >> 2 & 0x3f;
    const auto types = static_cast<uint32_t>(c10::ScalarType::NumOptions);
    static_assert(static_cast<uint32_t>(c10::ScalarType::NumOptions) <= 0x40);
    return c10::str(operation < 3 ? info_of(static_cast<Operation>(operation)).name : "?", " of ",
                    type < types ? c10::toString(static_cast<c10::ScalarType>(type)) : "?",
                    ", up to ", (tag >> 8) * kLine, " bytes per rank");
}

/* ---- all-gathers and reduce-scatters ---- */

void ShmCollective::start(std::shared_ptr<ShmTransport> transport, RankShards shards,
                          int64_t rank) {
    shards_ = std::move(shards);
    rank_ = rank;
    part_bytes_ = ShmTransport::kMaxMessage / shards_in_message() / kLine * kLine;
    submit(std::move(transport), shards_.type, shards_.bytes);
}

size_t ShmCollective::message_count() const {
    return (shard_bytes_ + part_bytes_ - 1) / part_bytes_;
}

/* Bytes of one rank shard in a message. */
size_t ShmCollective::part_bytes(size_t message) const {
    return std::min(part_bytes_, shard_bytes_ - message * part_bytes_);
}

/* The message of an all-gather has a part of this rank's shard. The message of a reduce-scatter has
 * parts of all shards, and leaves the part of this rank uninitialized. */
size_t ShmCollective::shards_in_message() const {
    return operation_ == Operation::reduce_scatter ? shards_.count : 1;
}

size_t ShmCollective::message_bytes(size_t message) const {
    return shards_in_message() * part_bytes(message);
}

template <typename Each> void ShmCollective::for_each_overlap(size_t message, Each &&each) const {
    const size_t at = message * part_bytes_, end = at + part_bytes(message);
    for (const RankShards::Segment &segment : shards_.segments) {
        const size_t from = std::max(segment.begin, at);
        const size_t until = std::min(segment.begin + segment.bytes, end);
        if (from < until) {
            each(segment, from - segment.begin, until - from, from - at);
        }
    }
}

void ShmCollective::copy_shard(size_t message, size_t shard, char *to) const {
    for_each_overlap(message, [&](const RankShards::Segment &segment, size_t from, size_t bytes,
                                  size_t in_part) {
        std::memcpy(to + in_part, segment.data + shard * segment.stride + from, bytes);
    });
}

void ShmCollective::write(size_t message, char *buffer) {
    const auto own = static_cast<size_t>(rank_);
    if (operation_ == Operation::all_gather) {
        copy_shard(message, own, buffer);
        return;
    }
    for (size_t shard = 0; shard < shards_in_message(); shard++) {
        if (shard != own) {
            copy_shard(message, shard, buffer + shard * part_bytes(message));
        }
    }
}

void ShmCollective::read(size_t message, const std::vector<const char *> &peer_data) {
    const size_t mine = operation_ == Operation::reduce_scatter
                            ? static_cast<size_t>(rank_) * part_bytes(message)
                            : 0;
    std::vector<const char *> parts(peer_data.size(), nullptr);
    for_each_overlap(message, [&](const RankShards::Segment &segment, size_t from, size_t bytes,
                                  size_t in_part) {
        for (size_t rank = 0; rank < parts.size(); rank++) {
            const char *data = peer_data[rank];
            parts[rank] = data == nullptr ? nullptr : data + mine + in_part;
        }
        consume(segment, from, bytes, parts);
    });
}

void ShmCollective::consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                            const std::vector<const char *> &parts) {
    for (size_t rank = 0; rank < parts.size(); rank++) {
        if (parts[rank] != nullptr) {
            std::memcpy(segment.data + rank * segment.stride + from, parts[rank], bytes);
        }
    }
}

/* Waits until the timeout of the collective, which starts at its issue as in gloo, and aborts the
 * transport then. The `timeout` of the wait throws and leaves the collective as it is. */
void ShmCollective::wait_for_transport(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const auto begin = std::chrono::steady_clock::now();
    while (!isCompleted()) {
        const auto now = std::chrono::steady_clock::now();
        auto left = timeout_ - std::chrono::duration_cast<milliseconds>(now - start_time_);
        if (left <= milliseconds(0)) {
            transport_->abort(
                c10::str("Timed out waiting ", timeout_.count(), "ms for the data of other ranks"));
            return;
        }
        if (timeout != kNoTimeout) {
            left = std::min(left, timeout - std::chrono::duration_cast<milliseconds>(now - begin));
            TORCH_CHECK(left > milliseconds(0), "Timed out waiting ", timeout.count(), "ms");
        }
        transport_->progress_or_wait(std::min(left, kSlice),
                                     [this] { return Work::isCompleted(); });
    }
}

/* ---- reduce-scatters ---- */

ShmReduceScatter::ShmReduceScatter(std::vector<at::Tensor> tensors, int64_t rank, int64_t world,
                                   bool average)
    : ShmCollective(Operation::reduce_scatter, std::move(tensors)), rank_(rank), world_(world),
      average_(average) {}

void ShmReduceScatter::consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                               const std::vector<const char *> &parts) {
    const at::Tensor &output = tensors_[0];
    const size_t size = output.element_size();
    const auto mine = static_cast<size_t>(rank_);
    std::vector<const void *> inputs(parts.begin(), parts.end());
    inputs[mine] = segment.data + mine * segment.stride + from;
    const auto first = static_cast<int64_t>((segment.begin + from) / size);
    fck_ring_sum(static_cast<fck_dtype>(output.scalar_type()),
                 static_cast<char *>(output.mutable_data_ptr()) + segment.begin + from,
                 inputs.data(), world_, world_ * output.numel(), rank_ * output.numel() + first,
                 static_cast<int64_t>(bytes / size));
}

void ShmReduceScatter::on_completion() {
    if (average_) {
        tensors_[0].div_(world_);
    }
}

} // namespace fct
