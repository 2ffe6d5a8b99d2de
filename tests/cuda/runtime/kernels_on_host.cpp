#include "kernels_on_host.h"

/* Declares what the kernels use of CUDA, instead of CUDA's headers. */
#include "../../c/fake_cuda/cuda_runtime.h"
#include "kernels/checksums.cuh"
#include "kernels/lines.cuh"

namespace sim {

namespace {

template <class Batch> void run(void (*kernel)(Batch), const Batch &batch, uint32_t blocks) {
    void *arguments[] = {const_cast<Batch *>(&batch)};
    cudaLaunchKernel(kernel, dim3(blocks), dim3(fck::THREADS), arguments, 0, nullptr);
}

} // namespace

void run_lines(const fck::line_batch &batch, bool casts) {
    run(casts ? fck_cast_lines : fck_move_lines, batch, batch.tiles);
}

void run_lines(const fck::large_line_batch &batch, bool casts) {
    run(casts ? fck_cast_many_lines : fck_move_many_lines, batch, batch.tiles);
}

void run_checksums(const fck::checksum_batch &batch) {
    run(fck_add_checksums, batch, batch.blocks);
}

} // namespace sim
