/* The works of collectives over shared memory. The bytes of a row travel in row order; where a rank
 * keeps them is its own business (Rows). direct.cpp decides which rows go where. */
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

/* The memory of all ranks' rows on this rank: segments in row order. */
struct Rows {
    struct Segment {
        char *data;    /* rank 0's part */
        size_t stride; /* bytes from one rank's part to the next one's */
        size_t begin;  /* in a row, in bytes */
        size_t bytes;
    };

    /* One tensor [ranks, elements] of contiguous rows. */
    static Rows of_tensor(const at::Tensor &rows);
    /* Tensors [ranks, elements], see fct_chunk_layout in torch_abi.h. Throws where the runs do not
     * fill them. */
    static Rows of_chunks(const std::vector<at::Tensor> &chunks, const fct_chunk_layout &layout);

    std::vector<Segment> segments;
    at::ScalarType type = at::ScalarType::Undefined;
    size_t count = 0; /* of ranks */
    size_t bytes = 0; /* of a row */
};

/* One exchange and the memory that its rows use. If the office writes all of it when it is posted,
 * the exchange can be polled. Otherwise only wait() completes it, and its operation type is
 * unknown, as that of gloo's reduce-scatter. */
class Exchange : public c10d::Work, private Correspondent {
  public:
    enum class Does : uint8_t { gathers, reduces, all_reduces };

    Exchange(Does does, std::vector<at::Tensor> held);

    /* Hands the exchange to the office. A gather sends this rank's row, a reduction the others'.
     * The memory of `rows` is that of tensors which the exchange holds. */
    void post(std::shared_ptr<Office> office, Rows rows, int64_t rank);

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
    /* Receives `bytes` bytes of a segment, `from` bytes behind its begin, of each rank's row. The
     * entry of this rank is null. */
    virtual void take(const Rows::Segment &segment, size_t from, size_t bytes,
                      const std::vector<const char *> &parts);
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

    /* Calls each(segment, from, bytes, in_part) for every segment that a message's part of the row
     * overlaps: where the overlap begins in the segment, its size, and where it begins in the
     * part; in bytes. */
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
    Rows rows_;             /* of a gather or a reduction */
    size_t part_bytes_ = 0; /* of a row, in one message */
    int64_t rank_ = 0;
    bool drops_ = false;
    std::chrono::milliseconds timeout_ = kNoTimeout; /* the connections' */
};

/* A reduce-scatter: adds parts of the rows as they arrive. */
class Sum : public Exchange {
  public:
    /* `held`: the output, then the tensors of the rows. */
    Sum(std::vector<at::Tensor> held, int64_t rank, int64_t world, bool average);

  protected:
    void take(const Rows::Segment &segment, size_t from, size_t bytes,
              const std::vector<const char *> &parts) override;
    void over() override;

  private:
    int64_t rank_, world_;
    bool average_;
};

} // namespace fct

#endif
