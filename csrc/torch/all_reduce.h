/* All-reduces in shared memory: see all_reduce.cpp. */
#ifndef FSDP_C_TORCH_ALL_REDUCE_H
#define FSDP_C_TORCH_ALL_REDUCE_H

#include "shm_collective.h"

namespace fct {

/* The sum of a row of all ranks, or their mean, in place of each rank's. */
class ShmAllReduce : public ShmCollective {
  public:
    /* `row` is contiguous and not empty, and of a type that fck_ring_knows(). */
    ShmAllReduce(at::Tensor row, int64_t rank, int64_t world, bool average);
    void start(std::shared_ptr<ShmTransport> transport);

  private:
    /* A run of elements of the row. */
    struct Range {
        int64_t begin, end;
    };
    /* A message: a part of the row, or what this rank has summed of one. */
    struct Step {
        bool is_sum;
        Range part;
        size_t after; /* so many messages have been read */
    };

    size_t message_count() const override;
    size_t message_bytes(size_t message) const override;
    bool can_write(size_t message, size_t messages_read) const override;
    void write(size_t message, char *buffer) override;
    void read(size_t message, const std::vector<const char *> &peer_data) override;
    void on_completion() override;

    void plan();
    Range share_of(const Range &part, int64_t rank) const;
    Range summed_of(const Range &part) const;
    char *at(int64_t element) const;
    size_t bytes_in(const Range &range) const;
    void add(const Range &part, const std::vector<const char *> &peer_data);

    const at::Tensor row_;
    const int64_t rank_, world_;
    const bool average_;
    bool whole_ = false; /* each rank sums all of the row */
    std::vector<Step> steps_;
};

} // namespace fct

#endif
