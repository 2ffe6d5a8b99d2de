/* The bytes that an operation accesses, and its place in the vector clocks. */
#include "launch.h"

#include "early_writes.h"
#include "journal.h"
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace sim {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr int64_t kMostRuns = 512;

/* The contiguous runs of a tensor's elements. More than kMostRuns become one run around all. */
struct Runs {
    std::vector<int64_t> sizes, strides; /* of the dims outside a run, in elements */
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

void Launch::access(const void *from, size_t bytes, bool write) {
    const Lock lock(world().mutex);
    const auto start = reinterpret_cast<uintptr_t>(from);
    if (write) {
        written_.emplace_back(start, start + bytes);
    } else {
        early_writes().replay(start, start + bytes, epoch_, replaced_);
    }
    if (world().late_seed != 0 && !write) {
        memory().delay(start, start + bytes, epoch_, replaced_);
    }
    memory().access(start, start + bytes, write, epoch_);
}

Launch::~Launch() {
    const Lock lock(world().mutex);
    /* If bytes were replaced twice, the first entry has the right ones. */
    for (auto entry = replaced_.rbegin(); entry != replaced_.rend(); ++entry) {
        const Bytes &bytes = *entry;
        const uintptr_t end = bytes.start + bytes.data.size();
        const bool is_overwritten =
            std::any_of(written_.begin(), written_.end(), [&](const auto &range) {
                return range.first < end && bytes.start < range.second;
            });
        if (!is_overwritten) {
            std::memcpy(reinterpret_cast<char *>(bytes.start), bytes.data.data(),
                        bytes.data.size());
        }
    }
    early_writes().complete(epoch_);
}

void Launch::access_tensor(const at::Tensor &tensor, bool write) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
        return;
    }
    const Lock lock(world().mutex);
    const auto size = static_cast<int64_t>(tensor.dtype().itemsize());
    const auto *const data = static_cast<const char *>(tensor.const_data_ptr());
    memory().label_block(tensor.storage().unsafeGetStorageImpl(), data);
    const Runs runs(tensor);
    for (int64_t i = 0; i < runs.count; i++) {
        access(data + runs.start(i) * size, static_cast<size_t>(runs.run * size), write);
    }
}

void Launch::reads(const at::Tensor &tensor) {
    access_tensor(tensor, false);
}

void Launch::writes(const at::Tensor &tensor) {
    access_tensor(tensor, true);
}

Clock Launch::end_clock() const {
    const Lock lock(world().mutex);
    return world().streams[static_cast<size_t>(world().index_of(stream_))].clock;
}

void Launch::host_waits() {
    const Lock lock(world().mutex);
    world().host_waits(stream_.device_index(), end_clock());
}

bool on_device(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor as_host(const at::Tensor &tensor) {
    const c10::Storage &from = tensor.storage();
    c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(),
                         c10::DataPtr(const_cast<void *>(from.data()), c10::DeviceType::CPU),
                         c10::GetAllocator(c10::DeviceType::CPU), true);
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    c10::TensorImpl *const impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        impl->set_wrapped_number(true);
    }
    return host;
}

} // namespace sim
