/* Exchanges of rows; see exchange.h. */
#include "exchange.h"

#include "../kernels/ring.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fct {

constexpr auto kSlice = std::chrono::milliseconds(100);

/* ---- cuts ---- */

static thread_local const fct_cuts *announced = nullptr;

const fct_cuts *announce_cuts(const fct_cuts *cuts) {
    return std::exchange(announced, cuts);
}

std::vector<Spans> pieces_of(int64_t numel) {
    if (announced == nullptr || announced->row_numel != numel || announced->count == 0) {
        return {{{0, 0, numel}}};
    }
    std::vector<Spans> pieces;
    Spans rest;
    int64_t at = 0, rested = 0;
    const auto leave = [&](int64_t end) {
        if (end > at) {
            rest.push_back({rested, at, end - at});
            rested += end - at;
        }
    };
    for (size_t i = 0; i < announced->count; i++) {
        const fct_cut &cut = announced->cuts[i];
        leave(cut.offset);
        pieces.push_back({{0, cut.offset, cut.numel}});
        at = cut.offset + cut.numel;
    }
    leave(numel);
    if (!rest.empty()) {
        pieces.push_back(std::move(rest));
    }
    return pieces;
}

int64_t numel_of(const Spans &spans) {
    return spans.back().in_piece + spans.back().numel;
}

/* ---- any exchange ---- */

struct Operation {
    const char *title; /* in profiles */
    const char *verb;  /* in messages */
    c10d::OpType type;
};

static const Operation &operation_of(Exchange::Does does) {
    static const Operation all[] = {
        {"gloo:all_gather", "gathers", c10d::OpType::_ALLGATHER_BASE},
        {"gloo:reduce_scatter", "reduces", c10d::OpType::_REDUCE_SCATTER_BASE},
        {"gloo:all_reduce", "all-reduces", c10d::OpType::ALLREDUCE},
    };
    return all[static_cast<size_t>(does)];
}

Exchange::Exchange(Does does, std::vector<at::Tensor> held)
    : Work(-1, c10d::OpType::UNKNOWN, operation_of(does).title), held_(std::move(held)),
      does_(does) {}

void Exchange::drop_when_over() {
    drops_ = true;
}

void Exchange::wait_at_most(std::chrono::milliseconds timeout) {
    timeout_ = timeout;
}

void Exchange::drop() {
    pieces_.clear();
    held_.clear();
}

bool Exchange::wait(std::chrono::milliseconds timeout) {
    if (!isCompleted()) {
        wait_for_office(timeout);
    }
    if (exception()) {
        std::rethrow_exception(exception());
    }
    return true;
}

bool Exchange::isCompleted() {
    if (!Work::isCompleted()) {
        office_->progress();
    }
    return Work::isCompleted();
}

/* All rows are here, or will not come. */
void Exchange::end(const std::exception_ptr &error) {
    std::exception_ptr outcome = error;
    if (!outcome) {
        try {
            const c10::AutoGradMode no_grad(false);
            const at::AutoDispatchBelowADInplaceOrView below;
            over();
            if (drops_) {
                drop();
            }
        } catch (...) {
            outcome = std::current_exception();
        }
    }
    finish(outcome);
}

constexpr size_t kLine = 64; /* parts of rows are multiples of it: no element is cut */

static size_t bytes_of_row(const at::Tensor &piece) {
    return static_cast<size_t>(piece.size(1)) * piece.element_size();
}

/* How far apart the rows of a piece are: it may be a part of whole rows. */
static size_t bytes_to_next(const at::Tensor &piece) {
    return static_cast<size_t>(piece.stride(0)) * piece.element_size();
}

void Exchange::hand_in(std::shared_ptr<Office> office, at::ScalarType type, size_t row_bytes) {
    office_ = std::move(office);
    type_ = type;
    row_bytes_ = row_bytes;
    size_t bytes = 0;
    for (size_t message = 0; message < messages(); message++) {
        bytes += bytes_of(message);
    }
    copied_ = office_->copies(bytes);
    begin_ = std::chrono::steady_clock::now();
    auto self = c10::intrusive_ptr<c10::intrusive_ptr_target>::reclaim_copy(this);
    if (office_->add(*this, std::move(self))) {
        opType_ = operation_of(does_).type;
    }
}

