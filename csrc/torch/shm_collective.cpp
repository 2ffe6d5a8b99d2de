/* Exchanges of rows; see exchange.h. */
#include "shm_collective.h"

#include "../kernels/ring.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fct {

constexpr auto kSlice = std::chrono::milliseconds(100);

/* ---- rows ---- */

static RankShards::Segment segment_of(const at::Tensor &chunk, int64_t offset, int64_t numel,
                                      size_t begin) {
    const size_t size = chunk.element_size();
    return {static_cast<char *>(chunk.mutable_data_ptr()) + static_cast<size_t>(offset) * size,
            static_cast<size_t>(chunk.stride(0)) * size, begin, static_cast<size_t>(numel) * size};
}

RankShards RankShards::of_tensor(const at::Tensor &rows) {
    TORCH_CHECK(rows.dim() == 2 && rows.stride(1) == 1, "rows are a tensor [ranks, elements]");
    const Segment all = segment_of(rows, 0, rows.size(1), 0);
    return {{all}, rows.scalar_type(), static_cast<size_t>(rows.size(0)), all.bytes};
}

RankShards RankShards::of_chunks(const std::vector<at::Tensor> &chunks,
                                 const fct_chunk_layout &layout) {
    RankShards rows;
    rows.type = chunks.at(0).scalar_type();
    rows.count = static_cast<size_t>(chunks[0].size(0));
    std::vector<int64_t> filled(chunks.size(), 0);
    for (size_t i = 0; i < layout.count; i++) {
        const fct_run &run = layout.runs[i];
        const at::Tensor &chunk = chunks.at(run.chunk);
        TORCH_CHECK(chunk.dim() == 2 && chunk.stride(1) == 1 && chunk.scalar_type() == rows.type &&
                        run.offset == filled[run.chunk] && run.numel > 0,
                    "run ", i, " of a row does not continue chunk ", run.chunk);
        filled[run.chunk] += run.numel;
        rows.segments.push_back(segment_of(chunk, run.offset, run.numel, rows.bytes));
        rows.bytes += rows.segments.back().bytes;
    }
    for (size_t k = 0; k < chunks.size(); k++) {
        TORCH_CHECK(chunks[k].size(1) == filled[k], "chunk ", k, " has ", chunks[k].size(1),
                    " elements for each rank; the row has ", filled[k], " of them");
    }
    return rows;
}

/* ---- any collective ---- */

struct OperationInfo {
    const char *title; /* in profiles */
    const char *verb;  /* in messages */
    c10d::OpType type;
};

static const OperationInfo &info_of(ShmCollective::Operation does) {
    static const OperationInfo all[] = {
        {"gloo:all_gather", "gathers", c10d::OpType::_ALLGATHER_BASE},
        {"gloo:reduce_scatter", "reduces", c10d::OpType::_REDUCE_SCATTER_BASE},
        {"gloo:all_reduce", "all-reduces", c10d::OpType::ALLREDUCE},
    };
    return all[static_cast<size_t>(does)];
}

ShmCollective::ShmCollective(Operation does, std::vector<at::Tensor> held)
    : Work(-1, c10d::OpType::UNKNOWN, info_of(does).title), tensors_(std::move(held)),
      operation_(does) {}

void ShmCollective::release_on_completion() {
    release_on_completion_ = true;
}

void ShmCollective::set_timeout(std::chrono::milliseconds timeout) {
    timeout_ = timeout;
}

