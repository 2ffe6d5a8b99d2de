/* The caching allocator, and the check of every access.
 *
 * A freed block may be handed out again to its stream at once. Whoever still uses it on another
 * stream must be ordered before: that is asked at the stream's next allocation of anything, for all
 * blocks that are free, since any of them might have been the one. So it does not depend on sizes
 * whether a buffer that was freed too early is found. */
#include "memory.h"

#include "foresight.h"
#include "journal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

namespace sim {

namespace {

constexpr size_t kRound = 512;
constexpr int kPoison = 0xFF; /* NaN in every floating type */

size_t rounded(size_t bytes) {
    return std::max(kRound, (bytes + kRound - 1) / kRound * kRound);
}

/* Splits the cells at `at`. */
void cut(std::map<uintptr_t, Cell> &cells, uintptr_t at) {
    auto next = cells.upper_bound(at);
    if (next == cells.begin()) {
        return;
    }
    auto cell = std::prev(next);
    if (cell->first < at && at < cell->second.end) {
        Cell rest = cell->second;
        cell->second.end = at;
        cells.emplace_hint(next, at, std::move(rest));
    }
}

std::string whose(const Block &block, uintptr_t from, uintptr_t to) {
    std::ostringstream text;
    text << "bytes " << from - block.start << " to " << to - block.start << " of block "
         << block.serial << " (" << block.asked << " bytes";
    if (!block.label.empty()) {
        text << ", " << block.label;
    }
    text << ")";
    return text.str();
}

/* Notes that `by` and who was there last are in no order. */
void conflict(const Block &block, uintptr_t from, uintptr_t to, const Epoch &by, bool write,
              const Epoch &last, bool was_write) {
    static std::pair<uint64_t, uint64_t> told; /* of many rows of a tensor, one is enough */
    if (std::exchange(told, {by.serial, last.serial}) == std::pair(by.serial, last.serial)) {
        return;
    }
    std::ostringstream text;
    text << "race: the " << (write ? "write" : "read") << " by " << world().describe(by)
         << " is not ordered after the " << (was_write ? "write" : "read") << " by "
         << world().describe(last) << ": " << whose(block, from, to);
    journal().find(text.str());
}

void note_read(Cell &cell, const Epoch &by) {
    for (Epoch &read : cell.reads) {
        if (read.lane == by.lane) {
            read = by;
            return;
        }
    }
    cell.reads.push_back(by);
}

/* Checks one cell; true where something was found. */
bool check(const Block &block, uintptr_t from, const Cell &cell, bool write, const Epoch &by) {
    const World &all = world();
    if (!all.covers(by.lane, cell.write)) {
        conflict(block, from, cell.end, by, write, cell.write, true);
        return true;
    }
    for (const Epoch &read : cell.reads) {
        if (write && !all.covers(by.lane, read)) {
            conflict(block, from, cell.end, by, write, read, false);
            return true;
        }
    }
    return false;
}

/* Half of the writes; which ones, the seed says. */
bool comes_late(const Epoch &write) {
    return (write.tick * 2654435761U ^ world().late_seed * 40503U) >> 3 & 1U;
}

std::shared_ptr<const Bytes> saved(uintptr_t from, uintptr_t to) {
    if (world().late_seed == 0) {
        return nullptr;
    }
    return std::make_shared<Bytes>(
        Bytes{from, std::string(reinterpret_cast<const char *>(from), to - from)});
}

} // namespace

Memory &memory() {
    static Memory *const only = new Memory;
    return *only;
}

Block *Memory::find(uintptr_t address) const {
    const auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) {
        return nullptr;
    }
    Block *const block = std::prev(next)->second.get();
    return address < block->start + block->size ? block : nullptr;
}

const Block *Memory::block_at(const void *address) const {
    return find(reinterpret_cast<uintptr_t>(address));
}

Pool &Memory::pool_of(int device, c10::Stream stream) {
    return pools_[{device, stream.id()}];
}

