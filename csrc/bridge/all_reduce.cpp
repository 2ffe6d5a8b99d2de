/* All-reduces in shared memory.
 *
 * If the ring can hold the tensors of all ranks, each rank writes its whole tensor and sums all of
 * them. This needs one message phase and no thread. A larger tensor is divided into parts. Each
 * rank sums a share of each part, and then the ranks exchange the sums. The next part is sent
 * before the sums of the previous one, so that ranks need not run in lockstep:
 *
 *     part 0, part 1, sums of 0, part 2, sums of 1, ...
 *
 * Sums overwrite the tensor. A part is summed only after this rank has written it to the ring
 * (ShmOp::read). Elements are added in the order of gloo's ring over the whole tensor. */
#include "all_reduce.hpp"

#include "../kernels/ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fct {

ShmAllReduce::ShmAllReduce(at::Tensor tensor, int64_t rank, int64_t world, bool average)
    : ShmCollective(Operation::all_reduce, {tensor}), tensor_(std::move(tensor)), rank_(rank),
      world_(world), average_(average) {}

void ShmAllReduce::start(std::shared_ptr<ShmTransport> transport) {
    plan();
    submit(std::move(transport), tensor_.scalar_type(), tensor_.nbytes());
}

/* ---- ranges ---- */

void ShmAllReduce::plan() {
    const int64_t numel = tensor_.numel();
    const auto part_numel =
        static_cast<int64_t>(ShmTransport::kMaxMessage / tensor_.element_size());
    sums_whole_ = tensor_.nbytes() * static_cast<size_t>(world_) <= ShmTransport::kCapacity;
    size_t previous_part = 0;
    for (int64_t begin = 0; begin < numel; begin += part_numel) {
        const Range part{begin, std::min(begin + part_numel, numel)};
        const size_t index = steps_.size();
        steps_.push_back({false, part, 0});
        if (!sums_whole_ && begin > 0) {
            steps_.push_back({true, steps_[previous_part].part, previous_part + 1});
        }
        previous_part = index;
    }
    if (!sums_whole_) {
        steps_.push_back({true, steps_[previous_part].part, previous_part + 1});
    }
}

ShmAllReduce::Range ShmAllReduce::share_in(const Range &part, int64_t rank) const {
    const int64_t share = (part.end - part.begin + world_ - 1) / world_;
    const int64_t begin = std::min(part.begin + rank * share, part.end);
    return {begin, std::min(begin + share, part.end)};
}

/* The elements of a part that this rank sums. */
ShmAllReduce::Range ShmAllReduce::summed_range(const Range &part) const {
    return sums_whole_ ? part : share_in(part, rank_);
}

char *ShmAllReduce::address_of(int64_t element) const {
    return static_cast<char *>(tensor_.mutable_data_ptr()) +
           static_cast<size_t>(element) * tensor_.element_size();
}

size_t ShmAllReduce::byte_count(const Range &range) const {
    return static_cast<size_t>(range.end - range.begin) * tensor_.element_size();
}

/* ---- messages ---- */

size_t ShmAllReduce::message_count() const {
    return steps_.size();
}

/* Messages with sums have the size of rank 0's share, which is the largest. */
size_t ShmAllReduce::message_bytes(size_t message) const {
    const Step &step = steps_[message];
    return byte_count(step.is_sum ? share_in(step.part, 0) : step.part);
}

bool ShmAllReduce::can_write(size_t message, size_t messages_read) const {
    return messages_read >= steps_[message].after;
}

/* Does not write this rank's own share of a part: no peer reads it. */
void ShmAllReduce::write(size_t message, char *buffer) {
    const Step &step = steps_[message];
    const Range own = summed_range(step.part);
    if (step.is_sum) {
        std::memcpy(buffer, address_of(own.begin), byte_count(own));
    } else if (sums_whole_) {
        std::memcpy(buffer, address_of(step.part.begin), byte_count(step.part));
    } else {
        const size_t before = byte_count({step.part.begin, own.begin});
        std::memcpy(buffer, address_of(step.part.begin), before);
        std::memcpy(buffer + before + byte_count(own), address_of(own.end),
                    byte_count({own.end, step.part.end}));
    }
}

void ShmAllReduce::read(size_t message, const std::vector<const char *> &peer_data) {
    const Step &step = steps_[message];
    if (!step.is_sum) {
        add_inputs(step.part, peer_data);
        return;
    }
    for (int64_t rank = 0; rank < world_; rank++) {
        if (rank != rank_) {
            const Range share = share_in(step.part, rank);
            std::memcpy(address_of(share.begin), peer_data[static_cast<size_t>(rank)],
                        byte_count(share));
        }
    }
}

void ShmAllReduce::add_inputs(const Range &part, const std::vector<const char *> &peer_data) {
    const Range own = summed_range(part);
    if (own.begin == own.end) {
        return;
    }
    std::vector<const void *> inputs;
    for (const char *data : peer_data) {
        inputs.push_back(data == nullptr ? address_of(own.begin)
                                         : data + byte_count({part.begin, own.begin}));
    }
    fck_ring_sum(static_cast<fck_dtype>(tensor_.scalar_type()), address_of(own.begin),
                 inputs.data(), world_, tensor_.numel(), own.begin, own.end - own.begin);
}

void ShmAllReduce::on_completion() {
    if (average_) {
        tensor_.div_(world_);
    }
}

} // namespace fct
