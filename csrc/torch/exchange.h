/* Exchanges of rows over shared memory: how a row is cut into pieces, and the works of the
 * collectives. direct.cpp decides which rows go where. */
#ifndef FSDP_C_TORCH_EXCHANGE_H
#define FSDP_C_TORCH_EXCHANGE_H

#include "office.h"
#include "torch_abi.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
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

/* One exchange and the memory that its rows use. If the office writes all of it when it is posted,
 * the exchange can be polled. Otherwise only wait() completes it, and its operation type is
 * unknown, as that of gloo's reduce-scatter. */
class Exchange : public c10d::Work, private Correspondent {
  public:
    enum class Does : uint8_t { gathers, reduces, all_reduces };

    Exchange(Does does, std::vector<at::Tensor> held);

    /* Hands the exchange to the office. `pieces` are those of whole rows, [ranks, elements of the
     * piece], of which a gather sends this rank's row and a reduction the others'. */
    void post(std::shared_ptr<Office> office, const std::vector<at::Tensor> &pieces, int64_t rank);

    /* Called by the helper, or by torch's functions on the caller's thread. A later call returns,
     * or throws, the outcome of the first. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override;

    /* Of memory that Python has never seen, so that any thread may drop it: it goes when the
     * exchange is over, and not when somebody asks. A failed exchange keeps it. */
    void drop_when_over();

    /* Whether it was posted, is more than a board has room for, and to copy the rest takes the time
     * of computation. */
    bool takes_processors() const;

    /* How long after its issue the exchange fails if it is not over. */
    void wait_at_most(std::chrono::milliseconds timeout);

  protected:
    /* Elements from `from` on, `count` of them, of a piece's row of each rank, nothing for this
     * one's; posted by the others. */
    virtual void take(size_t piece, int64_t from, int64_t count,
                      const std::vector<const char *> &rows);
    /* All rows are here, and have left. */
    virtual void over() {}

    /* Has the office post all that there are messages of, of rows of so many bytes. */
    void hand_in(std::shared_ptr<Office> office, at::ScalarType type, size_t row_bytes);

    std::vector<at::Tensor> held_;

  private:
    uint32_t kind() const final;
    std::string name_of(uint32_t kind) const final;
    size_t messages() const override;
    size_t bytes_of(size_t message) const override;
    void write(size_t message, char *room) override;
    void read(size_t message, const std::vector<const char *> &written) override;
    void end(const std::exception_ptr &error) final;

    /* Calls each(piece, from, bytes, in_part) for what a message has of a piece's row: from where
     * on in that, how much, and where in the message's part of the whole row; in bytes. */
    template <typename Each> void for_each_overlap(size_t message, Each &&each) const;
    size_t rows_in_message() const;
    size_t part_of(size_t message) const;
    void copy_row(size_t message, size_t row, char *to) const;
    void wait_for_office(std::chrono::milliseconds timeout);
    void drop();

    const Does does_;
    std::shared_ptr<Office> office_; /* set by hand_in(), as what follows */
    at::ScalarType type_ = at::ScalarType::Undefined;
    size_t row_bytes_ = 0;
    bool copied_ = false;
    std::chrono::steady_clock::time_point begin_;
    /* Of one that was posted in pieces: */
    std::vector<at::Tensor> pieces_;
    size_t part_bytes_ = 0; /* of a row, in one message */
    int64_t rank_ = 0;
    bool drops_ = false;
    std::chrono::milliseconds timeout_ = kNoTimeout; /* the connections' */
};

/* Whole rows of an all-gather, [ranks, row], whose rest, [ranks, rest], goes back to its places. */
class Scatter : public Exchange {
  public:
    Scatter(std::vector<at::Tensor> held, at::Tensor rows, at::Tensor rest, Spans spans);

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
        const char *own; /* this rank's row of the piece, in a tensor that is held */
    };

    Sum(std::vector<at::Tensor> held, std::vector<Part> parts, int64_t rank, int64_t world,
        bool average);

  protected:
    void take(size_t piece, int64_t from, int64_t count,
              const std::vector<const char *> &rows) override;
    void over() override;

  private:
    std::vector<Part> parts_;
    int64_t rank_, world_;
    bool average_;
};

} // namespace fct

#endif
