#include "communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace sim {

namespace {

using Number = std::atomic<uint64_t>;

constexpr auto kJoinTime = std::chrono::seconds(60);
constexpr auto kJoinPause = std::chrono::microseconds(500);
constexpr auto kPeerCheckInterval = std::chrono::milliseconds(50); /* for checks of one peer */

struct Part {
    int color;
    int key;
};

} // namespace

/* All zero in a new file. */
struct SharedMemory {
    Number joined[kMaxRanks];
    Number published[kMaxRanks]; /* number of the latest collective */
    Signature signatures[kMaxRanks][2];
    Number splits[kMaxRanks];
    Part parts[kMaxRanks][2];
    Number sent[kMaxRanks][kMaxRanks]; /* messages from the first rank to the second */
    Number received[kMaxRanks][kMaxRanks];
    uint64_t message_bytes[kMaxRanks][kMaxRanks];
};

namespace {

constexpr size_t kHeader = (sizeof(SharedMemory) + 4095) / 4096 * 4096;
constexpr size_t kSlots = 2 * kMaxRanks + kMaxRanks * kMaxRanks;
constexpr size_t kFileBytes = kHeader + kSlots * kSlotBytes; /* without pages until written */

struct flock lock_of(int rank, short type) {
    struct flock lock = {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

/* Waits until `condition` holds. Returns false after kJoinTime. */
template <class Condition> bool wait_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kJoinTime;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) {
            return false;
        }
        std::this_thread::sleep_for(kJoinPause);
    }
    return true;
}

bool all_reached(const Number *numbers, int world, uint64_t number) {
    return std::all_of(numbers, numbers + world, [=](const Number &n) { return n >= number; });
}

std::string describe(const Signature &s) {
    return std::string(s.name) + " (" + std::to_string(s.count) + " elements, type " +
           std::to_string(s.type) + ", operation " + std::to_string(s.op) + ", root " +
           std::to_string(s.root) + ")";
}

bool are_equal(const Signature &a, const Signature &b) {
    return std::strcmp(a.name, b.name) == 0 && a.count == b.count && a.type == b.type &&
           a.op == b.op && a.root == b.root;
}

void fail_join(const std::string &name, const std::string &reason) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    report("NCCL: cannot join the communicator " + name + ": " + reason);
}

} // namespace

bool Communicator::open() {
    file_ = shm_open(name_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(kFileBytes)) != 0) {
        return false;
    }
    void *const memory =
        mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    shared_ = static_cast<SharedMemory *>(memory);
    struct flock lock = lock_of(rank_, F_WRLCK);
    return fcntl(file_, F_OFD_SETLK, &lock) == 0;
}

std::shared_ptr<Communicator> Communicator::join(const std::string &name, int world, int rank) {
    if (world > kMaxRanks) {
        fail_join(name, "more than 8 ranks");
        return nullptr;
    }
    std::shared_ptr<Communicator> comm(new Communicator(name, world, rank));
    if (!comm->open()) {
        fail_join(name, std::strerror(errno));
        return nullptr;
    }
    SharedMemory &shared = *comm->shared_;
    shared.joined[rank] = 1;
    const bool complete = wait_until([&] { return all_reached(shared.joined, world, 1); });
    /* Each rank removes the name. Either all ranks have mapped the file, or this rank has given up,
     * and the others will too. */
    shm_unlink(name.c_str());
    if (!complete) {
        fail_join(name, "a rank has not joined within a minute");
        return nullptr;
    }
    return comm;
}

Communicator::~Communicator() {
    if (shared_ != nullptr) {
        munmap(shared_, kFileBytes);
    }
    if (file_ >= 0) {
        close(file_);
    }
}

char *Communicator::slot(int rank, uint64_t number) const {
    const size_t index = 2 * static_cast<size_t>(rank) + number % 2;
    return reinterpret_cast<char *>(shared_) + kHeader + index * kSlotBytes;
}

char *Communicator::message(int from, int to) const {
    const auto index = static_cast<size_t>(2 * kMaxRanks + from * kMaxRanks + to);
    return reinterpret_cast<char *>(shared_) + kHeader + index * kSlotBytes;
}

/* Sets the error. The communicator's collectives then wait for ncclCommAbort, as on a device. */
void Communicator::fail(ncclResult_t result, const std::string &text) {
    if (error == ncclSuccess) {
        error = result;
        const std::lock_guard<std::recursive_mutex> lock(device().mutex);
        report("NCCL: " + text);
    }
}

