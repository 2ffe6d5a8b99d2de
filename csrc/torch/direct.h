/* Process groups that move rows through shared memory: see direct.cpp. */
#ifndef FSDP_C_TORCH_DIRECT_H
#define FSDP_C_TORCH_DIRECT_H

#include "negotiation.h"
#include "torch_abi.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <vector>

namespace fct {

/* Gives the group a direct backend beside those that it calls: one that learns of its end, and
 * closes the transport then. False: its backend for the CPU is no plain one. With the GIL. */
bool attach_backend(c10d::ProcessGroup &group, const std::shared_ptr<Negotiation> &negotiation);

/* A group of the same name and ranks that moves rows on the CPU through shared memory. */
c10::intrusive_ptr<c10d::ProcessGroup>
make_direct_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                  std::shared_ptr<Negotiation> negotiation);

/* Whether this thread's all-reduces are of rows of gradients, on all ranks: only those are direct.
 * Others, of a group that a direct backend stands in, are the fallback's. Returns what was before. */
bool all_reduces_rows(bool rows);

/* See torch_abi.h, of the same names; `direct` is a group that direct() made. */
c10::intrusive_ptr<c10d::Work> gather_chunks(c10d::ProcessGroup &direct,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout);
c10::intrusive_ptr<c10d::Work> reduce_chunks(c10d::ProcessGroup &direct, const at::Tensor &output,
                                             const std::vector<at::Tensor> &chunks,
                                             const fct_chunk_layout &layout, bool average);

/* See fct_work_is_copied in torch_abi.h. */
bool is_cpu_bound(const c10d::Work &work);

/* While one lives, the CPU's backend of `group` itself is the direct one of `direct`: for whoever
 * looks at the group that a collective is called with. Made and ended with the GIL. */
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
