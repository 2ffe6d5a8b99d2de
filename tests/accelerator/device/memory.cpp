/* The caching allocator, and the check of every access.
 *
 * A freed block can be reused on its stream immediately, so its last uses on other streams must
 * be ordered before the stream's next allocation. Each allocation checks all free blocks of the
 * stream, not only the one that it returns. A buffer that is freed too early is therefore
 * reported whatever the sizes of later allocations. */
#include "memory.h"

#include "early_writes.h"
#include "journal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

namespace sim {

namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xFF; /* NaN in every floating type */

size_t round_up(size_t bytes) {
    return std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

/* Splits the cell that contains address `at`, so that a cell begins there. */
void split_cell(std::map<uintptr_t, Cell> &cells, uintptr_t at) {
    auto next = cells.upper_bound(at);
    if (next == cells.begin()) {
        return;
    }
    auto cell = std::prev(next);
    if (cell->first < at && at < cell->second.end) {
        Cell second = cell->second;
        cell->second.end = at;
        cells.emplace_hint(next, at, std::move(second));
    }
}

std::string describe_bytes(const Block &block, uintptr_t from, uintptr_t to) {
    std::ostringstream text;
    text << "bytes " << from - block.start << " to " << to - block.start << " of block "
         << block.serial << " (" << block.requested << " bytes";
    if (!block.label.empty()) {
        text << ", " << block.label;
    }
    text << ")";
    return text.str();
}

/* Reports that `by` is not ordered after the access `last`. */
void report_race(const Block &block, uintptr_t from, uintptr_t to, const Epoch &by, bool write,
                 const Epoch &last, bool was_write) {
    static std::pair<uint64_t, uint64_t> last_reported; /* one report per pair of operations */
    if (std::exchange(last_reported, {by.serial, last.serial}) ==
        std::pair(by.serial, last.serial)) {
        return;
    }
    std::ostringstream text;
    text << "race: the " << (write ? "write" : "read") << " by " << world().describe(by)
         << " is not ordered after the " << (was_write ? "write" : "read") << " by "
         << world().describe(last) << ": " << describe_bytes(block, from, to);
    journal().report(text.str());
}

void add_read(Cell &cell, const Epoch &by) {
    for (Epoch &read : cell.reads) {
        if (read.stream_index == by.stream_index) {
            read = by;
            return;
        }
    }
    cell.reads.push_back(by);
}

/* Checks the access of one cell. Returns true if it was reported. */
bool check(const Block &block, uintptr_t from, const Cell &cell, bool write, const Epoch &by) {
    const World &state = world();
    if (!state.covers(by.stream_index, cell.write)) {
        report_race(block, from, cell.end, by, write, cell.write, true);
        return true;
    }
    for (const Epoch &read : cell.reads) {
        if (write && !state.covers(by.stream_index, read)) {
            report_race(block, from, cell.end, by, write, read, false);
            return true;
        }
    }
    return false;
}

/* Selects half of the writes by the seed. */
bool is_delayed(const Epoch &write) {
    return (write.tick * 2654435761U ^ world().late_seed * 40503U) >> 3 & 1U;
}

std::shared_ptr<const Bytes> copy_bytes(uintptr_t from, uintptr_t to) {
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
    Block *const block = from < to ? find(from) : nullptr;
    if (block == nullptr) {
        return;
    }
    if (!block->used) {
        journal().report("use after free: " + world().describe(by) + ": " +
                         describe_bytes(*block, from, to));
        return;
    }
    if (block->frees_early && world().index_of(block->stream) != by.stream_index) {
        block->frees_early = false;
        pool_of(block->device, block->stream).unchecked.push_back(block);
    }
    split_cell(block->cells, from);
    split_cell(block->cells, to);
    bool reported = false;
    auto at = block->cells.lower_bound(from);
    while (at != block->cells.end() && at->first < to) {
        reported = reported || check(*block, at->first, at->second, write, by);
        if (write) {
            early_writes().record(*block, at->first, at->second, by, false);
            at = block->cells.erase(at);
        } else {
            add_read(at->second, by);
            ++at;
        }
    }
    if (write) {
        block->cells[from] = Cell{to, by, {}, copy_bytes(from, to)};
    }
}

void Memory::hide_unordered_writes(uintptr_t from, uintptr_t to, const Epoch &by,
                                   std::vector<Bytes> &replaced) {
    const Block *const block = from < to ? find(from) : nullptr;
    if (block == nullptr || !block->used) {
        return;
    }
    for (const auto &[start, cell] : block->cells) {
        const uintptr_t first = std::max(start, from);
        const uintptr_t last = std::min(cell.end, to);
        const bool waited = world().covers(by.stream_index, cell.write);
        if (first >= last || waited || cell.previous == nullptr || !is_delayed(cell.write)) {
            continue;
        }
        auto *const memory = reinterpret_cast<char *>(first);
        replaced.push_back(Bytes{first, std::string(memory, last - first)});
        std::memcpy(memory, cell.previous->data.data() + (first - cell.previous->start),
                    last - first);
    }
}

/* Checks that `by`, an allocation on the pool's stream, is ordered after the last accesses of all
 * free blocks of the pool. First frees pending blocks whose recorded streams are ordered before
 * `by`. */
void Memory::check_free_blocks(Pool &pool, const Epoch &by) {
    const Clock &clock = world().streams[static_cast<size_t>(by.stream_index)].clock;
    for (Block *&block : pool.pending) {
        if (clock.covers(block->reusable_after)) {
            pool.free.emplace(block->size, block);
            block->cells.clear();
            block = nullptr;
        }
    }
    pool.pending.erase(std::remove(pool.pending.begin(), pool.pending.end(), nullptr),
                       pool.pending.end());
    for (Block *const block : pool.unchecked) {
        for (const auto &[from, cell] : block->cells) {
            early_writes().record(*block, from, cell, by, true);
        }
        for (const auto &[from, cell] : block->cells) {
            if (check(*block, from, cell, true, by)) {
                break;
            }
        }
        block->cells.clear();
    }
    pool.unchecked.clear();
}

/* Returns the smallest free block of at least `size` and at most 2 * `size` bytes, or NULL. Of
 * blocks with equal sizes, returns the one that was freed last. */
Block *Memory::take_free_block(Pool &pool, size_t size) {
    const auto fits = pool.free.lower_bound(size);
    if (fits == pool.free.end() || fits->first > 2 * size) {
        return nullptr;
    }
    const auto last = std::prev(pool.free.upper_bound(fits->first));
    Block *const block = last->second;
    pool.free.erase(last);
    return block;
}

Block *Memory::allocate_block(int device, size_t size, c10::Stream stream) {
    auto owned = std::make_unique<Block>(stream);
    owned->start = reinterpret_cast<uintptr_t>(std::aligned_alloc(kAlignment, size));
    TORCH_CHECK(owned->start != 0, "the simulated device is out of memory");
    owned->size = size;
    owned->device = device;
    usage(device).reserved += static_cast<int64_t>(size);
    Block *const block = owned.get();
    blocks_.emplace(block->start, std::move(owned));
    return block;
}

void *Memory::allocate(int device, size_t bytes, c10::Stream stream) {
    if (bytes == 0) {
        return nullptr;
    }
    const size_t size = round_up(bytes);
    Pool &pool = pool_of(device, stream);
    const Epoch by = device == Block::kHost ? Epoch{} : world().begin(stream, "allocation");
    if (device != Block::kHost) {
        check_free_blocks(pool, by);
    }
    Block *block = take_free_block(pool, size);
    if (block == nullptr) {
        block = allocate_block(device, size, stream);
    }
    block->used = true;
    block->requested = bytes;
    block->serial = ++serial_;
    block->label.clear();
    block->recorded_streams.clear();
    block->cells.clear();
    block->cells[block->start] = Cell{block->start + block->size, by, {}};
    if (device != Block::kHost) {
        const bool at_fault = journal().log_call("allocate", stream, false);
        block->frees_early = at_fault && journal().fault == "early free";
    }
    Usage &usage = this->usage(device);
    usage.now += static_cast<int64_t>(size);
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
    usage(block->device).now -= static_cast<int64_t>(round_up(block->requested));
    std::memset(address, kPoison, block->size);
    Pool &pool = pool_of(block->device, block->stream);
    block->reusable_after = {};
    for (const c10::Stream stream : block->recorded_streams) {
        block->reusable_after.join(
            world().streams[static_cast<size_t>(world().index_of(stream))].clock);
    }
    if (!block->recorded_streams.empty()) {
        pool.pending.push_back(block);
        return;
    }
    pool.free.emplace(block->size, block);
    if (block->device != Block::kHost) { /* pinned memory is not bound to one stream */
        pool.unchecked.push_back(block);
    }
}

void Memory::record_stream(const void *address, c10::Stream stream) {
    Block *const block = find(reinterpret_cast<uintptr_t>(address));
    if (block != nullptr && block->stream != stream) {
        block->recorded_streams.push_back(stream);
    }
}

void Memory::set_name(const void *storage, const std::string &text) {
    names_[storage] = text;
}

void Memory::label_block(const void *storage, const void *data) {
    const auto found = names_.find(storage);
    Block *const block = found == names_.end() ? nullptr : find(reinterpret_cast<uintptr_t>(data));
    if (block != nullptr) {
        block->label = found->second;
    }
}

std::vector<const Block *> Memory::used_blocks() const {
    std::vector<const Block *> blocks;
    for (const auto &[start, block] : blocks_) {
        if (block->used) {
            blocks.push_back(block.get());
        }
    }
    return blocks;
}

void Memory::reset() {
    pools_.clear();
    names_.clear();
    for (auto at = blocks_.begin(); at != blocks_.end();) {
        Block &block = *at->second;
        if (block.used) {
            block.cells.clear();
            block.recorded_streams.clear();
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

/* Allocates on the current device for its current stream. */
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

/* Allocates pinned host memory. */
struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const std::lock_guard<std::recursive_mutex> lock(world().mutex);
        check_host_operators();
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
