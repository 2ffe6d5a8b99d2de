/* RankShards between ranks of one host, without a system call where nobody sleeps.
 *
 * Whoever issues an exchange writes this rank's rows onto its board (board/board.h), and whoever
 * waits for it reads the others' from theirs. What fits on the board needs no thread in the
 * background: it is there before the call that issues it returns. Of a larger exchange the rest is
 * written as the others read, by all who wait for something, and its own waits are the progress_thread's
 * (wait_task.h). Messages are written and read in order of issue.
 *
 * Ranks that are at odds find messages of another tag or size, and say so. After that, and after a
 * time-out or the end of a rank, nobody knows which message is which: all that follows fails, on
 * every rank, as on_completion gloo's connections. */
#include "shm_transport.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <utility>

namespace fct {

static std::exception_ptr make_failure(const std::string &why) {
    try {
        TORCH_CHECK(false, why);
    } catch (...) {
        return std::current_exception();
    }
}

std::shared_ptr<ShmTransport> ShmTransport::open() {
    shm_ring *board = shm_ring_create(kCapacity);
    return board == nullptr ? nullptr : std::make_shared<ShmTransport>(board);
}

/* How many forks this process is away from the one that was started: its parent's boards are not
 * its own, but all of its memory looks as if they were. */
static std::atomic<uint32_t> forks{0};

static void count_fork() {
    forks++;
}

ShmTransport::ShmTransport(shm_ring *board) : ring_(board), forks_(forks.load()) {
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

/* False: all is written, there is no buffer, or others' messages are to be read before. */
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
    TORCH_CHECK(!is_forked_child(), "a child of fork() cannot exchange rows in its parent's place");
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

/* The first rank after this one whose next message is not there; -1: none. Throws where nothing
 * will come. */
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
                        " has given up or ended; rank ", rank_, " waits for its rows");
        case SHM_RING_CORRUPT:
            TORCH_CHECK(false, "the shared memory of rank ", rank, " says what cannot be");
        case SHM_RING_READY:
            break;
        }
        TORCH_CHECK(message.tag == tag && message.bytes == bytes, "ranks are at odds: where rank ",
                    rank_, " ", first.op->describe_tag(tag), " in a message of ", bytes,
                    " bytes, rank ", rank, " ", first.op->describe_tag(message.tag), " in one of ",
                    message.bytes);
        if (peer_data != nullptr) {
            (*peer_data)[static_cast<size_t>(rank)] = message.data;
        }
    }
    return -1;
}

/* False: something is find_missing_peer, or nobody waits. */
bool ShmTransport::read_next(FinishedOps &on_completion) {
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
        on_completion.push_back(std::move(first));
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
    FinishedOps on_completion;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        return write_next() || read_next(on_completion);
    } catch (...) {
        fail_all(std::current_exception(), on_completion);
        return false;
    }
}

void ShmTransport::progress() {
    while (advance()) {
    }
}

/* ---- waiting ---- */

/* A rank that the first correspondent waits for. */
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
    TORCH_CHECK(!is_forked_child(), "a child of fork() cannot wait for its parent's rows");
    const uint32_t seen_seq = shm_ring_seq(ring_);
    /* Another thread may do the last step while this one waits for the mutex. */
    if (advance() || enough()) {
        return;
    }
    shm_ring_wait(ring_, seen_seq, most.count());
    if (shm_ring_seq(ring_) != seen_seq) {
        return;
    }
    FinishedOps on_completion;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        const int rank = find_late_peer();
        /* What it did last it may have done since. */
        if (rank >= 0 && shm_ring_peer_has_ended(ring_, rank) && shm_ring_seq(ring_) == seen_seq) {
            fail_all(make_failure(c10::str("Connection closed by peer: the process of rank ", rank,
                                           " has ended or closed its process group")),
                     on_completion);
        }
    } catch (...) {
        fail_all(std::current_exception(), on_completion);
    }
}

void ShmTransport::fail_all(const std::exception_ptr &error, FinishedOps &on_completion) {
    error_ = error_ ? error_ : error;
    shm_ring_mark_closed(ring_);
    for (Entry &entry : entries_) {
        entry.op->complete(error_);
        on_completion.push_back(std::move(entry));
    }
    entries_.clear();
    written_ops_ = 0;
}

void ShmTransport::abort(const std::string &why) {
    if (is_forked_child()) {
        return; /* some other thread may have had the mutex */
    }
    FinishedOps on_completion;
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_all(make_failure(why), on_completion);
}

} // namespace fct
