/* Collectives between the ranks of one host, over rings in shared memory (transport/shm_ring.h).
 *
 * submit() copies this rank's data into its ring. progress() and waits read the peers' rings. A
 * collective that fits into the ring needs no background thread: submit() writes all of it. The
 * rest of a larger one is written while peers read, by any thread that waits for the transport.
 * The progress thread waits for such a collective (progress.hpp). Messages are written and read in
 * order of issue. Without a waiting thread no system call is made.
 *
 * A reader compares the tag and the size of each message with its own, and reports a mismatch.
 * After a mismatch, a timeout or the end of a rank, messages cannot be matched any more. All later
 * collectives fail on every rank, as over gloo's connections. */
#include "shm_transport.hpp"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <utility>

namespace fct {

static std::exception_ptr make_failure(const std::string &reason) {
    try {
        TORCH_CHECK(false, reason);
    } catch (...) {
        return std::current_exception();
    }
}

std::shared_ptr<ShmTransport> ShmTransport::open() {
    shm_ring *ring = shm_ring_create(kCapacity);
    return ring == nullptr ? nullptr : std::make_shared<ShmTransport>(ring);
}

/* Number of forks between the first process and this one. A child inherits its parent's objects,
 * but must not use its parent's rings. */
static std::atomic<uint32_t> forks{0};

static void count_fork() {
    forks++;
}

ShmTransport::ShmTransport(shm_ring *ring) : ring_(ring), forks_(forks.load()) {
    static const int counted = pthread_atfork(nullptr, nullptr, &count_fork);
    (void)counted;
}

bool ShmTransport::is_forked_child() const {
    return forks_ != forks.load();
}

ShmTransport::~ShmTransport() {
    shm_ring_destroy(ring_);
}

shm_ring_handle ShmTransport::handle() const {
    return shm_ring_get_handle(ring_);
}

void ShmTransport::set_oversubscribed() {
    oversubscribed_ = true;
}

bool ShmTransport::is_cpu_bound(size_t bytes) const {
    return oversubscribed_ && bytes > kCapacity;
}

bool ShmTransport::connect(int rank, int world, const std::vector<shm_ring_handle> &handles) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    world_ = world;
    return shm_ring_connect(ring_, rank, world, handles.data()) != 0;
}

/* ---- writing ---- */

bool ShmOp::can_write(size_t message, size_t messages_read) const {
    (void)message;
    (void)messages_read;
    return true;
}

/* Writes one message. Returns false if all are written, if the ring is full, or if peers' messages
 * must be read first. */
bool ShmTransport::write_next() {
    if (written_ops_ == entries_.size()) {
        return false;
    }
    Entry &entry = entries_[written_ops_];
    if (!entry.op->can_write(entry.written, entry.read)) {
        return false;
    }
    char *buffer = shm_ring_reserve(ring_, entry.op->message_bytes(entry.written));
    if (buffer == nullptr) {
        return false;
    }
    entry.op->write(entry.written, buffer);
    shm_ring_commit(ring_, entry.op->tag());
    entry.written++;
    written_ops_ += entry.written == entry.op->message_count() ? 1 : 0;
    return true;
}

bool ShmTransport::submit(ShmOp &op, c10::intrusive_ptr<c10::intrusive_ptr_target> owner) {
    TORCH_CHECK(!is_forked_child(), "a child of fork() cannot use its parent's process group");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
        std::rethrow_exception(error_);
    }
    entries_.push_back({&op, std::move(owner), 0, 0});
    while (write_next()) {
    }
    return written_ops_ == entries_.size();
}

/* ---- reading ---- */

/* Returns the first rank after this one whose next message is not committed, or -1. Writes the
 * peers' data to *peer_data if the pointer is not null. Throws if the message will not come, is
 * corrupt or belongs to another collective. */