void ShmCollective::release_tensors() {
    rows_.segments.clear();
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

/* All rows are here, or will not come. */
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

constexpr size_t kLine = 64; /* parts of rows are multiples of it: no element is cut */

void ShmCollective::submit(std::shared_ptr<ShmTransport> transport, at::ScalarType type,
                           size_t row_bytes) {
    transport_ = std::move(transport);
    type_ = type;
    row_bytes_ = row_bytes;
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

/* Operation, element type, and the length of a row in lines: rows of several messages differ, be it
 * that some of the messages have the same size. */
uint32_t ShmCollective::tag() const {
    const auto lines = static_cast<uint32_t>((row_bytes_ + kLine - 1) / kLine);
    return lines << 8 | static_cast<uint32_t>(type_) << 2 | static_cast<uint32_t>(operation_);
}

std::string ShmCollective::describe_tag(uint32_t tag) const {
    const uint32_t does = tag & 3, type = tag >> 2 & 0x3f;
    const auto known = static_cast<uint32_t>(c10::ScalarType::NumOptions);
    static_assert(static_cast<uint32_t>(c10::ScalarType::NumOptions) <= 0x40);
    return c10::str(does < 3 ? info_of(static_cast<Operation>(does)).verb : "moves", " rows of ",
                    type < known ? c10::toString(static_cast<c10::ScalarType>(type)) : "?",
                    ", up to ", (tag >> 8) * kLine, " bytes,");
}

/* Gathers and reductions: */

void ShmCollective::start(std::shared_ptr<ShmTransport> transport, RankShards rows, int64_t rank) {
    rows_ = std::move(rows);
    rank_ = rank;
    part_bytes_ = ShmTransport::kMaxMessage / rows_in_message() / kLine * kLine;
    submit(std::move(transport), rows_.type, rows_.bytes);
}

size_t ShmCollective::message_count() const {
    return (row_bytes_ + part_bytes_ - 1) / part_bytes_;
}

/* Bytes of a row in a message. */
size_t ShmCollective::part_bytes(size_t message) const {
    return std::min(part_bytes_, row_bytes_ - message * part_bytes_);
}

/* A gather's message has a part of this rank's row; a reduction's has parts of all ranks', of which
 * this one's is left as it was. */
size_t ShmCollective::rows_in_message() const {
    return operation_ == Operation::reduce_scatter ? rows_.count : 1;
}

size_t ShmCollective::message_bytes(size_t message) const {
    return rows_in_message() * part_bytes(message);
}

template <typename Each> void ShmCollective::for_each_overlap(size_t message, Each &&each) const {
    const size_t at = message * part_bytes_, end = at + part_bytes(message);
    for (const RankShards::Segment &segment : rows_.segments) {
        const size_t from = std::max(segment.begin, at);
        const size_t until = std::min(segment.begin + segment.bytes, end);
        if (from < until) {
            each(segment, from - segment.begin, until - from, from - at);
        }
    }
}

void ShmCollective::copy_row(size_t message, size_t row, char *to) const {
    for_each_overlap(message, [&](const RankShards::Segment &segment, size_t from, size_t bytes,
                                  size_t in_part) {
        std::memcpy(to + in_part, segment.data + row * segment.stride + from, bytes);
    });
}

void ShmCollective::write(size_t message, char *buffer) {
    const auto own = static_cast<size_t>(rank_);
    if (operation_ == Operation::all_gather) {
        copy_row(message, own, buffer);
        return;
    }
    for (size_t row = 0; row < rows_in_message(); row++) {
        if (row != own) {
            copy_row(message, row, buffer + row * part_bytes(message));
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
            const char *theirs = peer_data[rank];
            parts[rank] = theirs == nullptr ? nullptr : theirs + mine + in_part;
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

/* For as long as gloo would wait for a message, from its issue on; then nothing more will come. A
 * wait that has a time-out of its own leaves the exchange as it is. */
void ShmCollective::wait_for_transport(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const auto begin = std::chrono::steady_clock::now();
    while (!isCompleted()) {
        const auto now = std::chrono::steady_clock::now();
        auto left = timeout_ - std::chrono::duration_cast<milliseconds>(now - start_time_);
        if (left <= milliseconds(0)) {
            transport_->abort(
                c10::str("Timed out waiting ", timeout_.count(), "ms for the rows of other ranks"));
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

ShmReduceScatter::ShmReduceScatter(std::vector<at::Tensor> held, int64_t rank, int64_t world,
                                   bool average)
    : ShmCollective(Operation::reduce_scatter, std::move(held)), rank_(rank), world_(world),
      average_(average) {}

void ShmReduceScatter::consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                               const std::vector<const char *> &parts) {
    const at::Tensor &output = tensors_[0];
    const size_t size = output.element_size();
    const auto mine = static_cast<size_t>(rank_);
    std::vector<const void *> rows(parts.begin(), parts.end());
    rows[mine] = segment.data + mine * segment.stride + from;
    const auto first = static_cast<int64_t>((segment.begin + from) / size);
    fck_ring_sum(static_cast<fck_dtype>(output.scalar_type()),
                 static_cast<char *>(output.mutable_data_ptr()) + segment.begin + from, rows.data(),
                 world_, world_ * output.numel(), rank_ * output.numel() + first,
                 static_cast<int64_t>(bytes / size));
}

void ShmReduceScatter::on_completion() {
    if (average_) {
        tensors_[0].div_(world_);
    }
}

} // namespace fct
