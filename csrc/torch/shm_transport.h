/* Exchanges on_completion shared memory: see transport.cpp. */
#ifndef FSDP_C_TORCH_SHM_TRANSPORT_H
#define FSDP_C_TORCH_SHM_TRANSPORT_H

#include "../transport/shm_ring.h"

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
class ShmOp {
  public:
    /* The same on all ranks; else they are at odds. */
    virtual uint32_t tag() const = 0;
    virtual std::string describe_tag(uint32_t tag) const = 0; /* for a message */
    virtual size_t message_count() const = 0;
    virtual size_t message_bytes(size_t message) const = 0;

    /* Whether it is seen_seq what a message has, when so many of the others' were read: of as many as
     * there are before it, always. */
    virtual bool can_write(size_t message, size_t messages_read) const;
    virtual void write(size_t message, char *buffer) = 0;
    /* What each rank has written; nothing is there for this one, which has written it, too. Ends
     * with the call. */
    virtual void read(size_t message, const std::vector<const char *> &peer_data) = 0;
    /* Once, at the end: all is written and read, or nothing more will be. */
    virtual void complete(const std::exception_ptr &error) = 0;

  protected:
    ~ShmOp() = default;
};

/* The board of one rank of one process group, and its correspondents in order of issue. All who use
 * the group share it. */
class ShmTransport {
  public:
    /* Of a message, in bytes, at most; on all ranks the same. */
    static constexpr size_t kMaxMessage = size_t{1} << 20;
    /* Of all that is posted, before others read it, but for what the board itself writes. */
    static constexpr size_t kCapacity = 4 * kMaxMessage;

    /* Empty: there is no such memory. */
    static std::shared_ptr<ShmTransport> open();
    explicit ShmTransport(shm_ring *board);
    ShmTransport(const ShmTransport &) = delete;
    ShmTransport &operator=(const ShmTransport &) = delete;
    ~ShmTransport();

    shm_ring_handle handle() const;
    /* False: some rank's board was not found. */
    bool connect(int rank, int world, const std::vector<shm_ring_handle> &handles);

    /* The ranks have fewer than two processors each: what threads copy in the background takes the
     * time of computation. To be called before anything is added. */
    void set_oversubscribed();
    /* Whether that is so of what a rank has so many bytes to post of: more than there is buffer for,
     * so that not all of it is copied at once. */
    bool is_cpu_bound(size_t bytes) const;

    /* Posts what there is buffer for now; progress() does the rest. `owner` keeps the correspondent
     * until its end. Whether all was posted. Throws what has failed before: the ranks would not
     * know any more which message is which. */
    bool submit(ShmOp &op, c10::intrusive_ptr<c10::intrusive_ptr_target> owner);
    /* Posts and reads all that can be. */
    void progress();
    /* A step of that; where none can be done and `enough` does not hold, a sleep until one can, for
     * that long at most. */
    void progress_or_wait(std::chrono::milliseconds most, const std::function<bool()> &enough);
    /* All fail, as whoever comes later; the other ranks learn that nothing will come. */
    void abort(const std::string &why);

  private:
    struct Entry {
        ShmOp *op;
        c10::intrusive_ptr<c10::intrusive_ptr_target> owner;
        size_t written, read;
    };
    using FinishedOps =
        std::vector<Entry>; /* dropped when the mutex is free: that may want the GIL */

    bool is_forked_child() const;
    bool advance();
    /* With the mutex: */
    bool write_next();
    bool read_next(FinishedOps &on_completion);
    int find_missing_peer(const Entry &first, std::vector<const char *> *peer_data) const;
    int find_late_peer() const;
    void fail_all(const std::exception_ptr &error, FinishedOps &on_completion);

    std::mutex mutex_; /* guards what follows; who sleeps on the board needs it not */
    shm_ring *ring_;
    const uint32_t forks_; /* before it was opened */
    int rank_ = 0, world_ = 0;
    bool oversubscribed_ = false;
    std::deque<Entry> entries_;
    size_t written_ops_ = 0; /* how many of them, from the first, are written */
    std::exception_ptr error_;
};

} // namespace fct

#endif