int ShmTransport::find_missing_peer(const Entry &first,
                                    std::vector<const char *> *peer_data) const {
    const uint32_t tag = first.op->tag();
    const size_t bytes = first.op->message_bytes(first.read);
    for (int hop = 1; hop < world_; hop++) {
        const int rank = (rank_ + hop) % world_;
        shm_ring_message message;
        switch (shm_ring_peek(ring_, rank, &message)) {
        case SHM_RING_EMPTY:
            return rank;
        case SHM_RING_CLOSED:
            TORCH_CHECK(false, "Connection closed by peer: rank ", rank,
                        " has closed its process group or ended; rank ", rank_,
                        " waits for its data");
        case SHM_RING_CORRUPT:
            TORCH_CHECK(false, "the shared memory of rank ", rank, " is corrupt");
        case SHM_RING_READY:
            break;
        }
        TORCH_CHECK(message.tag == tag && message.bytes == bytes, "collective mismatch: rank ",
                    rank_, " issued ", first.op->describe_tag(tag), " (message of ", bytes,
                    " bytes), rank ", rank, " issued ", first.op->describe_tag(message.tag),
                    " (message of ", message.bytes, " bytes)");
        if (peer_data != nullptr) {
            (*peer_data)[static_cast<size_t>(rank)] = message.data;
        }
    }
    return -1;
}

/* Reads one message of each peer and completes the first entry if it was the last one. Returns
 * false if there is no entry, or if a message is not committed. */
bool ShmTransport::read_next(FinishedOps &finished) {
    if (entries_.empty()) {
        return false;
    }
    Entry &first = entries_.front();
    bool done = false;
    if (first.read < first.written) {
        std::vector<const char *> peer_data(static_cast<size_t>(world_), nullptr);
        if (find_missing_peer(first, &peer_data) >= 0) {
            return false;
        }
        first.op->read(first.read, peer_data);
        shm_ring_release(ring_);
        first.read++;
        done = true;
    }
    if (first.read == first.op->message_count() && written_ops_ > 0) {
        first.op->complete(nullptr);
        finished.push_back(std::move(first));
        entries_.pop_front();
        written_ops_--;
        done = true;
    }
    return done;
}

bool ShmTransport::advance() {
    if (is_forked_child()) {
        return false;
    }
    FinishedOps finished;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        return write_next() || read_next(finished);
    } catch (...) {
        fail_all(std::current_exception(), finished);
        return false;
    }
}

void ShmTransport::progress() {
    while (advance()) {
    }
}

/* ---- waiting ---- */

/* A rank that the first entry waits for, or -1. */
int ShmTransport::find_late_peer() const {
    if (entries_.empty()) {
        return -1;
    }
    const Entry &first = entries_.front();
    return first.read < first.written ? find_missing_peer(first, nullptr)
                                      : shm_ring_slowest_reader(ring_);
}

void ShmTransport::progress_or_wait(std::chrono::milliseconds most,
                                    const std::function<bool()> &enough) {
    TORCH_CHECK(!is_forked_child(), "a child of fork() cannot wait for its parent's collectives");
    const uint32_t seen_seq = shm_ring_seq(ring_);
    /* Another thread may do the last step while this one waits for the mutex: check `enough`. */
    if (advance() || enough()) {
        return;
    }
    shm_ring_wait(ring_, seen_seq, most.count());
    if (shm_ring_seq(ring_) != seen_seq) {
        return;
    }
    FinishedOps finished;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        const int rank = find_late_peer();
        /* The peer may have committed its last message before it ended: compare the sequence. */
        if (rank >= 0 && shm_ring_peer_has_ended(ring_, rank) && shm_ring_seq(ring_) == seen_seq) {
            fail_all(make_failure(c10::str("Connection closed by peer: the process of rank ", rank,
                                           " has ended or closed its process group")),
                     finished);
        }
    } catch (...) {
        fail_all(std::current_exception(), finished);
    }
}

void ShmTransport::fail_all(const std::exception_ptr &error, FinishedOps &finished) {
    error_ = error_ ? error_ : error;
    shm_ring_mark_closed(ring_);
    for (Entry &entry : entries_) {
        entry.op->complete(error_);
        finished.push_back(std::move(entry));
    }
    entries_.clear();
    written_ops_ = 0;
}

void ShmTransport::abort(const std::string &reason) {
    if (is_forked_child()) {
        return; /* another thread of the parent may have held the mutex at the fork */
    }
    FinishedOps finished;
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_all(make_failure(reason), finished);
}

} // namespace fct