Usage &Memory::usage(int device) {
    return usage_.at(static_cast<size_t>(device + 1));
}

void Memory::access(uintptr_t from, uintptr_t to, bool write, const Epoch &by) {
    Block *const block = from < to && world().checks ? find(from) : nullptr;
    if (block == nullptr) {
        return;
    }
    if (!block->used) {
        journal().find("use after free: " + world().describe(by) + ": " + whose(*block, from, to));
        return;
    }
    if (block->doomed && world().lane(block->stream) != by.lane) {
        block->doomed = false;
        pool_of(block->device, block->stream).unsettled.push_back(block);
    }
    cut(block->cells, from);
    cut(block->cells, to);
    bool found = false;
    auto at = block->cells.lower_bound(from);
    while (at != block->cells.end() && at->first < to) {
        found = found || check(*block, at->first, at->second, write, by);
        if (write) {
            foresight().note(*block, at->first, at->second, by, false);
            at = block->cells.erase(at);
        } else {
            note_read(at->second, by);
            ++at;
        }
    }
    if (write) {
        block->cells[from] = Cell{to, by, {}, saved(from, to)};
    }
}

void Memory::delay(uintptr_t from, uintptr_t to, const Epoch &by, std::vector<Bytes> &now) {
    const Block *const block = from < to ? find(from) : nullptr;
    if (block == nullptr || !block->used) {
        return;
    }
    for (const auto &[start, cell] : block->cells) {
        const uintptr_t first = std::max(start, from);
        const uintptr_t last = std::min(cell.end, to);
        const bool waited = world().covers(by.lane, cell.write);
        if (first >= last || waited || cell.before == nullptr || !comes_late(cell.write)) {
            continue;
        }
        auto *const memory = reinterpret_cast<char *>(first);
        now.push_back(Bytes{first, std::string(memory, last - first)});
        std::memcpy(memory, cell.before->data.data() + (first - cell.before->start), last - first);
    }
}

/* Asks of all free blocks of the pool whether the stream's next work is behind their last users. */
void Memory::settle(Pool &pool, const Epoch &by) {
    const Clock &clock = world().lanes[static_cast<size_t>(by.lane)].clock;
    for (Block *&block : pool.held) {
        if (clock.covers(block->held_until)) {
            pool.free.emplace(block->size, block);
            block->cells.clear();
            block = nullptr;
        }
    }
    pool.held.erase(std::remove(pool.held.begin(), pool.held.end(), nullptr), pool.held.end());
    for (Block *const block : pool.unsettled) {
        for (const auto &[from, cell] : block->cells) {
            foresight().note(*block, from, cell, by, true);
        }
        for (const auto &[from, cell] : block->cells) {
            if (world().checks && check(*block, from, cell, true, by)) {
                break;
            }
        }
        block->cells.clear();
    }
    pool.unsettled.clear();
}

/* Of the smallest free blocks that fit the one that was freed last. */
Block *Memory::take(Pool &pool, size_t size) {
    const auto fits = pool.free.lower_bound(size);
    if (fits == pool.free.end() || fits->first > 2 * size) {
        return nullptr;
    }
    const auto last = std::prev(pool.free.upper_bound(fits->first));
    Block *const block = last->second;
    pool.free.erase(last);
    return block;
}

Block *Memory::fresh(int device, size_t size, c10::Stream stream) {
    auto made = std::make_unique<Block>(stream);
    made->start = reinterpret_cast<uintptr_t>(std::aligned_alloc(kRound, size));
    TORCH_CHECK(made->start != 0, "the simulated device is out of memory");
    made->size = size;
    made->device = device;
    usage(device).reserved += static_cast<int64_t>(size);
    Block *const block = made.get();
    blocks_.emplace(block->start, std::move(made));
    return block;
}

