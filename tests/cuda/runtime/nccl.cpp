/* Substitute of libnccl. Collectives declare their accesses.
 *
 * With the setting `execute`, the ranks of a communicator are processes that exchange data
 * (communicator.h). Else this process is one rank and the other ranks are emulated: an all-gather
 * copies this rank's part to the parts of all ranks. */
#include <nccl.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "communicator.h"
#include "sim.h"

/* An operation of ncclRedOpCreatePreMulSum. */
struct Scaling {
    ncclDataType_t type;
    double factor;
    const void *scalar; /* in device memory, or NULL: `factor` is valid */
};

struct ncclComm {
    int world;
    int rank;
    std::shared_ptr<sim::Communicator> peers; /* NULL: the other ranks are emulated */
    std::map<int, Scaling> scalings;          /* by ncclRedOp_t */
};

namespace {

using sim::size_of;
using Inputs = std::vector<const void *>;

/* A part of a call: a collective, or a message. */
struct Transfer {
    const char *name;
    const void *send;
    size_t sent; /* bytes */
    void *receive;
    size_t received;
    cudaStream_t stream;
};

/* Messages between ncclGroupStart and ncclGroupEnd. They are exchanged in any order. */
struct Group {
    int depth = 0;
    std::vector<sim::Work> messages;
    sim::Operation last;
};
thread_local Group group;

/* Starts an operation and declares its accesses. Ranks that exchange data have slots of a fixed
 * size. */
ncclResult_t start(const Transfer &t, ncclComm_t comm, sim::Operation *by) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    sim::count(t.name);
    sim::count("collective");
    if (sim::is_due(sim::device().settings.fail_nccl)) {
        return static_cast<ncclResult_t>(sim::device().settings.nccl_error);
    }
    if (sim::begin(sim::stream_of(t.stream), t.name, by) != 0) {
        return ncclUnhandledCudaError;
    }
    sim::access(*by, t.send, t.sent, false);
    sim::access(*by, t.receive, t.received, true);
    if (sim::is_due(sim::device().settings.hang_nccl)) {
        sim::hang(*by);
    }
    return comm->peers == nullptr || t.sent <= sim::kSlotBytes ? ncclSuccess : ncclInternalError;
}

bool is_captured(cudaStream_t stream) {
    return sim::stream_of(stream).capture != nullptr;
}

/* Starts a collective. `compute` computes this rank's output from the inputs of all ranks.
 * `emulate` computes the output where the other ranks are emulated. */
template <class Compute, class Emulate>
ncclResult_t collective(const Transfer &t, ncclComm_t comm, sim::Collective call, Compute compute,
                        Emulate emulate) {
    sim::Operation by;
    const ncclResult_t result = start(t, comm, &by);
    if (result != ncclSuccess) {
        return result;
    }
    if (comm->peers == nullptr) {
        if (sim::device().settings.copies != 0 && !is_captured(t.stream)) {
            emulate();
        }
        return result;
    }
    std::strcpy(call.signature.name, t.name);
    call.send = t.send;
    call.bytes = t.sent;
    call.compute = std::move(compute);
    sim::submit(by,
                sim::Communicator::collective(comm->peers, std::move(call), is_captured(t.stream)));
    return result;
}

sim::Collective call_of(size_t count, ncclDataType_t type, int op = 0, int root = 0) {
    sim::Collective call;
    call.signature.count = count;
    call.signature.type = type;
    call.signature.op = op;
    call.signature.root = root;
    return call;
}

/* Like call_of(), for a reduction of `count` elements of each rank. prepare() scales the inputs, of
 * `sent_count` elements each. *scaled_op reduces the scaled inputs. */
sim::Collective reduction_of(size_t count, size_t sent_count, ncclDataType_t type, ncclRedOp_t op,
                             int root, ncclComm_t comm, ncclRedOp_t *scaled_op) {
    const bool scales = op >= ncclNumOps;
    sim::Collective call = call_of(count, type, scales ? ncclNumOps : op, root);
    *scaled_op = scales || op == ncclAvg ? ncclSum : op;
    if (scales) {
        const Scaling scaling = comm->scalings.at(op);
        call.prepare = [=](void *copy) {
            const bool in_memory = scaling.scalar != nullptr;
            const double factor =
                in_memory ? sim::read_scalar(type, scaling.scalar) : scaling.factor;
            sim::scale(type, copy, sent_count, factor);
        };
    } else if (op == ncclAvg && type >= ncclFloat16) {
        call.prepare = [=, world = comm->world](void *copy) {
            sim::scale(type, copy, sent_count, 1.0 / world);
        };
    }
    return call;
}

