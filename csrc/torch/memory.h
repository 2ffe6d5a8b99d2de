/* Tensors on the CPU whose memory is the pool's: see memory.cpp. */
#ifndef FSDP_C_TORCH_MEMORY_H
#define FSDP_C_TORCH_MEMORY_H

#include <ATen/ATen.h>

namespace fct {

/* A 1-D tensor of uninitialised elements. Its storage may be resized, and gets what it needs then
 * from the pool, too. */
at::Tensor pooled_empty(int64_t numel, c10::ScalarType dtype);

} // namespace fct

#endif
