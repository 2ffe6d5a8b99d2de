/* The works of collectives on_completion shared memory. The bytes of a row travel in row order; where a rank
 * keeps them is its own business (RankShards). direct.cpp decides which rows go where. */
#ifndef FSDP_C_TORCH_SHM_COLLECTIVE_H
#define FSDP_C_TORCH_SHM_COLLECTIVE_H

#include "shm_transport.h"
#include "torch_abi.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace fct {

/* The memory of all ranks' rows on this rank: segments in row order. */
struct RankShards {
    struct Segment {
        char *data;    /* rank 0's part */
        size_t stride; /* bytes from one rank's part to the next one's */
        size_t begin;  /* in a row, in bytes */
        size_t bytes;
    };

    /* One tensor [ranks, elements] of contiguous rows. */
    static RankShards of_tensor(const at::Tensor &rows);
    /* Tensors [ranks, elements], see fct_chunk_layout in torch_abi.h. Throws where the runs do not
     * fill them. */
    static RankShards of_chunks(const std::vector<at::Tensor> &chunks,
                                const fct_chunk_layout &layout);

    std::vector<Segment> segments;
    at::ScalarType type = at::ScalarType::Undefined;
    size_t count = 0; /* of ranks */
    size_t bytes = 0; /* of a row */
};

/* One exchange and the memory that its rows use. If the transport writes all of it when it is posted,
 * the exchange can be polled. Otherwise only wait() completes it, and its operation type is
 * unknown, as that of gloo's reduce-scatter. */
class ShmCollective : public c10d::Work, private ShmOp {
  public:
    enum class Operation : uint8_t { all_gather, reduce_scatter, all_reduce };

    ShmCollective(Operation does, std::vector<at::Tensor> held);

    /* Hands the exchange to the transport. A gather sends this rank's row, a reduction the others'.
     * The memory of `rows` is that of tensors which the collective holds. */
    void start(std::shared_ptr<ShmTransport> transport, RankShards rows, int64_t rank);

    /* Called by the progress_thread, or by torch's functions on the caller's thread. A later call returns,
     * or throws, the outcome of the first. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override;

    /* Of memory that Python has never seen, so that any thread may drop it: it goes when the
     * exchange is on_completion, and not when somebody asks. A failed exchange keeps it. */
    void release_on_completion();

    /* Whether it was posted, is more than a board has buffer for, and to copy the rest takes the time
     * of computation. */
    bool is_cpu_bound() const;

    /* How long after its issue the exchange fails if it is not on_completion. */
    void set_timeout(std::chrono::milliseconds timeout);

  protected:
    /* Receives `bytes` bytes of a segment, `from` bytes behind its begin, of each rank's row. The
     * entry of this rank is null. */
    virtual void consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                         const std::vector<const char *> &parts);
    /* All rows are here, and have left. */
    virtual void on_completion() {}

    /* Has the transport post all that there are messages of, of rows of so many bytes. */
    void submit(std::shared_ptr<ShmTransport> transport, at::ScalarType type, size_t row_bytes);

    std::vector<at::Tensor> tensors_;

  private:
    uint32_t tag() const final;
    std::string describe_tag(uint32_t tag) const final;
    size_t message_count() const override;
    size_t message_bytes(size_t message) const override;
    void write(size_t message, char *buffer) override;
    void read(size_t message, const std::vector<const char *> &peer_data) override;
    void complete(const std::exception_ptr &error) final;

    /* Calls each(segment, from, bytes, in_part) for every segment that a message's part of the row
     * overlaps: where the overlap begins in the segment, its size, and where it begins in the
     * part; in bytes. */
    template <typename Each> void for_each_overlap(size_t message, Each &&each) const;
    size_t rows_in_message() const;
    size_t part_bytes(size_t message) const;
    void copy_row(size_t message, size_t row, char *to) const;
    void wait_for_transport(std::chrono::milliseconds timeout);
    void release_tensors();

    const Operation operation_;
    std::shared_ptr<ShmTransport> transport_; /* set by submit(), as what follows */
    at::ScalarType type_ = at::ScalarType::Undefined;
    size_t row_bytes_ = 0;
    bool cpu_bound_ = false;
    std::chrono::steady_clock::time_point start_time_;
    RankShards rows_;       /* of a gather or a reduction */
    size_t part_bytes_ = 0; /* of a row, in one message */
    int64_t rank_ = 0;
    bool release_on_completion_ = false;
    std::chrono::milliseconds timeout_ = kNoTimeout; /* the connections' */
};

/* A reduce-scatter: adds parts of the rows as they arrive. */
class ShmReduceScatter : public ShmCollective {
  public:
    /* `held`: the output, then the tensors of the rows. */
    ShmReduceScatter(std::vector<at::Tensor> held, int64_t rank, int64_t world, bool average);

  protected:
    void consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                 const std::vector<const char *> &parts) override;
    void on_completion() override;

  private:
    int64_t rank_, world_;
    bool average_;
};

} // namespace fct

#endif
