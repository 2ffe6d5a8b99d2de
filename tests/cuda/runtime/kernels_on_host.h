/* Executes fsdp_c's kernels on the host. */
#ifndef CUDA_SIM_KERNELS_ON_HOST_H
#define CUDA_SIM_KERNELS_ON_HOST_H

#include "kernels/batch.cuh"

namespace sim {

/* Run the kernel that copies lines, or the one that casts them, thread after thread. */
void run_lines(const fck::line_batch &batch, bool casts);
void run_lines(const fck::large_line_batch &batch, bool casts);
/* Runs fck_add_checksums in the same way. */
void run_checksums(const fck::checksum_batch &batch);

} // namespace sim

#endif
