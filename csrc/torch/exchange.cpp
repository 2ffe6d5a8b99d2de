/* Exchanges of rows; see exchange.h. */
#include "exchange.h"

#include "../kernels/ring.h"

#include <algorithm>
#include <utility>

namespace fct {

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

Exchange::Exchange(const char *title, std::vector<at::Tensor> held)
    : Work(-1, c10d::OpType::UNKNOWN, title), held_(std::move(held)) {}

void Exchange::received_by(size_t piece, Message message) {
    receives_.resize(std::max(receives_.size(), piece + 1));
    receives_[piece].push_back(std::move(message));
}

void Exchange::sent_by(Message message) {
    sends_.push_back(std::move(message));
}

void Exchange::drop_when_over() {
    drops_ = true;
}

void Exchange::wait_at_most(std::chrono::milliseconds timeout) {
    timeout_ = timeout;
}

void Exchange::arrived(size_t piece) {
    (void)piece;
}

static void wait_for(const std::vector<Exchange::Message> &messages,
                     std::chrono::milliseconds timeout) {
    for (const Exchange::Message &message : messages) {
        TORCH_CHECK(message->wait(timeout), "an exchange of rows was aborted");
    }
}

bool Exchange::wait(std::chrono::milliseconds timeout) {
    if (!isCompleted()) {
        timeout = timeout == kNoTimeout ? timeout_ : timeout;
        std::exception_ptr error;
        try {
            for (size_t piece = 0; piece < receives_.size(); piece++) {
                wait_for(receives_[piece], timeout);
                arrived(piece);
            }
            wait_for(sends_, timeout);
            over();
            if (drops_) {
                receives_.clear();
                sends_.clear();
                held_.clear();
            }
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

/* ---- all-gathers of whole rows ---- */

Scatter::Scatter(const char *title, std::vector<at::Tensor> held, at::Tensor rows, at::Tensor rest,
                 Spans spans)
    : Exchange(title, std::move(held)), rows_(std::move(rows)), rest_(std::move(rest)),
      spans_(std::move(spans)) {}

void Scatter::over() {
    for (const Span &span : spans_) {
        rows_.narrow(1, span.in_row, span.numel).copy_(rest_.narrow(1, span.in_piece, span.numel));
    }
}

/* ---- reduce-scatters ---- */

Sum::Sum(const char *title, std::vector<at::Tensor> held, std::vector<Part> parts, int64_t rank,
         bool average)
    : Exchange(title, std::move(held)), parts_(std::move(parts)), rank_(rank), average_(average) {}

void Sum::arrived(size_t piece) {
    const at::Tensor &output = held_[0];
    const Part &part = parts_[piece];
    const auto world = static_cast<int64_t>(part.rows.size());
    const auto size = static_cast<int64_t>(output.element_size());
    std::vector<const void *> rows(part.rows.size());
    for (const Span &span : part.spans) {
        for (size_t rank = 0; rank < rows.size(); rank++) {
            rows[rank] = part.rows[rank] + span.in_piece * size;
        }
        fck_ring_sum(static_cast<fck_dtype>(output.scalar_type()),
                     static_cast<char *>(output.mutable_data_ptr()) + span.in_row * size,
                     rows.data(), world, world * output.numel(),
                     rank_ * output.numel() + span.in_row, span.numel);
    }
}

void Sum::over() {
    if (average_) {
        held_[0].div_(static_cast<int64_t>(parts_[0].rows.size()));
    }
}

} // namespace fct