/* Reduces `count` elements from element `first` on. */
void reduce_from(const Inputs &inputs, size_t first, size_t count, ncclDataType_t type,
                 ncclRedOp_t op, bool averages, void *result) {
    Inputs parts;
    const bool omits = inputs.size() > 1 && sim::is_due(sim::device().settings.missing_rank);
    for (size_t r = 0; r < inputs.size() - (omits ? 1 : 0); r++) {
        parts.push_back(static_cast<const char *>(inputs[r]) + first * size_of(type));
    }
    sim::reduce(type, op, parts, result, count);
    if (averages) {
        sim::divide_integers(type, result, count, inputs.size());
    }
}

ncclResult_t new_comm(ncclComm_t *comm, int world, const ncclUniqueId &id, int rank) {
    sim::count("communicator");
    std::shared_ptr<sim::Communicator> peers;
    if (sim::executes()) {
        peers = sim::Communicator::join(id.internal, world, rank);
        if (peers == nullptr) {
            return ncclSystemError;
        }
    }
    *comm = new ncclComm{world, rank, std::move(peers), {}};
    return ncclSuccess;
}

/* Submits the messages of a group as one work, which ends when all are exchanged. */
void submit_messages() {
    std::vector<sim::Work> messages = std::exchange(group.messages, {});
    if (messages.empty()) {
        return;
    }
    std::vector<bool> done(messages.size());
    sim::submit(group.last, [messages, done]() mutable {
        bool all = true;
        for (size_t i = 0; i < messages.size(); i++) {
            done[i] = done[i] || messages[i]();
            all = all && done[i];
        }
        if (all) {
            done.assign(done.size(), false); /* for the next launch of a graph */
        }
        return all;
    });
}

/* Adds a message to the group, or submits it. */
ncclResult_t message(const Transfer &t, ncclComm_t comm, sim::Work work) {
    sim::Operation by;
    const ncclResult_t result = start(t, comm, &by);
    if (result == ncclSuccess && comm->peers != nullptr) {
        group.messages.push_back(std::move(work));
        group.last = by;
        if (group.depth == 0) {
            submit_messages();
        }
    }
    return result;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    *id = {};
    if (sim::executes()) {
        static std::atomic<unsigned> serial;
        const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
        std::snprintf(id->internal, sizeof id->internal, "/fsdp_c-nccl-%d-%llx-%u", getpid(),
                      static_cast<unsigned long long>(now), ++serial);
    }
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclSuccess ? "no error" : "error of the simulated NCCL";
}

