/* CPU tensors whose memory comes from the pool of csrc/kernels; see memory.cpp. */
#ifndef FSDP_C_BRIDGE_MEMORY_HPP
#define FSDP_C_BRIDGE_MEMORY_HPP

#include <ATen/ATen.h>

namespace fct {

/* Returns a 1-D tensor of uninitialized elements. If its storage is resized, the new memory also
 * comes from the pool. */
at::Tensor pooled_empty(int64_t numel, c10::ScalarType dtype);

} // namespace fct

#endif
