/* The shared-memory transport of one process group: see shm_transport.cpp. */
#ifndef FSDP_C_BRIDGE_SHM_TRANSPORT_HPP
#define FSDP_C_BRIDGE_SHM_TRANSPORT_HPP

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

/* A collective as ShmTransport runs it: this rank writes message_count() messages and reads as many
 * of each peer. Any thread may call the functions, with or without the GIL. None throws. */
class ShmOp {
  public:
    /* Identifies the collective. Different tags on two ranks are a collective mismatch. */
    virtual uint32_t tag() const = 0;
    virtual std::string describe_tag(uint32_t tag) const = 0; /* for an error message */
    virtual size_t message_count() const = 0;
    virtual size_t message_bytes(size_t message) const = 0;

    /* Whether the contents of a message are known after `messages_read` messages of each peer were
     * read. True if `messages_read` is the number of the message or more. */
    virtual bool can_write(size_t message, size_t messages_read) const;
    virtual void write(size_t message, char *buffer) = 0;
    /* `peer_data` has one entry for each rank, valid during the call. This rank's entry is null.
     * Called after write() of the same message. */
    virtual void read(size_t message, const std::vector<const char *> &peer_data) = 0;
    /* Called once: all messages are written and read, or `error` is set. */
    virtual void complete(const std::exception_ptr &error) = 0;

  protected:
    ~ShmOp() = default;
};

/* One rank's ring and its collectives in order of issue. All users of a process group share it. */
class ShmTransport {
  public:
    /* Largest message in bytes. All ranks need the same value. */
    static constexpr size_t kMaxMessage = size_t{1} << 20;
    /* Bytes of the ring for messages. */
    static constexpr size_t kCapacity = 4 * kMaxMessage;

    /* Returns null if the ring cannot be created. */
    static std::shared_ptr<ShmTransport> open();
    explicit ShmTransport(shm_ring *ring); /* takes the ring */
    ShmTransport(const ShmTransport &) = delete;
    ShmTransport &operator=(const ShmTransport &) = delete;
    ~ShmTransport();

    shm_ring_handle handle() const;
    /* Maps the peers' rings. Returns false if one cannot be mapped. */
    bool connect(int rank, int world, const std::vector<shm_ring_handle> &handles);

    /* Records that the ranks have fewer than two CPUs each, so that copies in the background take
     * CPU time from computation. Call it before the first submit(). */
    void set_oversubscribed();
    /* Whether a collective that writes `bytes` bytes on this rank would take CPU time from
     * computation: the ranks are oversubscribed, and the ring cannot hold all bytes at once. */
    bool is_cpu_bound(size_t bytes) const;

    /* Appends a collective and writes the messages that fit into the ring. progress() writes the
     * others. `owner` keeps `op` alive until complete(). Returns whether all messages are written.
     * Throws the error of an earlier failure, after which messages cannot be matched any more. */
    bool submit(ShmOp &op, c10::intrusive_ptr<c10::intrusive_ptr_target> owner);
    /* Writes and reads messages until nothing more is possible without waiting. */
    void progress();
    /* Does one step of progress(). If none is possible and `enough` is false, waits for a peer, for
     * at most `most`. */
    void progress_or_wait(std::chrono::milliseconds most, const std::function<bool()> &enough);
    /* Fails all collectives and every later submit(), and marks the ring closed for peers. */
    void abort(const std::string &reason);

  private:
    struct Entry {
        ShmOp *op;
        c10::intrusive_ptr<c10::intrusive_ptr_target> owner;
        size_t written, read; /* messages */
    };
    /* Completed entries. Callers destroy them after unlocking: owners may need the GIL. */
    using FinishedOps = std::vector<Entry>;

    bool is_forked_child() const;
    bool advance();
    /* Caller holds `mutex_`. */
    bool write_next();
    bool read_next(FinishedOps &finished);
    int find_missing_peer(const Entry &first, std::vector<const char *> *peer_data) const;
    int find_late_peer() const;
    void fail_all(const std::exception_ptr &error, FinishedOps &finished);

    std::mutex mutex_; /* guards the members below; shm_ring_seq and _wait do not need it */
    shm_ring *ring_;
    const uint32_t forks_; /* value of the fork counter at construction */
    int rank_ = 0, world_ = 0;
    bool oversubscribed_ = false;
    std::deque<Entry> entries_;
    size_t written_ops_ = 0; /* leading entries whose messages are all written */
    std::exception_ptr error_;
};

} // namespace fct

#endif
