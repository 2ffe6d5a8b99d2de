/* All-reduces in shared memory: see all_reduce.cpp. */
#ifndef FSDP_C_BRIDGE_ALL_REDUCE_HPP
#define FSDP_C_BRIDGE_ALL_REDUCE_HPP

#include "shm_collective.hpp"

namespace fct {

/* An in-place all-reduce of one tensor: the sum or the mean over all ranks. */
class ShmAllReduce : public ShmCollective {
  public:
    /* `tensor` is contiguous, not empty, and of a dtype for which fck_ring_supports() is true. */
    ShmAllReduce(at::Tensor tensor, int64_t rank, int64_t world, bool average);
    void start(std::shared_ptr<ShmTransport> transport);

  private:
    /* Elements [begin, end) of the tensor. */
    struct Range {
        int64_t begin, end;
    };
    /* A message: the values of a part, or this rank's sums of a part. */
    struct Step {
        bool is_sum;
        Range part;
        size_t after; /* messages that must be read before it can be written */
    };

    size_t message_count() const override;
    size_t message_bytes(size_t message) const override;
    bool can_write(size_t message, size_t messages_read) const override;
    void write(size_t message, char *buffer) override;
    void read(size_t message, const std::vector<const char *> &peer_data) override;
    void on_completion() override;

    void plan();
    Range share_in(const Range &part, int64_t rank) const;
    Range summed_range(const Range &part) const;
    char *address_of(int64_t element) const;
    size_t byte_count(const Range &range) const;
    void add_inputs(const Range &part, const std::vector<const char *> &peer_data);

    const at::Tensor tensor_;
    const int64_t rank_, world_;
    const bool average_;
    bool sums_whole_ = false; /* each rank sums the whole tensor */
    std::vector<Step> steps_;
};

} // namespace fct

#endif