bool Exchange::takes_processors() const {
    return copied_;
}

/* Operation, element type, and the length of a row in lines: rows of several messages differ, be it
 * that some of the messages have the same size. */
uint32_t Exchange::kind() const {
    const auto lines = static_cast<uint32_t>((row_bytes_ + kLine - 1) / kLine);
    return lines << 8 | static_cast<uint32_t>(type_) << 2 | static_cast<uint32_t>(does_);
}

std::string Exchange::name_of(uint32_t kind) const {
    const uint32_t does = kind & 3, type = kind >> 2 & 0x3f;
    const auto known = static_cast<uint32_t>(c10::ScalarType::NumOptions);
    static_assert(static_cast<uint32_t>(c10::ScalarType::NumOptions) <= 0x40);
    return c10::str(does < 3 ? operation_of(static_cast<Does>(does)).verb : "moves", " rows of ",
                    type < known ? c10::toString(static_cast<c10::ScalarType>(type)) : "?",
                    ", up to ", (kind >> 8) * kLine, " bytes,");
}

/* In pieces: */

void Exchange::post(std::shared_ptr<Office> office, const std::vector<at::Tensor> &pieces,
                    int64_t rank) {
    pieces_ = pieces;
    rank_ = rank;
    part_bytes_ = Office::kLargest / rows_in_message() / kLine * kLine;
    size_t bytes = 0;
    for (const at::Tensor &piece : pieces) {
        TORCH_CHECK(piece.dim() == 2 && piece.stride(1) == 1 &&
                        piece.scalar_type() == pieces[0].scalar_type(),
                    "a piece of rows is a tensor [ranks, elements], each row in one run");
        bytes += bytes_of_row(piece);
    }
    hand_in(std::move(office), pieces[0].scalar_type(), bytes);
}

size_t Exchange::messages() const {
    return (row_bytes_ + part_bytes_ - 1) / part_bytes_;
}

/* Bytes of a row in a message. */
size_t Exchange::part_of(size_t message) const {
    return std::min(part_bytes_, row_bytes_ - message * part_bytes_);
}

/* A gather's message has a part of this rank's row; a reduction's has parts of all ranks', of which
 * this one's is left as it was. */
size_t Exchange::rows_in_message() const {
    return does_ == Does::reduces ? static_cast<size_t>(pieces_[0].size(0)) : 1;
}

size_t Exchange::bytes_of(size_t message) const {
    return rows_in_message() * part_of(message);
}

/* A row is what its pieces are, one after the other. */
template <typename Each> void Exchange::for_each_overlap(size_t message, Each &&each) const {
    const size_t at = message * part_bytes_, end = at + part_of(message);
    size_t begin = 0; /* of the piece, in the row */
    for (size_t piece = 0; piece < pieces_.size(); piece++) {
        const size_t next = begin + bytes_of_row(pieces_[piece]);
        const size_t from = std::max(begin, at), until = std::min(next, end);
        if (from < until) {
            each(piece, from - begin, until - from, from - at);
        }
        begin = next;
    }
}

void Exchange::copy_row(size_t message, size_t row, char *to) const {
    for_each_overlap(message, [&](size_t i, size_t from, size_t bytes, size_t in_part) {
        const auto *rows = static_cast<const char *>(pieces_[i].const_data_ptr());
        std::memcpy(to + in_part, rows + row * bytes_to_next(pieces_[i]) + from, bytes);
    });
}

void Exchange::write(size_t message, char *room) {
    const auto own = static_cast<size_t>(rank_);
    if (does_ == Does::gathers) {
        copy_row(message, own, room);
        return;
    }
    for (size_t row = 0; row < rows_in_message(); row++) {
        if (row != own) {
            copy_row(message, row, room + row * part_of(message));
        }
    }
}

