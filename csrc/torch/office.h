/* Exchanges over shared memory: see office.cpp. */
#ifndef FSDP_C_TORCH_OFFICE_H
#define FSDP_C_TORCH_OFFICE_H

#include "../board/board.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fct {

/* One who sends all other ranks messages, and gets as many from each of them. The functions are
 * called by any thread, which may not have the GIL; none throws. */
class Correspondent {
  public:
    /* The same on all ranks; else they are at odds. */
    virtual uint32_t kind() const = 0;
    virtual std::string name_of(uint32_t kind) const = 0; /* for a message */
    virtual size_t messages() const = 0;
    virtual size_t bytes_of(size_t message) const = 0;

    /* Whether it is known what a message has, when so many of the others' were read: of as many as
     * there are before it, always. */
    virtual bool can_write(size_t message, size_t were_read) const;
    virtual void write(size_t message, char *room) = 0;
    /* What each rank has written; nothing is there for this one, which has written it, too. Ends
     * with the call. */
    virtual void read(size_t message, const std::vector<const char *> &written) = 0;
    /* Once, at the end: all is written and read, or nothing more will be. */
    virtual void end(const std::exception_ptr &error) = 0;

  protected:
    ~Correspondent() = default;
};

/* The board of one rank of one process group, and its correspondents in order of issue. All who use
 * the group share it. */
class Office {
  public:
    /* Of a message, in bytes, at most; on all ranks the same. */
    static constexpr size_t kLargest = size_t{1} << 20;
    /* Of all that is posted, before others read it, but for what the board itself writes. */
    static constexpr size_t kRoom = 4 * kLargest;

    /* Empty: there is no such memory. */
    static std::shared_ptr<Office> open();
    explicit Office(fcb_board *board);
    Office(const Office &) = delete;
    Office &operator=(const Office &) = delete;
    ~Office();

    fcb_offer offer() const;
    /* False: some rank's board was not found. */
    bool join(int rank, int world, const std::vector<fcb_offer> &offers);

    /* The ranks have fewer than two processors each: what threads copy in the background takes the
     * time of computation. To be called before anything is added. */
    void crowd();
    /* Whether that is so of what a rank has so many bytes to post of: more than there is room for,
     * so that not all of it is copied at once. */
    bool copies(size_t bytes) const;

    /* Posts what there is room for now; progress() does the rest. `owner` keeps the correspondent
     * until its end. Whether all was posted. Throws what has failed before: the ranks would not
     * know any more which message is which. */
    bool add(Correspondent &one, c10::intrusive_ptr<c10::intrusive_ptr_target> owner);
    /* Posts and reads all that can be. */
    void progress();
    /* A step of that; where none can be done and `enough` does not hold, a sleep until one can, for
     * that long at most. */
    void progress_or_sleep(std::chrono::milliseconds most, const std::function<bool()> &enough);
    /* All fail, as whoever comes later; the other ranks learn that nothing will come. */
    void give_up(const std::string &why);

  private:
    struct Entry {
        Correspondent *one;
        c10::intrusive_ptr<c10::intrusive_ptr_target> owner;
        size_t written, read;
    };
    using Over = std::vector<Entry>; /* dropped when the mutex is free: that may want the GIL */

    bool is_childs() const;
    bool step();
    /* With the mutex: */
    bool write_next();
    bool read_next(Over &over);
    int missing(const Entry &first, std::vector<const char *> *written) const;
    int late() const;
    void fail_all(const std::exception_ptr &error, Over &over);

    std::mutex mutex_; /* guards what follows; who sleeps on the board needs it not */
    fcb_board *board_;
    const uint32_t forks_; /* before it was opened */
    int rank_ = 0, world_ = 0;
    bool crowded_ = false;
    std::deque<Entry> entries_;
    size_t whole_ = 0; /* how many of them, from the first, are written */
    std::exception_ptr error_;
};

} // namespace fct

#endif
