/* Which writes may come before which reads. */
#include "foresight.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sim {

Foresight &foresight() {
    static Foresight *const only = new Foresight;
    return *only;
}

void Foresight::begin(bool notes) {
    world().foresees = notes;
    first_operation_ = world().serial;
    first_block_ = memory().serial();
    seen_ = std::exchange(noted_, {});
    open_.clear();
}

void Foresight::note_from_now_on() {
    begin(true);
    seen_.clear();
}

size_t Foresight::show_from_now_on() {
    begin(false);
    return seen_.size();
}

void Foresight::stop() {
    begin(false);
    seen_.clear();
}

void Foresight::note(const Block &block, uintptr_t from, const Cell &cell, const Epoch &by,
                     bool poison) {
    if (!world().foresees) {
        return;
    }
    for (const Epoch &read : cell.reads) {
        if (world().covers(by.lane, read) || read.serial <= first_operation_) {
            continue;
        }
        Early early{read.serial - first_operation_, by.serial, block.serial - first_block_,
                    from - block.start, std::string(cell.end - from, '\xFF')};
        if (!poison) {
            open_.emplace_back(noted_.size(), from);
        }
        noted_.push_back(std::move(early));
    }
}

void Foresight::complete(const Epoch &writer) {
    const auto written = [&](const auto &one) { return noted_[one.first].writer == writer.serial; };
    for (const auto &one : open_) {
        if (written(one)) {
            std::string &data = noted_[one.first].data;
            data.assign(reinterpret_cast<const char *>(one.second), data.size());
        }
    }
    open_.erase(std::remove_if(open_.begin(), open_.end(), written), open_.end());
}

void Foresight::show(uintptr_t from, uintptr_t to, const Epoch &reader,
                     std::vector<Bytes> &now) const {
    const auto *const start = reinterpret_cast<const void *>(from);
    const Block *const block = seen_.empty() ? nullptr : memory().block_at(start);
    for (const Early &early : seen_) {
        if (block == nullptr || early.reader != reader.serial - first_operation_ ||
            early.block != block->serial - first_block_) {
            continue;
        }
        const uintptr_t at = block->start + early.offset;
        const uintptr_t first = std::max(from, at);
        const uintptr_t last = std::min(to, at + early.data.size());
        if (first < last) {
            auto *const target = reinterpret_cast<char *>(first);
            now.push_back(Bytes{first, std::string(target, last - first)});
            std::memcpy(target, early.data.data() + (first - at), last - first);
        }
    }
}

} // namespace sim