void Exchange::read(size_t message, const std::vector<const char *> &written) {
    const size_t mine = does_ == Does::reduces ? static_cast<size_t>(rank_) * part_of(message) : 0;
    std::vector<const char *> rows(written.size(), nullptr);
    for_each_overlap(message, [&](size_t i, size_t from, size_t bytes, size_t in_part) {
        for (size_t rank = 0; rank < rows.size(); rank++) {
            const char *theirs = written[rank];
            rows[rank] = theirs == nullptr ? nullptr : theirs + mine + in_part;
        }
        const size_t size = pieces_[i].element_size();
        take(i, static_cast<int64_t>(from / size), static_cast<int64_t>(bytes / size), rows);
    });
}

void Exchange::take(size_t piece, int64_t from, int64_t count,
                    const std::vector<const char *> &rows) {
    const size_t size = pieces_[piece].element_size(), next = bytes_to_next(pieces_[piece]);
    auto *to = static_cast<char *>(pieces_[piece].mutable_data_ptr());
    for (size_t rank = 0; rank < rows.size(); rank++) {
        if (rows[rank] != nullptr) {
            std::memcpy(to + rank * next + static_cast<size_t>(from) * size, rows[rank],
                        static_cast<size_t>(count) * size);
        }
    }
}

/* For as long as gloo would wait for a message, from its issue on; then nothing more will come. A
 * wait that has a time-out of its own leaves the exchange as it is. */
void Exchange::wait_for_office(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const auto begin = std::chrono::steady_clock::now();
    while (!isCompleted()) {
        const auto now = std::chrono::steady_clock::now();
        auto left = timeout_ - std::chrono::duration_cast<milliseconds>(now - begin_);
        if (left <= milliseconds(0)) {
            office_->give_up(
                c10::str("Timed out waiting ", timeout_.count(), "ms for the rows of other ranks"));
            return;
        }
        if (timeout != kNoTimeout) {
            left = std::min(left, timeout - std::chrono::duration_cast<milliseconds>(now - begin));
            TORCH_CHECK(left > milliseconds(0), "Timed out waiting ", timeout.count(), "ms");
        }
        office_->progress_or_sleep(std::min(left, kSlice), [this] { return Work::isCompleted(); });
    }
}

/* ---- all-gathers of whole rows ---- */

Scatter::Scatter(std::vector<at::Tensor> held, at::Tensor rows, at::Tensor rest, Spans spans)
    : Exchange(Does::gathers, std::move(held)), rows_(std::move(rows)), rest_(std::move(rest)),
      spans_(std::move(spans)) {}

void Scatter::over() {
    for (const Span &span : spans_) {
        rows_.narrow(1, span.in_row, span.numel).copy_(rest_.narrow(1, span.in_piece, span.numel));
    }
}

/* ---- reduce-scatters ---- */

Sum::Sum(std::vector<at::Tensor> held, std::vector<Part> parts, int64_t rank, int64_t world,
         bool average)
    : Exchange(Does::reduces, std::move(held)), parts_(std::move(parts)), rank_(rank),
      world_(world), average_(average) {}

void Sum::take(size_t piece, int64_t from, int64_t count, const std::vector<const char *> &rows) {
    const at::Tensor &output = held_[0];
    const Part &part = parts_[piece];
    const auto size = static_cast<int64_t>(output.element_size());
    const auto mine = static_cast<size_t>(rank_);
    std::vector<const void *> at(rows.size());
    for (const Span &span : part.spans) {
        const int64_t begin = std::max(from, span.in_piece);
        const int64_t end = std::min(from + count, span.in_piece + span.numel);
        if (begin >= end) {
            continue;
        }
        for (size_t rank = 0; rank < rows.size(); rank++) {
            at[rank] = rank == mine ? part.own + begin * size : rows[rank] + (begin - from) * size;
        }
        const int64_t in_row = span.in_row + begin - span.in_piece;
        fck_ring_sum(static_cast<fck_dtype>(output.scalar_type()),
                     static_cast<char *>(output.mutable_data_ptr()) + in_row * size, at.data(),
                     world_, world_ * output.numel(), rank_ * output.numel() + in_row, end - begin);
    }
}

void Sum::over() {
    if (average_) {
        held_[0].div_(world_);
    }
}

} // namespace fct
