/* Exchanges of rows: how a row is cut into pieces, and the works that wait for the messages of one
 * and put together what came. Who sends what to whom is direct.cpp's. */
#ifndef FSDP_C_TORCH_EXCHANGE_H
#define FSDP_C_TORCH_EXCHANGE_H

#include "torch_abi.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <vector>

namespace fct {

/* A run of neighbouring elements: where it begins in a piece and in the row. */
struct Span {
    int64_t in_piece;
    int64_t in_row;
    int64_t numel;
};
using Spans = std::vector<Span>;

/* How this thread's next rows are cut, see fct_cuts_announce in torch_abi.h. */
const fct_cuts *announce_cuts(const fct_cuts *cuts);
/* How rows of `numel` elements travel: in pieces, each of which is one span of the row or, the last
 * one, all that is between those. */
std::vector<Spans> pieces_of(int64_t numel);
/* Elements of a piece. */
int64_t numel_of(const Spans &spans);

/* One exchange: the messages of its pieces, and the memory that they use. */
class Exchange : public c10d::Work {
  public:
    using Message = c10::intrusive_ptr<c10d::Work>;

    Exchange(const char *title, std::vector<at::Tensor> held);

    void received_by(size_t piece, Message message);
    void sent_by(Message message);

    /* By the helper, or by torch's functions on the caller's thread; later calls know how it ended,
     * for a message can be waited for only once. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

    /* Of memory that Python has never seen, so that any thread may drop it: it goes when the
     * exchange is over, and not when somebody asks. What failed keeps it: gloo may still write. */
    void drop_when_over();

    /* How long a wait without a time-out of its own waits for each message. */
    void wait_at_most(std::chrono::milliseconds timeout);

  protected:
    /* All rows of the piece are here. */
    virtual void arrived(size_t piece);
    /* All rows are here, and have left. */
    virtual void over() {}

    std::vector<at::Tensor> held_;

  private:
    std::vector<std::vector<Message>> receives_; /* go before what they use */
    std::vector<Message> sends_;
    bool drops_ = false;
    std::chrono::milliseconds timeout_ = kNoTimeout; /* the connections' */
};

/* Whole rows of an all-gather, [ranks, row], whose rest, [ranks, rest], goes back to its places. */
class Scatter : public Exchange {
  public:
    Scatter(const char *title, std::vector<at::Tensor> held, at::Tensor rows, at::Tensor rest,
            Spans spans);

  protected:
    void over() override;

  private:
    at::Tensor rows_, rest_;
    Spans spans_;
};

/* The rows of a reduce-scatter, added piece by piece as they come: held_ begins with the output. */
class Sum : public Exchange {
  public:
    struct Part {
        Spans spans;
        std::vector<const char *> rows; /* of the piece, on each rank; in what is held */
    };

    Sum(const char *title, std::vector<at::Tensor> held, std::vector<Part> parts, int64_t rank,
        bool average);

  protected:
    void arrived(size_t piece) override;
    void over() override;

  private:
    std::vector<Part> parts_;
    int64_t rank_;
    bool average_;
};

} // namespace fct

#endif