void *Memory::allocate(int device, size_t bytes, c10::Stream stream) {
    if (bytes == 0) {
        return nullptr;
    }
    const size_t size = rounded(bytes);
    Pool &pool = pool_of(device, stream);
    const Epoch by = device == Block::kHost ? Epoch{} : world().begin(stream, "allocation");
    if (device != Block::kHost) {
        settle(pool, by);
    }
    Block *block = take(pool, size);
    if (block == nullptr) {
        block = fresh(device, size, stream);
    }
    block->used = true;
    block->asked = bytes;
    block->serial = ++serial_;
    block->label.clear();
    block->also_on.clear();
    block->cells.clear();
    block->cells[block->start] = Cell{block->start + block->size, by, {}};
    if (device != Block::kHost) {
        const bool at_fault = journal().note("allocate", stream, false);
        block->doomed = at_fault && journal().fault == "early free";
    }
    Usage &usage = this->usage(device);
    usage.now += static_cast<int64_t>(block->size);
    usage.peak = std::max(usage.peak, usage.now);
    void *const address = reinterpret_cast<void *>(block->start);
    std::memset(address, kPoison, block->size);
    return address;
}

void Memory::release(void *address) {
    Block *const block = find(reinterpret_cast<uintptr_t>(address));
    if (block == nullptr) {
        return;
    }
    block->used = false;
    usage(block->device).now -= static_cast<int64_t>(block->size);
    std::memset(address, kPoison, block->size);
    Pool &pool = pool_of(block->device, block->stream);
    block->held_until = {};
    for (const c10::Stream stream : block->also_on) {
        block->held_until.join(world().lanes[static_cast<size_t>(world().lane(stream))].clock);
    }
    if (!block->also_on.empty()) {
        pool.held.push_back(block);
        return;
    }
    pool.free.emplace(block->size, block);
    if (block->device != Block::kHost) { /* pinned memory waits for events of its own */
        pool.unsettled.push_back(block);
    }
}

void Memory::record_stream(const void *address, c10::Stream stream) {
    Block *const block = find(reinterpret_cast<uintptr_t>(address));
    if (block != nullptr && block->stream != stream) {
        block->also_on.push_back(stream);
    }
}

void Memory::name(const void *storage, const std::string &text) {
    names_[storage] = text;
}

void Memory::named(const void *storage, const void *data) {
    const auto found = names_.find(storage);
    Block *const block = found == names_.end() ? nullptr : find(reinterpret_cast<uintptr_t>(data));
    if (block != nullptr) {
        block->label = found->second;
    }
}

std::vector<const Block *> Memory::used_blocks() const {
    std::vector<const Block *> found;
    for (const auto &[start, block] : blocks_) {
        if (block->used) {
            found.push_back(block.get());
        }
    }
    return found;
}

void Memory::forget() {
    pools_.clear();
    names_.clear();
    for (auto at = blocks_.begin(); at != blocks_.end();) {
        Block &block = *at->second;
        if (block.used) {
            block.cells.clear();
            block.also_on.clear();
            ++at;
            continue;
        }
        usage(block.device).reserved -= static_cast<int64_t>(block.size);
        std::free(reinterpret_cast<void *>(block.start));
        at = blocks_.erase(at);
    }
}

namespace {

void release_block(void *address) {
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    journal().count("free");
    memory().release(address);
}

/* Memory of the current device, for its current stream. */
struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const std::lock_guard<std::recursive_mutex> lock(world().mutex);
        const c10::DeviceIndex device = current_device();
        void *const data = memory().allocate(device, bytes, current_stream(device));
        return {data, data, &release_block, c10::Device(kType, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &release_block;
    }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }
};

/* Pinned host memory. */
struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const std::lock_guard<std::recursive_mutex> lock(world().mutex);
        watch_the_host();
        const c10::Stream stream = current_stream(current_device());
        void *const data = memory().allocate(Block::kHost, bytes, stream);
        return {data, data, &release_block, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &release_block;
    }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

} // namespace

c10::Allocator *device_allocator() {
    return &the_device_allocator;
}

c10::Allocator *pinned_allocator() {
    return &the_pinned_allocator;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_device_allocator)

} // namespace sim
