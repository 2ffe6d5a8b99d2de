/* Device memory: host memory behind a caching allocator with a pool for each stream, and who used
 * which bytes of it last. */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include "clock.h"

#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace sim {

/* Bytes and where they belong. */
struct Bytes {
    uintptr_t start = 0;
    std::string data;
};

/* Bytes that were always used together. */
struct Cell {
    uintptr_t end;
    Epoch write;
    std::vector<Epoch> reads;                      /* since the write; at most one of each lane */
    std::shared_ptr<const Bytes> before = nullptr; /* what the write found, where it may be late */
};

struct Block {
    uintptr_t start = 0;
    size_t size = 0; /* rounded up as CUDA's allocator does */
    size_t asked = 0;
    int device = kHost;
    c10::Stream stream;
    bool used = false;
    bool doomed = false; /* a fault: given back as soon as another stream has used it */
    uint64_t serial = 0; /* of the allocation */
    std::string label;
    std::map<uintptr_t, Cell> cells;
    std::vector<c10::Stream> also_on; /* record_stream() */
    Clock held_until;                 /* what the free block still waits for, for their sake */

    static constexpr int kHost = -1; /* pinned memory */
    explicit Block(c10::Stream s) : stream(s) {}
};

/* The free blocks of a stream. */
struct Pool {
    std::multimap<size_t, Block *> free;
    std::vector<Block *> unsettled; /* of them: nobody has asked yet for their last users */
    std::vector<Block *> held;      /* not free yet: other streams were recorded */
};

struct Usage {
    int64_t now = 0;
    int64_t peak = 0;
    int64_t reserved = 0;
};

class Memory {
  public:
    void *allocate(int device, size_t bytes, c10::Stream stream);
    void release(void *address);
    void record_stream(const void *address, c10::Stream stream);
    /* An operation uses [from, to): a finding where that is not ordered after who was there. */
    void access(uintptr_t from, uintptr_t to, bool write, const Epoch &by);
    /* Where writes may be late: puts back what was there before the one in [from, to) for which the
     * reader has not waited, if it is one that comes late. What it replaces is added to `now`. */
    void delay(uintptr_t from, uintptr_t to, const Epoch &by, std::vector<Bytes> &now);
    /* The memory that the storage of this address has from now on is called so. */
    void name(const void *storage, const std::string &text);
    void named(const void *storage, const void *data); /* the storage is about to be used */
    const Block *block_at(const void *address) const;
    std::vector<const Block *> used_blocks() const;
    uint64_t serial() const { /* of the latest allocation */
        return serial_;
    }
    void forget(); /* who used what; free memory goes back to the system */
    Usage &usage(int device);

  private:
    std::map<uintptr_t, std::unique_ptr<Block>> blocks_;
    std::map<std::pair<int, int64_t>, Pool> pools_;
    std::array<Usage, kDevices + 1> usage_;
    std::map<const void *, std::string> names_; /* by storage */
    uint64_t serial_ = 0;

    Block *find(uintptr_t address) const;
    Pool &pool_of(int device, c10::Stream stream);
    void settle(Pool &pool, const Epoch &by);
    Block *take(Pool &pool, size_t size);
    Block *fresh(int device, size_t size, c10::Stream stream);
    void give_back(Block *block);
};

Memory &memory(); /* under world().mutex */
c10::Allocator *device_allocator();
c10::Allocator *pinned_allocator();
/* From now on the host's own operators are checked where they use pinned memory; idempotent. */
void watch_the_host();

} // namespace sim

#endif
