/* A communicator between processes of one host, for the substitute of libnccl. */
#ifndef CUDA_SIM_COMMUNICATOR_H
#define CUDA_SIM_COMMUNICATOR_H

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "reduction.h"
#include "sim.h"

namespace sim {

constexpr int kMaxRanks = 8;
constexpr size_t kSlotBytes = size_t{64} << 20; /* maximum bytes that a rank sends at once */

/* The arguments of a collective. They must be equal on all ranks. */
struct Signature {
    char name[24] = "";
    uint64_t count = 0;
    int type = 0;
    int op = 0;
    int root = 0;
};

/* A collective of one rank. */
struct Collective {
    enum State { kNew, kPublished };
    Signature signature;
    const void *send = nullptr;
    size_t bytes = 0;                        /* at `send` */
    std::function<void(void *copy)> prepare; /* changes the copy of the input; may be empty */
    /* Computes this rank's output from the inputs of all ranks. */
    std::function<void(const std::vector<const void *> &inputs)> compute;
    uint64_t ticket = 0; /* number in the order of the host's calls; 0: in a graph */
    State state = kNew;
};

/* The memory that the ranks share: this struct, then the slots. */
struct SharedMemory;

/* One rank of a communicator.
 *
 * Each rank has two slots. Collective n copies the rank's input into slot n % 2, then publishes n.
 * When all ranks have published n, each rank computes its output from the slots. A rank that
 * publishes n + 1 has finished n, and no rank reads slot n % 2 when n + 2 is published.
 *
 * A pair of ranks has one slot for messages in each direction.
 *
 * The shared memory is a file in /dev/shm. The ranks remove the file when all have mapped it. Each
 * rank holds a lock on one byte of the file, which ends with its process. A rank that waits for a
 * number sets ncclRemoteError if the peer has released its lock without publishing the number. */
class Communicator {
  public:
    /* Blocks until all ranks have joined the communicator `name`. Returns NULL if a rank has not
     * joined within a minute, if `world` exceeds kMaxRanks, or if the file cannot be opened.
     * Reports the reason. */
    static std::shared_ptr<Communicator> join(const std::string &name, int world, int rank);
    ~Communicator();
    Communicator(const Communicator &) = delete;
    Communicator &operator=(const Communicator &) = delete;

    const std::string &name() const {
        return name_;
    }
    /* Set by ncclCommAbort: all work ends without a result. */
    std::atomic<bool> aborted{false};
    std::atomic<int> error{ncclSuccess}; /* ncclResult_t */

    /* Returns the work of a collective. The collectives of a communicator run in the order of these
     * calls, whatever their streams. Those of a graph run in the order of the graphs' launches. */
    static Work collective(std::shared_ptr<Communicator> comm, Collective collective,
                           bool is_captured);
    /* Copies a message into the slot of the peer. Returns false if the slot is not free. */
    bool send(int peer, const void *data, size_t bytes);
    /* Copies the next message of the peer. Returns false if there is none. */
    bool receive(int peer, void *data, size_t bytes);

    /* Exchanges colors and keys with all ranks. Returns this rank's part of the communicator, and
     * NULL if `color` is negative or a rank is missing. `world` and `rank` describe the part. */
    std::shared_ptr<Communicator> split(int color, int key, int *world, int *rank);

  private:
    Communicator(std::string name, int world, int rank)
        : name_(std::move(name)), world_(world), rank_(rank) {}

    std::string name_;
    int world_;
    int rank_;
    int file_ = -1;
    SharedMemory *shared_ = nullptr;
    std::atomic<uint64_t> issued_{0}; /* collectives, without those of graphs */
    uint64_t splits_ = 0;
    /* Used by the device's thread only. */
    uint64_t done_ = 0;    /* number of finished collectives among issued_ */
    uint64_t number_ = 0;  /* of the current collective, or the latest one */
    bool is_busy_ = false; /* this rank has published a collective and not finished it */
    std::chrono::steady_clock::time_point last_check_[kMaxRanks];

    bool open();
    char *slot(int rank, uint64_t number) const;
    char *message(int from, int to) const;
    void fail(ncclResult_t result, const std::string &text);
    /* Whether the process of a peer has ended, or has left the communicator. */
    bool has_ended(int rank) const;
    /* Sets the error if the peer has ended and `done` has not reached `number`. */
    void check_peer(int rank, const std::atomic<uint64_t> &done, uint64_t number);
    void publish(const Collective &collective);
    bool is_complete(const Signature &signature);
    bool advance(Collective &collective);
};

} // namespace sim

#endif
