/* The bytes that an operation accesses, and its place in the vector clocks. */
#include "launch.h"

#include "early_writes.h"
#include "journal.h"
#include "memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

namespace sim {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr int64_t kMostRuns = 512;

/* The contiguous runs of a tensor's elements. More than `most` become one run around all. */
struct Runs {
    std::vector<int64_t> sizes, strides; /* of the dims outside a run, in elements */
    int64_t run = 1;                     /* elements */
    int64_t count = 1;

    explicit Runs(const at::Tensor &tensor, int64_t most) {
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
        if (count > most) {
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

/* Appends the exact ranges of a tensor's elements. */
void add_runs(const at::Tensor &tensor, std::vector<std::pair<uintptr_t, uintptr_t>> &ranges) {
    const Runs runs(tensor, INT64_MAX);
    const auto size = static_cast<int64_t>(tensor.dtype().itemsize());
    const auto *const data = static_cast<const char *>(tensor.const_data_ptr());
    for (int64_t i = 0; i < runs.count; i++) {
        const auto start = reinterpret_cast<uintptr_t>(data + runs.start(i) * size);
        ranges.emplace_back(start, start + static_cast<uintptr_t>(runs.run * size));
    }
}

} // namespace

Launch::Launch(const char *name, c10::Stream stream) : stream_(stream) {
    const Lock lock(world().mutex);
    epoch_ = world().begin(stream, name);
    journal().count(name);
}

/* Records an access, and changes the memory that it reads if writes are delayed or replayed. */
void Launch::record(uintptr_t from, uintptr_t to, bool write) {
    if (!write) {
        early_writes().replay(from, to, epoch_, replaced_);
        if (world().late_seed != 0) {
            memory().hide_unordered_writes(from, to, epoch_, replaced_);
        }
    }
    memory().access(from, to, write, epoch_);
}

void Launch::access(const void *from, size_t bytes, bool write) {
    const Lock lock(world().mutex);
    const auto start = reinterpret_cast<uintptr_t>(from);
    if (write) {
        written_.emplace_back(start, start + bytes);
    }
    record(start, start + bytes, write);
}

/* Restores the bytes that the operation has not written. `written_` is complete and sorted. */
void Launch::restore(const Bytes &bytes) const {
    const uintptr_t end = bytes.start + bytes.data.size();
    uintptr_t at = bytes.start;
    const auto restore_until = [&](uintptr_t to) {
        if (at < to) {
            std::memcpy(reinterpret_cast<char *>(at), bytes.data.data() + (at - bytes.start),
                        to - at);
        }
    };
    for (const auto &[from, to] : written_) {
        restore_until(std::min(from, end));
        at = std::max(at, to);
    }
    restore_until(end);
}

Launch::~Launch() {
    const Lock lock(world().mutex);
    if (!replaced_.empty()) {
        for (const at::Tensor &tensor : written_tensors_) {
            add_runs(tensor, written_);
        }
        std::sort(written_.begin(), written_.end());
    }
    /* If bytes were replaced twice, the first entry has the right ones. */
    for (auto entry = replaced_.rbegin(); entry != replaced_.rend(); ++entry) {
        restore(*entry);
    }
    early_writes().complete(epoch_);
}

void Launch::access_tensor(const at::Tensor &tensor, bool write) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
        return;
    }
    if (write) {
        /* A copy of a tensor may take the GIL, so the thread must not hold the mutex. */
        written_tensors_.push_back(tensor);
    }
    const Lock lock(world().mutex);
    const auto size = static_cast<int64_t>(tensor.dtype().itemsize());
    const auto *const data = static_cast<const char *>(tensor.const_data_ptr());
    memory().label_block(tensor.storage().unsafeGetStorageImpl(), data);
    const Runs runs(tensor, kMostRuns);
    for (int64_t i = 0; i < runs.count; i++) {
        const auto start = reinterpret_cast<uintptr_t>(data + runs.start(i) * size);
        record(start, start + static_cast<uintptr_t>(runs.run * size), write);
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
