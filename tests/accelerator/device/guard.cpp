/* torch's device interfaces: DeviceGuardImplInterface (devices, streams, events) and hooks. */
#include "journal.h"
#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace sim {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

Clock &clock_of(const c10::Stream &stream) {
    return world().streams[static_cast<size_t>(world().index_of(stream))].clock;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return kType;
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device old(kType, current_device());
        setDevice(device);
        return old;
    }
    c10::Device getDevice() const override {
        return {kType, current_device()};
    }
    void setDevice(c10::Device device) const override {
        if (device.has_index()) {
            set_current_device(device.index());
        }
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index()) {
            set_current_device(device.index());
        }
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return kDevices;
    }

    c10::Stream getStream(c10::Device device) const override {
        const Lock lock(world().mutex);
        const c10::Stream stream = current_stream(device.index());
        const bool at_fault = journal().log_call("current", stream, false);
        return at_fault && journal().fault == "other stream" ? new_stream(device.index()) : stream;
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return new_stream(device.index());
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return new_stream(device.index());
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream old = current_stream(stream.device_index());
        set_current_stream(stream);
        return old;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override {
        return handle_of(stream);
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        const Lock lock(world().mutex);
        if (*event == nullptr) {
            *event = new Event;
        }
        auto *const recorded_event = static_cast<Event *>(*event);
        const bool at_fault = journal().log_call("record", stream);
        const std::string &fault = journal().fault;
        if (at_fault && fault == "drop") {
            return;
        }
        recorded_event->recorded = true;
        recorded_event->clock = at_fault && fault == "wrong stream"
                                    ? clock_of(c10::Stream(c10::Stream::DEFAULT, stream.device()))
                                    : clock_of(stream);
    }
    void block(void *event, const c10::Stream &stream) const override {
        const Lock lock(world().mutex);
        const auto *const recorded_event = static_cast<const Event *>(event);
        const bool at_fault = journal().log_call("wait", stream);
        if (recorded_event != nullptr && recorded_event->recorded &&
            !(at_fault && journal().fault == "drop")) {
            clock_of(stream).join(recorded_event->clock);
        }
    }
    bool queryEvent(void *) const override {
        return true;
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event *>(event);
    }
    void synchronizeEvent(void *event) const override {
        const Lock lock(world().mutex);
        const auto *const recorded_event = static_cast<const Event *>(event);
        if (journal().log_call("synchronize", current_stream(-1)) && journal().fault == "drop") {
            return;
        }
        if (recorded_event != nullptr && recorded_event->recorded) {
            world().host_waits(current_device(), recorded_event->clock);
        }
    }

    bool queryStream(const c10::Stream &) const override {
        return true;
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        const Lock lock(world().mutex);
        journal().count("synchronize");
        world().host_waits(stream.device_index(), clock_of(stream));
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        const Lock lock(world().mutex);
        journal().count("synchronize");
        world().host_waits_for_all(device < 0 ? current_device() : device);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        const Lock lock(world().mutex);
        memory().record_stream(data.get(), stream);
    }
    double elapsedTime(void *, void *, const c10::DeviceIndex) const override {
        return 0.0;
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override {
        return true;
    }
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return true;
    }
    c10::DeviceIndex deviceCount() const override {
        return kDevices;
    }
    c10::DeviceIndex getCurrentDevice() const override {
        return current_device();
    }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        set_current_device(device);
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        const c10::DeviceIndex old = current_device();
        if (device >= 0) {
            set_current_device(device);
        }
        return old;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return exchangeDevice(device);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override {
        return pinned_allocator();
    }
    bool isPinnedPtr(const void *data) const override {
        const Lock lock(world().mutex);
        const Block *const block = memory().block_at(data);
        return block != nullptr && block->device == Block::kHost;
    }
    c10::Device getDeviceFromPtr(void *data) const override {
        const Lock lock(world().mutex);
        const Block *const block = memory().block_at(data);
        TORCH_CHECK(block != nullptr, "not memory of a simulated device");
        return {kType, static_cast<c10::DeviceIndex>(block->device)};
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        c10::StorageImpl *const impl = storage.unsafeGetStorageImpl();
        const c10::DeviceGuard guard(impl->device());
        c10::DataPtr data = device_allocator()->allocate(bytes);
        if (impl->data() != nullptr && bytes != 0) {
            std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
        }
        impl->set_data_ptr_noswap(std::move(data));
        impl->set_nbytes(bytes);
    }
};

} // namespace

void register_hooks() {
    static Hooks *const hooks = new Hooks;
    at::RegisterPrivateUse1HooksInterface(hooks);
}

} // namespace sim
