/* Process groups that use shared memory: see direct.cpp. */
#ifndef FSDP_C_BRIDGE_DIRECT_HPP
#define FSDP_C_BRIDGE_DIRECT_HPP

#include "collective.h"
#include "negotiation.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <vector>

namespace fct {

/* Registers a DirectBackend with the group under an unused type. The group calls only its
 * shutdown() and abort(), which close the transport. Returns false if the CPU backend is not gloo.
 * Needs the GIL. */
bool attach_backend(c10d::ProcessGroup &group, const std::shared_ptr<Negotiation> &negotiation);

/* A new group with the name and ranks of `group` and a DirectBackend for the CPU. */
c10::intrusive_ptr<c10d::ProcessGroup>
make_direct_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                  std::shared_ptr<Negotiation> negotiation);

/* Sets whether this thread's all-reduces reduce buffers of gradients, on all ranks. DirectBackend
 * forwards all other all-reduces to the fallback. Returns the previous value. */
bool set_gradient_all_reduce(bool rows);

/* See fct_gather_chunks and fct_reduce_chunks. `direct` was made by make_direct_group(). */
c10::intrusive_ptr<c10d::Work> gather_chunks(c10d::ProcessGroup &direct,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout);
c10::intrusive_ptr<c10d::Work> reduce_chunks(c10d::ProcessGroup &direct, const at::Tensor &output,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout, bool average);

/* See fct_work_is_cpu_bound. */
bool is_cpu_bound(const c10d::Work &work);

/* During its life the CPU backend of `group` itself is the DirectBackend of `direct`. Used where
 * dispatch modes or Python functions receive the group. Construct and destroy it with the GIL. */
class ScopedDirectBackend {
  public:
    ScopedDirectBackend(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        const c10::intrusive_ptr<c10d::ProcessGroup> &direct);
    ScopedDirectBackend(const ScopedDirectBackend &) = delete;
    ScopedDirectBackend &operator=(const ScopedDirectBackend &) = delete;
    ~ScopedDirectBackend();

  private:
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

} // namespace fct

#endif
