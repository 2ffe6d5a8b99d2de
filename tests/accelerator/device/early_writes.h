/* Writes that do not wait for an earlier reader of the same bytes.
 *
 * On a device such a write can come before the read. The simulation runs operations in the order of
 * the host's calls, so the reader always gets the old bytes. Two runs of the same program show the
 * effect: the first records the bytes of such writes, and in the second the readers get them. */
#ifndef SIM_EARLY_WRITES_H
#define SIM_EARLY_WRITES_H

#include "memory.h"

namespace sim {

/* Bytes that a reader gets in the second run. The numbers of `reader` and `block` count from the
 * beginning of the run, so they are equal in both runs. */
struct EarlyWrite {
    uint64_t reader = 0; /* operation */
    uint64_t writer = 0; /* operation of the first run, by its serial */
    uint64_t block = 0;
    size_t offset = 0; /* in the block */
    std::string data;
};

class EarlyWrites {
  public:
    /* Each of these three restarts the numbering of operations and blocks. */
    void start_recording();
    size_t start_replay(); /* returns the number of recorded writes */
    void stop();
    /* Records that `by` writes [from, cell.end) without waiting for readers of the cell. With
     * `poison`, `by` is an allocation, after which the bytes are undefined. */
    void record(const Block &block, uintptr_t from, const Cell &cell, const Epoch &by, bool poison);
    /* Stores the bytes that `writer` has written. Call it after the operation has run. */
    void complete(const Epoch &writer);
    /* Copies the recorded bytes for `reader` into [from, to), and appends the bytes that were there
     * to `replaced`. */
    void replay(uintptr_t from, uintptr_t to, const Epoch &reader,
                std::vector<Bytes> &replaced) const;

  private:
    uint64_t first_operation_ = 0, first_block_ = 0; /* numbers at the beginning of the run */
    std::vector<EarlyWrite> recorded_, replayed_;
    /* Indices in recorded_ and addresses of writes that have not run. */
    std::vector<std::pair<size_t, uintptr_t>> incomplete_;

    void begin(bool records);
};

EarlyWrites &early_writes(); /* under world().mutex */

} // namespace sim

#endif
