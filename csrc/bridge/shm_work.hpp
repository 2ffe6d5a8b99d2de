/* A c10d work over a collective of csrc/transport. */
#ifndef FSDP_C_BRIDGE_SHM_WORK_HPP
#define FSDP_C_BRIDGE_SHM_WORK_HPP

#include "shm_methods.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

namespace fct {

using ShmTransportPtr = std::shared_ptr<shm_transport>;

/* The memory of all rank shards on this rank. */
struct RankShards {
    /* Takes one tensor [ranks, elements] whose last dimension is contiguous. */
    static RankShards of_tensor(const at::Tensor &tensor);
    /* Takes chunks [ranks, elements]; see fct_chunk_layout in collective.h. Throws if the runs do
     * not cover the chunks in order. */
    static RankShards of_chunks(const std::vector<at::Tensor> &chunks,
                                const fct_chunk_layout &layout);

    std::vector<shm_segment> segments;
    at::ScalarType type = at::ScalarType::Undefined;
    size_t bytes = 0;       /* of one rank shard */
    bool checksums = false; /* of each segment of each rank */
};

/* One collective and the tensors that it uses. After start(), works progress only inside wait() and
 * isCompleted(). If the messages of a work do not fit into the ring at issue, peers wait for this
 * progress. The operation type of such a work is UNKNOWN, like that of gloo's reduce-scatter, so
 * that a progress thread waits for it. */
class ShmWork : public c10d::Work {
  public:
    /* `tensors` stay alive until completion. For a reduce-scatter and an all-reduce the first
     * tensor is the output. If `average` is true, completion divides the output by the number of
     * ranks. */
    ShmWork(const fct_shm_methods &methods, fct_op_kind kind, std::vector<at::Tensor> tensors,
            bool average = false);
    ShmWork(const ShmWork &) = delete;
    ShmWork &operator=(const ShmWork &) = delete;
    ~ShmWork() override;

    /* Makes completion release the tensors, on any thread. By default the destructor releases them.
     * Requires tensors without Python objects. A failed collective keeps its tensors. */
    void release_on_completion();

    /* Submits the collective. Fills the fields of the request that the tensors determine. The
     * caller sets rank, world, timeout_ms and, unless the collective is an all-reduce, the rank
     * shards. */
    void start(ShmTransportPtr transport, shm_request request, const RankShards &shards);

    /* Called by the progress thread, or by waits of the caller's thread. May be called again:
     * returns or throws the same outcome. */
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override;
    bool is_cpu_bound() const;
    /* See fct_work_rank_checksum. */
    bool rank_checksum(size_t segment, int64_t rank, uint64_t *checksum) const;

  private:
    static void complete(void *self, const char *error);
    static void release(void *self);
    /* Divides the output of an average, then calls finish(). `error` is NULL without a failure. */
    void finish_collective(const char *error);

    const fct_shm_methods &methods_;
    const fct_op_kind kind_;
    std::vector<at::Tensor> tensors_;
    const bool average_;
    int64_t world_ = 0;
    bool release_on_completion_ = false;
    ShmTransportPtr transport_;            /* set by start() */
    shm_collective *collective_ = nullptr; /* set by start() */
};

} // namespace fct

#endif
