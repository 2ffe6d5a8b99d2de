#include "kernels_on_host.h"

/* Replaces the headers of CUDA, which this file must not include. */
#include "../../c/fake_cuda/cuda_runtime.h"
#include "kernels/checksums.cuh"
#include "kernels/lines.cuh"

namespace sim {

void run_lines(const fck::line_batch &batch, bool casts) {
    void *arguments[] = {const_cast<fck::line_batch *>(&batch)};
    const auto kernel = casts ? fck_cast_lines : fck_move_lines;
    cudaLaunchKernel(kernel, dim3(batch.tiles), dim3(fck::THREADS), arguments, 0, nullptr);
}

void run_checksums(const fck::checksum_batch &batch) {
    void *arguments[] = {const_cast<fck::checksum_batch *>(&batch)};
    cudaLaunchKernel(fck_add_checksums, dim3(batch.blocks), dim3(fck::THREADS), arguments, 0,
                     nullptr);
}

} // namespace sim
