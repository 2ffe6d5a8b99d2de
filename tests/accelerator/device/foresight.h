/* Writes that come too early. Operations run at once, in the order of the host's calls, so a reader
 * cannot see what is written behind it; on a device it can, where nobody has made the write wait
 * for it. Two runs of the same program show it: the first notes which bytes such writes leave, the
 * second lets the readers see them. */
#ifndef SIM_FORESIGHT_H
#define SIM_FORESIGHT_H

#include "memory.h"

namespace sim {

/* What a reader is to see of memory. Operations and blocks are told by their numbers, which are the
 * same in both runs. */
struct Early {
    uint64_t reader = 0, writer = 0;
    uint64_t block = 0;
    size_t offset = 0;
    std::string data;
};

class Foresight {
  public:
    /* The three say what happens from now on; operations and blocks are numbered anew. */
    void note_from_now_on();
    size_t show_from_now_on(); /* readers see what was noted: so many writes */
    void stop();
    /* `by` writes to [from, cell.end) of the block, over what others may still have to read. An
     * allocation leaves poison: somebody will write there. */
    void note(const Block &block, uintptr_t from, const Cell &cell, const Epoch &by, bool poison);
    /* The writer has run: its bytes are what was noted. */
    void complete(const Epoch &writer);
    /* Puts into [from, to) what its reader is to see; what that replaces is added to `now`. */
    void show(uintptr_t from, uintptr_t to, const Epoch &reader, std::vector<Bytes> &now) const;

  private:
    uint64_t first_operation_ = 0, first_block_ = 0; /* before the run */
    std::vector<Early> noted_, seen_;
    std::vector<std::pair<size_t, uintptr_t>> open_; /* of noted_, and where: not written yet */

    void begin(bool notes);
};

Foresight &foresight(); /* under world().mutex */

} // namespace sim

#endif
