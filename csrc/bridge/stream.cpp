/* Streams and events of any device, through torch's device-generic guard interface. No accelerator
 * header is included, so the same code serves CUDA, XPU and out-of-tree devices.
 *
 * A stream is a value (id and device). torch owns the streams and never frees them. An event counts
 * its owners, and may be recorded repeatedly. */
#include "stream.h"

#include "gil.hpp"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using fct::guarded;

static_assert(FCT_DEVICE_CPU == static_cast<int>(c10::DeviceType::CPU));
static_assert(FCT_DEVICE_CUDA == static_cast<int>(c10::DeviceType::CUDA));
static_assert(FCT_DEVICE_META == static_cast<int>(c10::DeviceType::Meta));
static_assert(FCT_DEVICE_MTIA == static_cast<int>(c10::DeviceType::MTIA));

struct fct_event {
    explicit fct_event(c10::DeviceType type) : event(type, c10::EventFlag::PYTORCH_DEFAULT) {}
    c10::Event event;
    size_t owners = 1;
};

namespace {

c10::Stream unpack(fct_stream s) {
    return c10::Stream(c10::Stream::UNSAFE, fct::device(s.device), s.id);
}

fct_stream pack(c10::Stream s) {
    return fct_stream{s.id(), fct::device(s.device())};
}

c10::impl::VirtualGuardImpl guard_of(fct_device d) {
    return c10::impl::VirtualGuardImpl(static_cast<c10::DeviceType>(d.type));
}

/* A device with an index; an index of -1 means the current device of that type. */
c10::Device with_index(const c10::impl::VirtualGuardImpl &guard, fct_device d) {
    return d.index < 0 ? guard.getDevice() : fct::device(d);
}

} // namespace

extern "C" {

bool fct_device_has_streams(fct_device device) {
    return device.type != FCT_DEVICE_CPU && device.type != FCT_DEVICE_META;
}

fct_stream fct_stream_current(fct_device device) {
    try {
        const auto guard = guard_of(device);
        return pack(guard.getStream(with_index(guard, device)));
    } catch (...) { /* torch was built without this device */
        return fct_stream{0, device};
    }
}

int fct_stream_new(fct_device device, bool high_priority, fct_stream *out) {
    return guarded("fct_stream_new", [&] {
        const auto guard = guard_of(device);
        const c10::Device torch_device = with_index(guard, device);
        try {
            *out = pack(guard.getNewStream(torch_device, high_priority ? -1 : 0));
        } catch (const c10::Error &) { /* some devices have only the pool */
            *out = pack(guard.getStreamFromGlobalPool(torch_device, high_priority));
        }
    });
}

fct_stream fct_stream_set_current(fct_stream s) {
    try {
        return pack(guard_of(s.device).exchangeStream(unpack(s)));
    } catch (...) {
        return s;
    }
}

int fct_launch_enter(fct_device device, fct_device *before, void **native) {
    return guarded("fct_launch_enter", [&] {
        const auto guard = guard_of(device);
        const c10::Device torch_device = with_index(guard, device);
        void *handle = guard.getStreamNativeHandle(guard.getStream(torch_device));
        *before = fct::device(guard.exchangeDevice(torch_device));
        *native = handle;
        fct::begin_device_call();
    });
}

void fct_launch_leave(fct_device before) {
    fct::end_device_call();
    try {
        guard_of(before).setDevice(fct::device(before));
    } catch (...) { /* `before` was current, so this does not fail in practice */
        const fct::HeldGil held;
        PyErr_Clear();
    }
}

int fct_event_new(fct_device device, fct_event **out) {
    return guarded("fct_event_new",
                   [&] { *out = new fct_event(static_cast<c10::DeviceType>(device.type)); });
}

int fct_event_record(fct_event *e, fct_stream s) {
    return guarded("fct_event_record", [&] { e->event.record(unpack(s)); });
}

int fct_event_wait(fct_event *e, fct_stream s) {
    return guarded("fct_event_wait", [&] { e->event.block(unpack(s)); });
}

int fct_event_synchronize(fct_event *e) {
    return guarded("fct_event_synchronize", [&] {
        const fct::ReleasedGil released;
        e->event.synchronize();
    });
}

int fct_event_is_done(fct_event *e, bool *done) {
    return guarded("fct_event_is_done", [&] { *done = e->event.query(); });
}

void fct_event_share(fct_event *e) {
    e->owners++;
}

bool fct_event_unshare(fct_event *e) {
    if (e->owners == 1) {
        return false;
    }
    e->owners--;
    return true;
}

void fct_event_free(fct_event *e) {
    delete e;
}

} // extern "C"
