/* Collectives over shared memory, as c10d works. The bytes of a rank shard travel in shard order.
 * RankShards describes where this rank reads or writes them. direct.cpp selects the collectives. */
#ifndef FSDP_C_BRIDGE_SHM_COLLECTIVE_HPP
#define FSDP_C_BRIDGE_SHM_COLLECTIVE_HPP

#include "collective.h"
#include "shm_transport.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace fct {

/* The memory of all rank shards on this rank. A rank shard is the elements that belong to one rank.
 * It consists of segments, in the order of its elements. */
struct RankShards {
    struct Segment {
        char *data;    /* of rank 0's shard */
        size_t stride; /* bytes from one rank's data to the next rank's */
        size_t begin;  /* byte offset in a rank shard */
        size_t bytes;
    };

    /* From one tensor [ranks, elements] whose last dimension is contiguous. */
    static RankShards of_tensor(const at::Tensor &tensor);
    /* From chunks [ranks, elements], see fct_chunk_layout in collective.h. Throws if the runs do
     * not cover the chunks in order. */
    static RankShards of_chunks(const std::vector<at::Tensor> &chunks,
                                const fct_chunk_layout &layout);

    std::vector<Segment> segments;
    at::ScalarType type = at::ScalarType::Undefined;
    size_t count = 0; /* ranks */
    size_t bytes = 0; /* of one rank shard */
};

/* One collective and the tensors that it uses. If the ring holds all its messages at issue, it can
 * be polled. Otherwise only wait() completes it, and its operation type is UNKNOWN, as that of
 * gloo's reduce-scatter. */
class ShmCollective : public c10d::Work, private ShmOp {
  public:
    enum class Operation : uint8_t { all_gather, reduce_scatter, all_reduce };

    ShmCollective(Operation operation, std::vector<at::Tensor> tensors);

    /* Submits an all-gather, which sends this rank's shard, or a reduce-scatter, which sends the
     * peers' shards. The memory of `shards` belongs to the tensors of the collective. */
    void start(std::shared_ptr<ShmTransport> transport, RankShards shards, int64_t rank);

    /* Called by the progress thread, or by torch's functions on the caller's thread. May be called
     * again: returns or throws the same outcome. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override;

    /* Releases the tensors on completion, on any thread, instead of with this object. Requires
     * tensors without Python objects. A failed collective keeps its tensors. */
    void release_on_completion();

    /* The value of ShmTransport::is_cpu_bound at issue. */
    bool is_cpu_bound() const;

    /* The collective fails if it is not complete `timeout` after its issue. */
    void set_timeout(std::chrono::milliseconds timeout);

  protected:
    /* Processes `bytes` bytes of a segment, at offset `from` in it, of each rank. `parts` has one
     * entry for each rank. This rank's entry is null. */
    virtual void consume(const RankShards::Segment &segment, size_t from, size_t bytes,
                         const std::vector<const char *> &parts);
    /* Called once after all messages are written and read. May throw. */
    virtual void on_completion() {}

    /* Submits message_count() messages for rank shards of `shard_bytes` bytes. */
    void submit(std::shared_ptr<ShmTransport> transport, at::ScalarType type, size_t shard_bytes);

    std::vector<at::Tensor> tensors_;

  private:
    uint32_t tag() const final;
    std::string describe_tag(uint32_t tag) const final;
    size_t message_count() const override;
    size_t message_bytes(size_t message) const override;
    void write(size_t message, char *buffer) override;
    void read(size_t message, const std::vector<const char *> &peer_data) override;
    void complete(const std::exception_ptr &error) final;

    /* Calls each(segment, from, bytes, in_part) for every segment that the part of a message
     * overlaps. `from` and `in_part` are the offsets of the overlap in the segment and in the part,
     * in bytes. */
    template <typename Each> void for_each_overlap(size_t message, Each &&each) const;
    size_t shards_in_message() const;
    size_t part_bytes(size_t message) const;
    void copy_shard(size_t message, size_t shard, char *to) const;
    void wait_for_transport(std::chrono::milliseconds timeout);
    void release_tensors();

    const Operation operation_;
    std::shared_ptr<ShmTransport> transport_; /* set by submit(), as the members below */
    at::ScalarType type_ = at::ScalarType::Undefined;
    size_t shard_bytes_ = 0;
    bool cpu_bound_ = false;
    std::chrono::steady_clock::time_point start_time_;
    RankShards shards_;     /* set by start() */
    size_t part_bytes_ = 0; /* of one rank shard, in one message */
    int64_t rank_ = 0;
    bool release_on_completion_ = false;
    std::chrono::milliseconds timeout_ = kNoTimeout; /* from the issue on */
};

/* A reduce-scatter. Adds the parts of each message when it arrives. */
class ShmReduceScatter : public ShmCollective {
  public:
    /* `tensors`: the output, then the inputs. */
    ShmReduceScatter(std::vector<at::Tensor> tensors, int64_t rank, int64_t world, bool average);

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
