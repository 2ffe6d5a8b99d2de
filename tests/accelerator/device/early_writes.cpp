/* Recording and replay of early writes. */
#include "early_writes.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sim {

EarlyWrites &early_writes() {
    static EarlyWrites *const only = new EarlyWrites;
    return *only;
}

void EarlyWrites::begin(bool records) {
    world().records_early_writes = records;
    first_operation_ = world().serial;
    first_block_ = memory().serial();
    replayed_ = std::exchange(recorded_, {});
    incomplete_.clear();
}

void EarlyWrites::start_recording() {
    begin(true);
    replayed_.clear();
}

size_t EarlyWrites::start_replay() {
    begin(false);
    return replayed_.size();
}

void EarlyWrites::stop() {
    begin(false);
    replayed_.clear();
}

void EarlyWrites::record(const Block &block, uintptr_t from, const Cell &cell, const Epoch &by,
                         bool poison) {
    if (!world().records_early_writes) {
        return;
    }
    for (const Epoch &read : cell.reads) {
        if (world().covers(by.stream_index, read) || read.serial <= first_operation_) {
            continue;
        }
        EarlyWrite write{read.serial - first_operation_, by.serial, block.serial - first_block_,
                         from - block.start, std::string(cell.end - from, '\xFF')};
        if (!poison) {
            incomplete_.emplace_back(recorded_.size(), from);
        }
        recorded_.push_back(std::move(write));
    }
}

void EarlyWrites::complete(const Epoch &writer) {
    const auto is_by_writer = [&](const auto &write) {
        return recorded_[write.first].writer == writer.serial;
    };
    for (const auto &write : incomplete_) {
        if (is_by_writer(write)) {
            std::string &data = recorded_[write.first].data;
            data.assign(reinterpret_cast<const char *>(write.second), data.size());
        }
    }
    incomplete_.erase(std::remove_if(incomplete_.begin(), incomplete_.end(), is_by_writer),
                      incomplete_.end());
}

void EarlyWrites::replay(uintptr_t from, uintptr_t to, const Epoch &reader,
                         std::vector<Bytes> &replaced) const {
    const auto *const start = reinterpret_cast<const void *>(from);
    const Block *const block = replayed_.empty() ? nullptr : memory().block_at(start);
    for (const EarlyWrite &write : replayed_) {
        if (block == nullptr || write.reader != reader.serial - first_operation_ ||
            write.block != block->serial - first_block_) {
            continue;
        }
        const uintptr_t at = block->start + write.offset;
        const uintptr_t first = std::max(from, at);
        const uintptr_t last = std::min(to, at + write.data.size());
        if (first < last) {
            auto *const target = reinterpret_cast<char *>(first);
            replaced.push_back(Bytes{first, std::string(target, last - first)});
            std::memcpy(target, write.data.data() + (first - at), last - first);
        }
    }
}

} // namespace sim
