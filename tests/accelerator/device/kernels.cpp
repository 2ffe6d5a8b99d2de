/* fsdp_c's kernels for the simulated device. They run the CPU kernels, because the memory of the
 * device is host memory. All addresses in their arguments are recorded as accesses of the stream.
 */
#include "../../../csrc/kernels/kernels.h"
#include "journal.h"
#include "launch.h"

#include <torch/csrc/utils/pybind.h>

namespace sim {

namespace {

const fck_backend *cpu = nullptr;

int64_t size_of(fck_dtype type, int32_t otherwise) {
    switch (type) {
    case FCK_UINT8:
        return 1;
    case FCK_FLOAT16:
    case FCK_BFLOAT16:
        return 2;
    case FCK_FLOAT32:
        return 4;
    case FCK_FLOAT64:
        return 8;
    default:
        return otherwise;
    }
}

void count_jobs(const char *name, size_t count) {
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    journal().counts[name] += count;
}

const char *pack(const fck_segment *segments, size_t count, void *stream) {
    Launch launch("fsdp_c::pack", stream_of(stream));
    count_jobs("jobs", count);
    for (size_t i = 0; i < count; i++) {
        const fck_segment &s = segments[i];
        const int64_t target = s.src_dtype == s.dst_dtype ? s.itemsize : size_of(s.dst_dtype, 0);
        launch.access(s.src, static_cast<size_t>(s.count * s.itemsize), false);
        launch.access(s.dst, static_cast<size_t>(s.count * target), true);
    }
    return cpu->pack(segments, count, nullptr);
}

const char *unpack(const void *gathered, int64_t rank_bytes, int64_t world_size,
                   const fck_slot *slots, size_t count, void *stream) {
    Launch launch("fsdp_c::unpack", stream_of(stream));
    count_jobs("jobs", count);
    for (size_t i = 0; i < count; i++) {
        const fck_slot &slot = slots[i];
        const auto bytes = static_cast<size_t>(slot.bytes * slot.blocks);
        for (int64_t r = 0; r < world_size; r++) {
            launch.access(static_cast<const char *>(gathered) + r * rank_bytes + slot.offset, bytes,
                          false);
        }
        launch.access(slot.dst, bytes * static_cast<size_t>(world_size), true);
    }
    return cpu->unpack(gathered, rank_bytes, world_size, slots, count, nullptr);
}

const char *pack_gradients(const fck_gradient *gradients, size_t count, int64_t world_size,
                           void *dst, int64_t rank_numel, fck_dtype dst_dtype, void *stream) {
    Launch launch("fsdp_c::pack_gradients", stream_of(stream));
    count_jobs("jobs", count);
    for (size_t i = 0; i < count; i++) {
        const fck_gradient &g = gradients[i];
        const int64_t size = g.src_dtype == dst_dtype ? g.itemsize : size_of(dst_dtype, 0);
        launch.access(g.src, static_cast<size_t>(g.blocks * g.numel * g.itemsize), false);
        for (int64_t r = 0; r < world_size; r++) {
            launch.access(static_cast<char *>(dst) + (r * rank_numel + g.offset) * size,
                          static_cast<size_t>(g.blocks * g.chunk * size), true);
        }
    }
    return cpu->pack_gradients(gradients, count, world_size, dst, rank_numel, dst_dtype, nullptr);
}

int can_cast(fck_dtype src, fck_dtype dst) {
    return cpu->can_cast(src, dst);
}

const fck_backend table = {"simulated", pack, unpack, pack_gradients, can_cast, nullptr};

} // namespace

void define_kernels(pybind11::module &m) {
    m.def("kernels_over", [](const pybind11::capsule &host) {
        cpu = static_cast<const fck_backend *>(host.get_pointer());
        return pybind11::capsule(&table, "fck_backend");
    });
}

} // namespace sim
