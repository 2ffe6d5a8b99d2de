/* The pool of csrc/kernels (kernels/pool.h) as a c10 allocator.
 *
 * Small blocks come from torch's default allocator. If the system has no memory for a block, the
 * pool frees its unused blocks and the default allocator serves the request. Under dispatch modes,
 * which may observe allocations, torch.empty makes the tensor. The pool reports its blocks to the
 * memory profiler, like the default allocator. */
#include "memory.hpp"

#include "../kernels/pool.h"
#include "bridge.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>

namespace {

void report_to_profiler(const fck_block &block, int64_t bytes) {
    if (c10::memoryProfilingEnabled()) {
        const fck_pool_facts facts = fck_pool_stats();
        c10::reportMemoryUsageToProfiler(block.data, bytes, facts.used_bytes,
                                         facts.used_bytes + facts.cached_bytes,
                                         c10::Device(c10::DeviceType::CPU));
    }
}

void return_to_pool(void *context) {
    auto *block = static_cast<fck_block *>(context);
    report_to_profiler(*block, -static_cast<int64_t>(block->bytes));
    fck_pool_give(block);
}

class Pool : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes < FCK_POOL_LEAST) {
            return c10::GetDefaultCPUAllocator()->allocate(bytes);
        }
        fck_block *block = fck_pool_take(bytes);
        if (block == nullptr) { /* the default allocator raises torch's error message */
            fck_pool_trim();
            return c10::GetDefaultCPUAllocator()->allocate(bytes);
        }
        report_to_profiler(*block, static_cast<int64_t>(block->bytes));
        return {block->data, block, &return_to_pool, c10::Device(c10::DeviceType::CPU)};
    }

    void copy_data(void *to, const void *from, std::size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
};

} // namespace

namespace fct {

at::Tensor pooled_empty(int64_t numel, c10::ScalarType dtype) {
    static auto *const pool = new Pool; /* storages refer to it until the process ends */
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
        return at::empty({numel}, at::TensorOptions().dtype(dtype));
    }
    return at::Tensor(at::detail::empty_generic(
        {numel}, pool, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt));
}

} // namespace fct
