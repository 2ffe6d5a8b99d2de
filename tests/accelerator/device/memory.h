/* Device memory: host memory behind a caching allocator with one pool per stream, and the last
 * accesses of all bytes. */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include "clock.h"

#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace sim {

/* A copy of the bytes at an address. */
struct Bytes {
    uintptr_t start = 0;
    std::string data;
};

/* A range of bytes with the same accesses. */
struct Cell {
    uintptr_t end;
    Epoch write;
    std::vector<Epoch> reads; /* since the write; at most one per stream */
    /* The bytes before the write, if writes are delayed. */
    std::shared_ptr<const Bytes> previous = nullptr;
};

struct Block {
    uintptr_t start = 0;
    size_t size = 0; /* rounded up as by CUDA's allocator */
    size_t requested = 0;
    int device = kHost;
    c10::Stream stream;
    bool used = false;        /* allocated and not freed */
    bool frees_early = false; /* fault: counts as freed once another stream has used it */
    uint64_t serial = 0;      /* number of the allocation */
    std::string label;
    std::map<uintptr_t, Cell> cells;
    std::vector<c10::Stream> recorded_streams; /* by record_stream() */
    Clock reusable_after; /* operations of recorded_streams for which the free block waits */

    static constexpr int kHost = -1; /* pinned memory */
    explicit Block(c10::Stream s) : stream(s) {}
};

/* The free blocks of a stream. */
struct Pool {
    std::multimap<size_t, Block *> free;
    std::vector<Block *> unchecked; /* free blocks whose last accesses are not checked yet */
    std::vector<Block *> pending;   /* freed, but waiting for other streams */
};

/* Bytes of one device. A free block may be larger than the allocation that reuses it: `now` and
 * `peak` count the bytes of the allocation, because CUDA's allocator splits such blocks. */
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
    /* Records an access of [from, to). Reports it if it is not ordered after the last conflicting
     * access. */
    void access(uintptr_t from, uintptr_t to, bool write, const Epoch &by);
    /* Simulates late writes: restores the bytes before each delayed write in [from, to) that is not
     * ordered before `by`. Appends the overwritten bytes to `replaced`; the caller puts them back
     * after the read. */
    void hide_unordered_writes(uintptr_t from, uintptr_t to, const Epoch &by,
                               std::vector<Bytes> &replaced);
    /* Sets the label that findings have for the memory of a storage. */
    void set_name(const void *storage, const std::string &text);
    void label_block(const void *storage, const void *data); /* labels the storage's block */
    const Block *block_at(const void *address) const;
    std::vector<const Block *> used_blocks() const;
    uint64_t serial() const { /* number of the latest allocation */
        return serial_;
    }
    /* Drops all recorded accesses, names and recorded streams. Returns free memory to the
     * system. */
    void reset();
    Usage &usage(int device);

  private:
    std::map<uintptr_t, std::unique_ptr<Block>> blocks_;
    std::map<std::pair<int, int64_t>, Pool> pools_;
    std::array<Usage, kDevices + 1> usage_;
    std::map<const void *, std::string> names_; /* labels by storage */
    uint64_t serial_ = 0;

    Block *find(uintptr_t address) const;
    Pool &pool_of(int device, c10::Stream stream);
    void check_free_blocks(Pool &pool, const Epoch &by);
    Block *take_free_block(Pool &pool, size_t size);
    Block *allocate_block(int device, size_t size, c10::Stream stream);
};

Memory &memory(); /* under world().mutex */
c10::Allocator *device_allocator();
c10::Allocator *pinned_allocator();
/* Enables the check of CPU operators that use pinned memory. May be called repeatedly. */
void check_host_operators();

} // namespace sim

#endif
