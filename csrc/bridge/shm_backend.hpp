/* The c10d backend over shared memory: see shm_backend.cpp. */
#ifndef FSDP_C_BRIDGE_SHM_BACKEND_HPP
#define FSDP_C_BRIDGE_SHM_BACKEND_HPP

#include "shm_methods.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace fct {

/* Registers a ShmBackend with the group, under a backend type that the group does not use. The
 * group calls only the backend's setTimeout(), which has no effect, and its shutdown() and abort(),
 * which close the negotiation. Returns false if the CPU backend is not gloo. Needs the GIL. */
bool add_shm_backend(c10d::ProcessGroup &group, const fct_shm_methods &methods,
                     shm_negotiation *negotiation);

/* A new group with the name and ranks of `group` and the group's ShmBackend for the CPU. Throws if
 * the group has no ShmBackend. */
c10::intrusive_ptr<c10d::ProcessGroup>
make_shm_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* Sets whether this thread's all-reduces reduce buffers of gradients. The value is equal on all
 * ranks. ShmBackend forwards all other all-reduces to the fallback. Returns the previous value. */
bool set_gradient_all_reduce(bool gradients);

/* See fct_pg_gather_chunks and fct_pg_reduce_chunks. `shm_group` is a result of make_shm_group().
 */
c10::intrusive_ptr<c10d::Work> gather_chunks(c10d::ProcessGroup &shm_group,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout);
c10::intrusive_ptr<c10d::Work> reduce_chunks(c10d::ProcessGroup &shm_group,
                                             const at::Tensor &output,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout, bool average);

/* See fct_work_is_cpu_bound. */
bool is_cpu_bound(const c10d::Work &work);
/* See fct_work_rank_checksum. */
bool rank_checksum(const c10d::Work &work, size_t run, int64_t rank, uint64_t *checksum);

/* A scope in which the CPU backend of `group` itself is the ShmBackend of `shm_group`. Used where
 * dispatch modes or Python functions receive the group. Construction and destruction need the GIL.
 */
class ScopedShmBackend {
  public:
    ScopedShmBackend(c10::intrusive_ptr<c10d::ProcessGroup> group,
                     const c10::intrusive_ptr<c10d::ProcessGroup> &shm_group);
    ScopedShmBackend(const ScopedShmBackend &) = delete;
    ScopedShmBackend &operator=(const ScopedShmBackend &) = delete;
    ~ScopedShmBackend();

  private:
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

} // namespace fct

#endif
