/* Which bytes an operation touches, and when. */
#include "launch.h"

#include "foresight.h"
#include "journal.h"
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace sim {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr int64_t kMostRuns = 512;

/* The runs of contiguous bytes that a tensor consists of; where they are many, one around all. */
struct Runs {
    std::vector<int64_t> sizes, strides; /* of the dims above a run, in elements */
    int64_t run = 1;                     /* elements */
    int64_t count = 1;

    explicit Runs(const at::Tensor &tensor) {
        std::vector<int64_t> order(static_cast<size_t>(tensor.dim()));
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
        for (const int64_t dim : order) {
            const int64_t size = tensor.size(dim);
            const int64_t stride = tensor.stride(dim);
            if (size == 1 || stride == 0) {
                continue;
            }
            if (sizes.empty() && stride == run) {
                run *= size;
                continue;
            }
            sizes.push_back(size);
            strides.push_back(stride);
            count *= size;
        }
        if (count > kMostRuns) {
            for (size_t i = 0; i < sizes.size(); i++) {
                run += (sizes[i] - 1) * strides[i];
            }
            sizes.clear();
            count = 1;
        }
    }

    int64_t start(int64_t index) const {
        int64_t offset = 0;
        for (size_t i = 0; i < sizes.size(); i++) {
            offset += index % sizes[i] * strides[i];
            index /= sizes[i];
        }
        return offset;
    }
};

} // namespace

Launch::Launch(const char *name, c10::Stream stream) : stream_(stream) {
    const Lock lock(world().mutex);
    epoch_ = world().begin(stream, name);
    journal().count(name);
}

void Launch::uses(const void *from, size_t bytes, bool write) {
    const Lock lock(world().mutex);
    const auto start = reinterpret_cast<uintptr_t>(from);
    if (write) {
        written_.emplace_back(start, start + bytes);
    } else {
        foresight().show(start, start + bytes, epoch_, replaced_);
    }
    if (world().late_seed != 0 && !write) {
        memory().delay(start, start + bytes, epoch_, replaced_);
    }
    memory().access(start, start + bytes, write, epoch_);
}

Launch::~Launch() {
    const Lock lock(world().mutex);
    for (const Bytes &before : replaced_) {
        const uintptr_t end = before.start + before.data.size();
        const bool ours = std::any_of(written_.begin(), written_.end(), [&](const auto &range) {
            return range.first < end && before.start < range.second;
        });
        if (!ours) {
            std::memcpy(reinterpret_cast<char *>(before.start), before.data.data(),
                        before.data.size());
        }
    }
    foresight().complete(epoch_);
}

void Launch::tensor(const at::Tensor &tensor, bool write) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
        return;
    }
    const Lock lock(world().mutex);
    const auto size = static_cast<int64_t>(tensor.dtype().itemsize());
    const auto *const data = static_cast<const char *>(tensor.const_data_ptr());
    memory().named(tensor.storage().unsafeGetStorageImpl(), data);
    const Runs runs(tensor);
    for (int64_t i = 0; i < runs.count; i++) {
        uses(data + runs.start(i) * size, static_cast<size_t>(runs.run * size), write);
    }
}

void Launch::reads(const at::Tensor &one) {
    tensor(one, false);
}

void Launch::writes(const at::Tensor &one) {
    tensor(one, true);
}

Clock Launch::done() const {
    const Lock lock(world().mutex);
    return world().lanes[static_cast<size_t>(world().lane(stream_))].clock;
}

void Launch::host_waits() {
    const Lock lock(world().mutex);
    world().host_waits(stream_.device_index(), done());
}

bool on_device(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor as_host(const at::Tensor &tensor) {
    const c10::Storage &from = tensor.storage();
    c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(),
                         c10::DataPtr(const_cast<void *>(from.data()), c10::DeviceType::CPU),
                         c10::GetAllocator(c10::DeviceType::CPU), true);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    c10::TensorImpl *const impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        impl->set_wrapped_number(true);
    }
    return made;
}

} // namespace sim
