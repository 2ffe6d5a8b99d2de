/* All-reduces in shared memory.
 *
 * A short row every rank writes whole, and sums whole: nobody waits twice, and no thread. Of a
 * longer one each rank sums a share of every part, and then the ranks swap their sums; so that they
 * need not keep step, the next part is there before the sums of the one before it.
 *
 *     part 0, part 1, sums of 0, part 2, sums of 1, ...
 *
 * Sums go where the row was. That of a part is made when this rank, too, has posted it (transport.h).
 * All elements are added in the order of gloo's ring on_completion the whole row. */
#include "all_reduce.h"

#include "../kernels/ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fct {

ShmAllReduce::ShmAllReduce(at::Tensor row, int64_t rank, int64_t world, bool average)
    : ShmCollective(Operation::all_reduce, {row}), row_(std::move(row)), rank_(rank), world_(world),
      average_(average) {}

void ShmAllReduce::start(std::shared_ptr<ShmTransport> transport) {
    plan();
    submit(std::move(transport), row_.scalar_type(), row_.nbytes());
}

/* ---- what is where ---- */

void ShmAllReduce::plan() {
    const int64_t numel = row_.numel();
    const auto most = static_cast<int64_t>(ShmTransport::kMaxMessage / row_.element_size());
    whole_ = row_.nbytes() * static_cast<size_t>(world_) <= ShmTransport::kCapacity;
    size_t part_before = 0;
    for (int64_t begin = 0; begin < numel; begin += most) {
        const Range part{begin, std::min(begin + most, numel)};
        const size_t here = steps_.size();
        steps_.push_back({false, part, 0});
        if (!whole_ && begin > 0) {
            steps_.push_back({true, steps_[part_before].part, part_before + 1});
        }
        part_before = here;
    }
    if (!whole_) {
        steps_.push_back({true, steps_[part_before].part, part_before + 1});
    }
}

ShmAllReduce::Range ShmAllReduce::share_of(const Range &part, int64_t rank) const {
    const int64_t share = (part.end - part.begin + world_ - 1) / world_;
    const int64_t begin = std::min(part.begin + rank * share, part.end);
    return {begin, std::min(begin + share, part.end)};
}

/* What this rank sums. */
ShmAllReduce::Range ShmAllReduce::summed_of(const Range &part) const {
    return whole_ ? part : share_of(part, rank_);
}

char *ShmAllReduce::at(int64_t element) const {
    return static_cast<char *>(row_.mutable_data_ptr()) +
           static_cast<size_t>(element) * row_.element_size();
}

size_t ShmAllReduce::bytes_in(const Range &range) const {
    return static_cast<size_t>(range.end - range.begin) * row_.element_size();
}

/* ---- messages ---- */

size_t ShmAllReduce::message_count() const {
    return steps_.size();
}

/* The first rank's share is the largest; messages of sums are all as long. */
size_t ShmAllReduce::message_bytes(size_t message) const {
    const Step &step = steps_[message];
    return bytes_in(step.is_sum ? share_of(step.part, 0) : step.part);
}

bool ShmAllReduce::can_write(size_t message, size_t messages_read) const {
    return messages_read >= steps_[message].after;
}

/* Of a part that it sums a share of nobody else needs that share of this rank's. */
void ShmAllReduce::write(size_t message, char *buffer) {
    const Step &step = steps_[message];
    const Range own = summed_of(step.part);
    if (step.is_sum) {
        std::memcpy(buffer, at(own.begin), bytes_in(own));
    } else if (whole_) {
        std::memcpy(buffer, at(step.part.begin), bytes_in(step.part));
    } else {
        const size_t before = bytes_in({step.part.begin, own.begin});
        std::memcpy(buffer, at(step.part.begin), before);
        std::memcpy(buffer + before + bytes_in(own), at(own.end),
                    bytes_in({own.end, step.part.end}));
    }
}

void ShmAllReduce::read(size_t message, const std::vector<const char *> &peer_data) {
    const Step &step = steps_[message];
    if (!step.is_sum) {
        add(step.part, peer_data);
        return;
    }
    for (int64_t rank = 0; rank < world_; rank++) {
        if (rank != rank_) {
            const Range share = share_of(step.part, rank);
            std::memcpy(at(share.begin), peer_data[static_cast<size_t>(rank)], bytes_in(share));
        }
    }
}

void ShmAllReduce::add(const Range &part, const std::vector<const char *> &peer_data) {
    const Range own = summed_of(part);
    if (own.begin == own.end) {
        return;
    }
    std::vector<const void *> rows;
    for (const char *theirs : peer_data) {
        rows.push_back(theirs == nullptr ? at(own.begin)
                                         : theirs + bytes_in({part.begin, own.begin}));
    }
    fck_ring_sum(static_cast<fck_dtype>(row_.scalar_type()), at(own.begin), rows.data(), world_,
                 row_.numel(), own.begin, own.end - own.begin);
}

void ShmAllReduce::on_completion() {
    if (average_) {
        row_.div_(world_);
    }
}

} // namespace fct
