/* Rows between ranks of one host, without a system call where nobody sleeps.
 *
 * Whoever issues an exchange writes this rank's rows onto its board (board/board.h), and whoever
 * waits for it reads the others' from theirs. What fits on the board needs no thread in the
 * background: it is there before the call that issues it returns. Of a larger exchange the rest is
 * written as the others read, by all who wait for something, and its own waits are the helper's
 * (waiter.h). Messages are written and read in order of issue.
 *
 * Ranks that are at odds find messages of another kind or size, and say so. After that, and after a
 * time-out or the end of a rank, nobody knows which message is which: all that follows fails, on
 * every rank, as over gloo's connections. */
#include "office.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <utility>

namespace fct {

static std::exception_ptr failure(const std::string &why) {
    try {
        TORCH_CHECK(false, why);
    } catch (...) {
        return std::current_exception();
    }
}

std::shared_ptr<Office> Office::open() {
    fcb_board *board = fcb_open(kRoom);
    return board == nullptr ? nullptr : std::make_shared<Office>(board);
}

/* How many forks this process is away from the one that was started: its parent's boards are not
 * its own, but all of its memory looks as if they were. */
static std::atomic<uint32_t> forks{0};

static void count_fork() {
    forks++;
}

Office::Office(fcb_board *board) : board_(board), forks_(forks.load()) {
    static const int counted = pthread_atfork(nullptr, nullptr, &count_fork);
    (void)counted;
}

bool Office::is_childs() const {
    return forks_ != forks.load();
}

Office::~Office() {
    fcb_close(board_);
}

fcb_offer Office::offer() const {
    return fcb_offer_of(board_);
}

void Office::crowd() {
    crowded_ = true;
}

bool Office::copies(size_t bytes) const {
    return crowded_ && bytes > kRoom;
}

bool Office::join(int rank, int world, const std::vector<fcb_offer> &offers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    world_ = world;
    return fcb_join(board_, rank, world, offers.data()) != 0;
}

/* ---- writing ---- */

bool Correspondent::can_write(size_t message, size_t were_read) const {
    (void)message;
    (void)were_read;
    return true;
}

/* False: all is written, there is no room, or others' messages are to be read before. */
bool Office::write_next() {
    if (whole_ == entries_.size()) {
        return false;
    }
    Entry &entry = entries_[whole_];
    if (!entry.one->can_write(entry.written, entry.read)) {
        return false;
    }
    char *room = fcb_room(board_, entry.one->bytes_of(entry.written));
    if (room == nullptr) {
        return false;
    }
    entry.one->write(entry.written, room);
    fcb_post(board_, entry.one->kind());
    entry.written++;
    whole_ += entry.written == entry.one->messages() ? 1 : 0;
    return true;
}

bool Office::add(Correspondent &one, c10::intrusive_ptr<c10::intrusive_ptr_target> owner) {
    TORCH_CHECK(!is_childs(), "a child of fork() cannot exchange rows in its parent's place");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
        std::rethrow_exception(error_);
    }
    entries_.push_back({&one, std::move(owner), 0, 0});
    while (write_next()) {
    }
    return whole_ == entries_.size();
}

/* ---- reading ---- */

/* The first rank after this one whose next message is not there; -1: none. Throws where nothing
 * will come. */
int Office::missing(const Entry &first, std::vector<const char *> *written) const {
    const uint32_t kind = first.one->kind();
    const size_t bytes = first.one->bytes_of(first.read);
    for (int hop = 1; hop < world_; hop++) {
        const int rank = (rank_ + hop) % world_;
        fcb_message message;
        switch (fcb_look(board_, rank, &message)) {
        case FCB_YET:
            return rank;
        case FCB_GONE:
            TORCH_CHECK(false, "Connection closed by peer: rank ", rank,
                        " has given up or ended; rank ", rank_, " waits for its rows");
        case FCB_BAD:
            TORCH_CHECK(false, "the shared memory of rank ", rank, " says what cannot be");
        case FCB_HERE:
            break;
        }
        TORCH_CHECK(message.kind == kind && message.bytes == bytes,
                    "ranks are at odds: where rank ", rank_, " ", first.one->name_of(kind),
                    " in a message of ", bytes, " bytes, rank ", rank, " ",
                    first.one->name_of(message.kind), " in one of ", message.bytes);
        if (written != nullptr) {
            (*written)[static_cast<size_t>(rank)] = message.data;
        }
    }
    return -1;
}

/* False: something is missing, or nobody waits. */
bool Office::read_next(Over &over) {
    if (entries_.empty()) {
        return false;
    }
    Entry &first = entries_.front();
    bool done = false;
    if (first.read < first.written) {
        std::vector<const char *> written(static_cast<size_t>(world_), nullptr);
        if (missing(first, &written) >= 0) {
            return false;
        }
        first.one->read(first.read, written);
        fcb_read(board_);
        first.read++;
        done = true;
    }
    if (first.read == first.one->messages() && whole_ > 0) {
        first.one->end(nullptr);
        over.push_back(std::move(first));
        entries_.pop_front();
        whole_--;
        done = true;
    }
    return done;
}

bool Office::step() {
    if (is_childs()) {
        return false;
    }
    Over over;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        return write_next() || read_next(over);
    } catch (...) {
        fail_all(std::current_exception(), over);
        return false;
    }
}

void Office::progress() {
    while (step()) {
    }
}

/* ---- waiting ---- */

/* A rank that the first correspondent waits for. */
int Office::late() const {
    if (entries_.empty()) {
        return -1;
    }
    const Entry &first = entries_.front();
    return first.read < first.written ? missing(first, nullptr) : fcb_slowest(board_);
}

void Office::progress_or_sleep(std::chrono::milliseconds most,
                               const std::function<bool()> &enough) {
    TORCH_CHECK(!is_childs(), "a child of fork() cannot wait for its parent's rows");
    const uint32_t known = fcb_news(board_);
    /* Another thread may do the last step while this one waits for the mutex. */
    if (step() || enough()) {
        return;
    }
    fcb_sleep(board_, known, most.count());
    if (fcb_news(board_) != known) {
        return;
    }
    Over over;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        const int rank = late();
        /* What it did last it may have done since. */
        if (rank >= 0 && fcb_ended(board_, rank) && fcb_news(board_) == known) {
            fail_all(failure(c10::str("Connection closed by peer: the process of rank ", rank,
                                      " has ended or closed its process group")),
                     over);
        }
    } catch (...) {
        fail_all(std::current_exception(), over);
    }
}

void Office::fail_all(const std::exception_ptr &error, Over &over) {
    error_ = error_ ? error_ : error;
    fcb_give_up(board_);
    for (Entry &entry : entries_) {
        entry.one->end(error_);
        over.push_back(std::move(entry));
    }
    entries_.clear();
    whole_ = 0;
}

void Office::give_up(const std::string &why) {
    if (is_childs()) {
        return; /* some other thread may have had the mutex */
    }
    Over over;
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_all(failure(why), over);
}

} // namespace fct