bool Communicator::has_ended(int rank) const {
    struct flock lock = lock_of(rank, F_WRLCK);
    return rank != rank_ && fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void Communicator::check_peer(int rank, const Number &done, uint64_t number) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_check_[rank] < kPeerCheckInterval) {
        return;
    }
    last_check_[rank] = now;
    if (has_ended(rank) && done < number) {
        fail(ncclRemoteError, "rank " + std::to_string(rank_) + " waits for rank " +
                                  std::to_string(rank) + ", which has ended");
    }
}

/* ---- collectives ---- */

void Communicator::publish(const Collective &c) {
    number_++;
    std::memcpy(slot(rank_, number_), c.send, c.bytes);
    if (c.prepare) {
        c.prepare(slot(rank_, number_));
    }
    shared_->signatures[rank_][number_ % 2] = c.signature;
    shared_->published[rank_] = number_;
    is_busy_ = true;
}

/* Whether all ranks have published the current collective. Compares their signatures. */
bool Communicator::is_complete(const Signature &signature) {
    for (int rank = 0; rank < world_; rank++) {
        if (shared_->published[rank] < number_) {
            check_peer(rank, shared_->published[rank], number_);
            return false;
        }
    }
    for (int rank = 0; rank < world_; rank++) {
        const Signature &other = shared_->signatures[rank][number_ % 2];
        if (!are_equal(signature, other)) {
            fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " issued " +
                                       describe(signature) + ", rank " + std::to_string(rank) +
                                       " issued " + describe(other));
            return false;
        }
    }
    return true;
}

bool Communicator::advance(Collective &c) {
    if (!aborted && c.state == Collective::kNew) {
        if (is_busy_ || (c.ticket != 0 && c.ticket != done_ + 1)) {
            return false;
        }
        publish(c);
        c.state = Collective::kPublished;
    }
    if (!aborted) {
        if (error != ncclSuccess || !is_complete(c.signature)) {
            return false;
        }
        std::vector<const void *> inputs;
        for (int rank = 0; rank < world_; rank++) {
            inputs.push_back(slot(rank, number_));
        }
        c.compute(inputs);
    }
    is_busy_ = false;
    done_ += c.ticket != 0 ? 1 : 0;
    c.state = Collective::kNew;
    return true;
}

Work Communicator::collective(std::shared_ptr<Communicator> comm, Collective collective,
                              bool is_captured) {
    collective.ticket = is_captured ? 0 : ++comm->issued_;
    return [comm = std::move(comm), collective = std::move(collective)]() mutable {
        return comm->advance(collective);
    };
}

/* ---- messages ---- */

bool Communicator::send(int peer, const void *data, size_t bytes) {
    if (aborted) {
        return true;
    }
    Number &sent = shared_->sent[rank_][peer];
    if (shared_->received[rank_][peer] < sent) {
        check_peer(peer, shared_->received[rank_][peer], sent);
        return false;
    }
    std::memcpy(message(rank_, peer), data, bytes);
    shared_->message_bytes[rank_][peer] = bytes;
    sent++;
    return true;
}

bool Communicator::receive(int peer, void *data, size_t bytes) {
    if (aborted) {
        return true;
    }
    Number &received = shared_->received[peer][rank_];
    const Number &sent = shared_->sent[peer][rank_];
    if (sent == received) {
        check_peer(peer, sent, received + 1);
        return false;
    }
    const uint64_t found = shared_->message_bytes[peer][rank_];
    if (found != bytes) {
        fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " receives " +
                                   std::to_string(bytes) + " bytes, rank " + std::to_string(peer) +
                                   " sent " + std::to_string(found));
        return false;
    }
    std::memcpy(data, message(peer, rank_), bytes);
    received++;
    return true;
}

/* ---- parts ---- */

std::shared_ptr<Communicator> Communicator::split(int color, int key, int *world, int *rank) {
    const uint64_t number = ++splits_;
    shared_->parts[rank_][number % 2] = {color, key};
    shared_->splits[rank_] = number;
    if (!wait_until([&] { return all_reached(shared_->splits, world_, number); })) {
        fail(ncclSystemError, "ncclCommSplit: a rank is missing");
        return nullptr;
    }
    std::vector<std::pair<int, int>> members; /* keys and ranks */
    for (int r = 0; r < world_; r++) {
        const Part &part = shared_->parts[r][number % 2];
        if (part.color == color) {
            members.emplace_back(part.key, r);
        }
    }
    std::sort(members.begin(), members.end());
    const auto own = std::find(members.begin(), members.end(), std::make_pair(key, rank_));
    if (color < 0 || own == members.end()) {
        return nullptr;
    }
    *world = static_cast<int>(members.size());
    *rank = static_cast<int>(own - members.begin());
    return join(name_ + "-" + std::to_string(number) + "-" + std::to_string(color), *world, *rank);
}

} // namespace sim
