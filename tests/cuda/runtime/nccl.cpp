/* Substitute of libnccl: this process is one rank, the other ranks are emulated. Collectives
 * declare their accesses. An all-gather copies this rank's part to the parts of all ranks. */
#include <nccl.h>

#include <cstring>
#include <string>

#include "sim.h"

struct ncclComm {
    int world;
    int rank;
};

namespace {

size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    default:
        return 8;
    }
}

/* Starts a collective that reads `sent` bytes and writes `received` bytes. */
ncclResult_t collective(const char *name, const void *send, size_t sent, void *receive,
                        size_t received, cudaStream_t stream) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    sim::Operation by;
    sim::count(name);
    sim::count("collective");
    if (sim::is_due(sim::device().settings.fail_nccl)) {
        return static_cast<ncclResult_t>(sim::device().settings.nccl_error);
    }
    if (sim::begin(sim::stream_of(stream), name, &by) != 0) {
        return ncclUnhandledCudaError;
    }
    sim::access(by, send, sent, false);
    sim::access(by, receive, received, true);
    if (sim::is_due(sim::device().settings.hang_nccl)) {
        sim::hang(by);
    }
    return ncclSuccess;
}

ncclResult_t new_comm(ncclComm_t *comm, int world, int rank) {
    sim::count("communicator");
    *comm = new ncclComm{world, rank};
    return ncclSuccess;
}

bool copies(cudaStream_t stream) {
    return sim::device().settings.copies != 0 && sim::stream_of(stream).capture == nullptr;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    *id = {};
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclSuccess ? "no error" : "error of the simulated NCCL";
}

const char *ncclGetLastError(ncclComm_t) {
    return "";
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId, int rank,
                                    ncclConfig_t *) {
    return new_comm(comm, world, rank);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId, int rank) {
    return new_comm(comm, world, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int world, int rank, int, ncclUniqueId *,
                                      ncclConfig_t *) {
    return new_comm(comm, world, rank);
}

/* The emulated ranks pass no color, so the test announces the size of each part. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int, int key, ncclComm_t *part, ncclConfig_t *) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    auto &sizes = sim::device().split_sizes;
    int world = comm->world;
    if (!sizes.empty()) {
        world = sizes.front();
        sizes.pop_front();
    }
    return new_comm(part, world, key);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->world;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    *error = static_cast<ncclResult_t>(sim::device().settings.nccl_async);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t) {
    const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
    sim::count("communicator abort");
    sim::end_hang();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t) {
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void *data, size_t, void **handle) {
    *handle = data;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void *) {
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
    *address = sim::allocate(bytes, sim::Kind::kDevice);
    return *address != nullptr ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclMemFree(void *address) {
    return sim::release(address) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclGroupStart() {
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *, ncclDataType_t,
                                      ncclScalarResidence_t, ncclComm_t) {
    *op = static_cast<ncclRedOp_t>(ncclNumOps);
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const auto world = static_cast<size_t>(comm->world);
    const ncclResult_t result =
        collective("ncclAllGather", send, bytes, receive, world * bytes, stream);
    for (size_t r = 0; result == ncclSuccess && copies(stream) && r < world; r++) {
        std::memmove(static_cast<char *>(receive) + r * bytes, send, bytes);
    }
    return result;
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const auto rank = static_cast<size_t>(comm->rank);
    const ncclResult_t result =
        collective("ncclReduceScatter", send, static_cast<size_t>(comm->world) * bytes, receive,
                   bytes, stream);
    if (result == ncclSuccess && copies(stream)) {
        std::memmove(receive, static_cast<const char *>(send) + rank * bytes, bytes);
    }
    return result;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    const ncclResult_t result = collective("ncclAllReduce", send, bytes, receive, bytes, stream);
    if (result == ncclSuccess && copies(stream)) {
        std::memmove(receive, send, bytes);
    }
    return result;
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int,
                           ncclComm_t, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return collective("ncclBroadcast", send, bytes, receive, bytes, stream);
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t, int, ncclComm_t, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return collective("ncclReduce", send, bytes, receive, bytes, stream);
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int, ncclComm_t,
                      cudaStream_t stream) {
    return collective("ncclSend", data, count * size_of(type), nullptr, 0, stream);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int, ncclComm_t,
                      cudaStream_t stream) {
    return collective("ncclRecv", nullptr, 0, data, count * size_of(type), stream);
}
}
