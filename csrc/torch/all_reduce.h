/* All-reduces in shared memory: see all_reduce.cpp. */
#ifndef FSDP_C_TORCH_ALL_REDUCE_H
#define FSDP_C_TORCH_ALL_REDUCE_H

#include "exchange.h"

namespace fct {

/* The sum of a row of all ranks, or their mean, in place of each rank's. */
class AllReduce : public Exchange {
  public:
    /* `row` is contiguous and not empty, and of a type that fck_ring_knows(). */
    AllReduce(at::Tensor row, int64_t rank, int64_t world, bool average);
    void post(std::shared_ptr<Office> office);

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

    size_t messages() const override;
    size_t bytes_of(size_t message) const override;
    bool can_write(size_t message, size_t were_read) const override;
    void write(size_t message, char *room) override;
    void read(size_t message, const std::vector<const char *> &written) override;
    void over() override;

    void plan();
    Range share_of(const Range &part, int64_t rank) const;
    Range summed_of(const Range &part) const;
    char *at(int64_t element) const;
    size_t bytes_in(const Range &range) const;
    void add(const Range &part, const std::vector<const char *> &written);

    const at::Tensor row_;
    const int64_t rank_, world_;
    const bool average_;
    bool whole_ = false; /* each rank sums all of the row */
    std::vector<Step> steps_;
};

} // namespace fct

#endif
