/* Executes fsdp_c's kernels on the host. */
#ifndef CUDA_SIM_KERNELS_ON_HOST_H
#define CUDA_SIM_KERNELS_ON_HOST_H

namespace fck {
struct line_batch;
struct checksum_batch;
} // namespace fck

namespace sim {

/* Runs fck_cast_lines or fck_move_lines, block by block and thread by thread. */
void run_lines(const fck::line_batch &batch, bool casts);
/* Runs fck_add_checksums in the same way. */
void run_checksums(const fck::checksum_batch &batch);

} // namespace sim

#endif