const char *ncclGetLastError(ncclComm_t) {
    return "";
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId id, int rank,
                                    ncclConfig_t *) {
    return new_comm(comm, world, id, rank);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId id, int rank) {
    return new_comm(comm, world, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int world, int rank, int, ncclUniqueId *ids,
                                      ncclConfig_t *) {
    return new_comm(comm, world, ids[0], rank);
}

static ncclResult_t split_between_processes(ncclComm_t comm, int color, int key, ncclComm_t *part) {
    int world = 0;
    int rank = 0;
    auto peers = comm->peers->split(color, key, &world, &rank);
    if (peers == nullptr && color != NCCL_SPLIT_NOCOLOR) {
        return ncclSystemError;
    }
    sim::count("communicator");
    *part = peers == nullptr ? nullptr : new ncclComm{world, rank, std::move(peers), {}};
    return ncclSuccess;
}

/* The emulated ranks pass no color, so the test announces the size of each part. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, ncclConfig_t *) {
    if (comm->peers != nullptr) {
        return split_between_processes(comm, color, key, part);
    }
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    auto &sizes = sim::device().split_sizes;
    int world = comm->world;
    if (!sizes.empty()) {
        world = sizes.front();
        sizes.pop_front();
    }
    return new_comm(part, world, {}, key);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->world;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = static_cast<ncclResult_t>(sim::device().settings.nccl_async);
    if (*error == ncclSuccess && comm->peers != nullptr) {
        *error = static_cast<ncclResult_t>(comm->peers->error.load());
    }
    return ncclSuccess;
}

/* As in NCCL, a null communicator is no error. torch 2.14 may abort twice. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == nullptr) {
        return ncclSuccess;
    }
    if (comm->peers != nullptr) {
        comm->peers->aborted = true;
    }
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    sim::count("communicator abort");
    sim::end_hang();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
    return ncclSuccess;
}

/* Work that is queued keeps the connection to the peers. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm != nullptr) {
        comm->peers.reset();
    }
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void *data, size_t, void **handle) {
    *handle = data;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void *) {
    return ncclSuccess;
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
/* Memory that is registered is used by ordinary collectives only. */
ncclResult_t ncclCommWindowRegister(ncclComm_t, void *data, size_t, ncclWindow_t *window, int) {
    *window = static_cast<ncclWindow_t>(data);
    return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
    return ncclSuccess;
}

/* NULL: no peer's memory can be reached by an address. */
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t, int, void **address) {
    *address = nullptr;
    return ncclSuccess;
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void **address) {
    *address = nullptr;
    return ncclSuccess;
}
#endif

ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
    *address = sim::allocate(bytes, sim::Kind::kDevice);
    return *address != nullptr ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclMemFree(void *address) {
    return sim::release(address) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (--group.depth == 0) {
        submit_messages();
    }
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    static int next = ncclNumOps;
    const bool immediate = residence == ncclScalarHostImmediate;
    *op = static_cast<ncclRedOp_t>(next);
    comm->scalings[next] = {type, immediate ? sim::read_scalar(type, scalar) : 0.0,
                            immediate ? nullptr : scalar};
    next++;
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    comm->scalings.erase(op);
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const auto world = static_cast<size_t>(comm->world);
    auto *const shards = static_cast<char *>(receive);
    const auto compute = [=](const Inputs &inputs) {
        const bool exchanges = sim::is_due(sim::device().settings.wrong_shard);
        for (size_t r = 0; r < world; r++) {
            std::memcpy(shards + r * bytes, inputs[exchanges && r < 2 ? 1 - r : r], bytes);
        }
    };
    const auto emulate = [=] {
        for (size_t r = 0; r < world; r++) {
            std::memmove(shards + r * bytes, send, bytes);
        }
    };
    return collective({"ncclAllGather", send, bytes, receive, world * bytes, stream}, comm,
                      call_of(count, type), compute, emulate);
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const auto rank = static_cast<size_t>(comm->rank);
    const auto world = static_cast<size_t>(comm->world);
    ncclRedOp_t scaled_op;
    sim::Collective call = reduction_of(count, world * count, type, op, 0, comm, &scaled_op);
    const auto compute = [=](const Inputs &inputs) {
        const bool next = sim::is_due(sim::device().settings.wrong_slice);
        const size_t slice = (rank + (next ? 1 : 0)) % world;
        reduce_from(inputs, slice * count, count, type, scaled_op, op == ncclAvg, receive);
    };
    const auto emulate = [=] {
        std::memmove(receive, static_cast<const char *>(send) + rank * bytes, bytes);
    };
    return collective({"ncclReduceScatter", send, world * bytes, receive, bytes, stream}, comm,
                      std::move(call), compute, emulate);
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    ncclRedOp_t scaled_op;
    sim::Collective call = reduction_of(count, count, type, op, 0, comm, &scaled_op);
    const auto compute = [=](const Inputs &inputs) {
        reduce_from(inputs, 0, count, type, scaled_op, op == ncclAvg, receive);
    };
    const auto emulate = [=] { std::memmove(receive, send, bytes); };
    return collective({"ncclAllReduce", send, bytes, receive, bytes, stream}, comm, std::move(call),
                      compute, emulate);
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    ncclRedOp_t scaled_op;
    sim::Collective call = reduction_of(count, count, type, op, root, comm, &scaled_op);
    const auto compute = [=, is_root = comm->rank == root](const Inputs &inputs) {
        if (is_root) {
            reduce_from(inputs, 0, count, type, scaled_op, op == ncclAvg, receive);
        }
    };
    return collective({"ncclReduce", send, bytes, receive, bytes, stream}, comm, std::move(call),
                      compute, [] {});
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const size_t sent = comm->rank == root || comm->peers == nullptr ? bytes : 0;
    const auto compute = [=](const Inputs &inputs) {
        std::memmove(receive, inputs[static_cast<size_t>(root)], bytes);
    };
    return collective({"ncclBroadcast", send, sent, receive, bytes, stream}, comm,
                      call_of(count, type, 0, root), compute, [] {});
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

/* NCCL has this function since 2.28. */
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const size_t all = static_cast<size_t>(comm->world) * bytes;
    const auto compute = [=, rank = static_cast<size_t>(comm->rank)](const Inputs &inputs) {
        for (size_t r = 0; r < inputs.size(); r++) {
            std::memcpy(static_cast<char *>(receive) + r * bytes,
                        static_cast<const char *>(inputs[r]) + rank * bytes, bytes);
        }
    };
    return collective({"ncclAlltoAll", send, all, receive, all, stream}, comm, call_of(count, type),
                      compute, [] {});
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return message({"ncclSend", data, bytes, nullptr, 0, stream}, comm,
                   [=, peers = comm->peers] { return peers->send(peer, data, bytes); });
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return message({"ncclRecv", nullptr, 0, data, bytes, stream}, comm,
                   [=, peers = comm->peers] { return peers->receive(peer, data, bytes); });
}
}
