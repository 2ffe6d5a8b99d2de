/* Streams, events and the host's waits.
 *
 * Work on the legacy default stream is ordered after all blocking streams, and work on a blocking
 * stream after the legacy default stream. torch's pool has streams that do not block. */
#include <cuda_runtime_api.h>

#include <chrono>

#include "sim.h"

namespace sim {

namespace {

/* Returns the error of a device that has stopped, or 0. */
int device_error() {
    return device().settings.stopped != 0 ? cudaErrorLaunchFailure : 0;
}

bool is_hung(const Clock &clock) {
    const Operation &hung = device().hung;
    return hung.stream >= 0 && clock.covers(hung.stream, hung.tick);
}

/* Blocks while the clock covers the hung operation. The caller must not hold the device's mutex. */
void block_while_hung(const Clock &clock) {
    while (true) {
        {
            const std::lock_guard<std::recursive_mutex> lock(device().mutex);
            if (!is_hung(clock)) {
                return;
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

} // namespace

void hang(const Operation &operation) {
    count("hung collective");
    device().hung = operation;
}

void end_hang() {
    device().hung = {};
}

Stream *new_stream(int priority, bool blocking) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    auto stream = std::make_unique<Stream>();
    stream->index = static_cast<int>(device().streams.size());
    stream->priority = priority;
    stream->blocking = blocking;
    device().streams.push_back(std::move(stream));
    return device().streams.back().get();
}

Stream &stream_of(const void *handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= 1) {
        return *device().streams[0];
    }
    if (number == 2) {
        static thread_local Stream *const own = new_stream(0, true);
        return *own;
    }
    return *static_cast<Stream *>(const_cast<void *>(handle));
}

Event *new_event() {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    auto *const event = new Event;
    device().events.insert(event);
    return event;
}

Event *event_of(const void *handle) {
    auto *const event = static_cast<Event *>(const_cast<void *>(handle));
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    if (device().events.count(event) == 0) {
        report("an event is used after it was destroyed");
        return nullptr;
    }
    return event;
}

void destroy_event(Event *event) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    device().events.erase(event);
    delete event;
}

namespace {

/* Orders the stream after the streams for which it waits implicitly. If the legacy default stream
 * would wait for a stream that is being captured, invalidates the capture and returns the error. */
int order_implicitly(Stream &stream) {
    Device &state = device();
    if (stream.index == 0) {
        for (const auto &other : state.streams) {
            if (other->blocking && other->capture != nullptr) {
                other->capture->invalidated = true;
                return cudaErrorStreamCaptureImplicit;
            }
            if (other->blocking) {
                stream.clock.join(other->clock);
            }
        }
    } else if (stream.blocking && stream.capture == nullptr) {
        stream.clock.join(state.streams[0]->clock);
    }
    return 0;
}

} // namespace

int begin(Stream &stream, const char *name, Operation *out) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    Device &state = device();
    thread().bound = true;
    if (const int error = device_error()) {
        return error;
    }
    if (stream.capture != nullptr && stream.capture->invalidated) {
        return cudaErrorStreamCaptureInvalidated;
    }
    if (const int error = order_implicitly(stream)) {
        return error;
    }
    if (stream.capture == nullptr) {
        stream.clock.join(state.host);
    }
    *out = Operation{stream.index, stream.clock.advance(stream.index), name, ++state.serial};
    if (stream.capture != nullptr) {
        stream.capture->last[stream.index] = *out;
        stream.capture->graph->operations++;
    }
    return 0;
}

int launch(Stream &stream, const char *name, Operation *out) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("launch");
    if (holds_gil()) {
        count("launch with GIL");
    }
    if (is_due(device().settings.fail_device)) {
        device().settings.stopped = 1;
    }
    if (const int error = begin(stream, name, out)) {
        return error;
    }
    if (device().on_launch != nullptr) {
        device().on_launch(out);
    }
    return 0;
}

void access(const Operation &by, const void *data, size_t bytes, bool write) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    Device &state = device();
    if (state.settings.checks == 0 || by.stream < 0 || bytes == 0 || kind_of(data) == Kind::kNone) {
        return;
    }
    const auto from = reinterpret_cast<uintptr_t>(data);
    const Access accessed{from, from + bytes, write};
    const Stream &stream = *state.streams[static_cast<size_t>(by.stream)];
    if (stream.capture != nullptr) {
        stream.capture->graph->accesses.push_back(accessed);
        stream.capture->accesses.add(accessed, by, stream.clock);
    } else {
        state.accesses.add(accessed, by, stream.clock);
    }
}

void access_on_host(const void *data, size_t bytes, bool write) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    Device &state = device();
    if (state.settings.checks != 0 && bytes > 0 && kind_of(data) == Kind::kPinned) {
        /* tick 0: all later operations of streams are ordered after this access */
        const Operation by{-1, 0, "the host", ++state.serial};
        const auto from = reinterpret_cast<uintptr_t>(data);
        state.accesses.add(Access{from, from + bytes, write}, by, state.host);
    }
}

int record(Event &event, Stream &stream, bool external) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("record");
    thread().bound = true;
    if (const int error = device_error()) {
        return error;
    }
    if (stream.capture != nullptr && stream.capture->invalidated) {
        return cudaErrorStreamCaptureInvalidated;
    }
    if (const int error = order_implicitly(stream)) {
        return error;
    }
    Stream *source = &stream;
    if (log_call("record")) { /* fault: the event is recorded on another stream */
        static Stream *const other = new_stream(0, false);
        source = other;
    }
    event.clock = source->clock;
    event.clock.join(device().host);
    event.recorded = true;
    event.capture = external ? nullptr : stream.capture;
    return 0;
}

int wait(Stream &stream, const Event &event, bool external) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("wait");
    thread().bound = true;
    if (const int error = device_error()) {
        return error;
    }
    if (!event.recorded || log_call("wait")) { /* fault: the stream does not wait */
        return 0;
    }
    const bool ended = event.capture != nullptr && event.capture->graph == nullptr;
    if (stream.capture != nullptr && stream.capture->invalidated) {
        return cudaErrorStreamCaptureInvalidated;
    }
    if (external) {
        stream.clock.join(event.clock);
        return 0;
    }
    if (ended) {
        return cudaErrorCapturedEvent;
    }
    if (stream.capture != nullptr && event.capture == nullptr) {
        stream.capture->invalidated = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (stream.capture != nullptr && event.capture != stream.capture) {
        stream.capture->invalidated = event.capture->invalidated = true;
        return cudaErrorStreamCaptureMerge;
    }
    stream.capture = event.capture; /* a stream joins the capture of the event */
    stream.clock.join(event.clock);
    return 0;
}

namespace {

/* Orders the host after the work before `clock`. */
int wait_on_host(const Clock &clock) {
    Clock awaited;
    {
        const std::lock_guard<std::recursive_mutex> lock(device().mutex);
        if (device().on_wait != nullptr) {
            device().on_wait();
        }
        if (log_call("synchronize")) { /* fault: the host does not wait */
            return 0;
        }
        awaited = clock;
        device().host.join(clock);
    }
    finish(awaited);
    return device_error();
}

/* Returns an error number if the host must not wait for the stream. */
int check_wait(Stream &stream) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("synchronize");
    if (const int error = device_error()) {
        return error;
    }
    if (stream.capture != nullptr) {
        stream.capture->invalidated = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    return check_unsafe_call("cudaStreamSynchronize");
}

/* Returns an error number if the host must not wait for the event. */
int check_wait(const Event &event) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("synchronize");
    if (const int error = device_error()) {
        return error;
    }
    if (event.capture != nullptr) {
        return cudaErrorCapturedEvent;
    }
    return check_unsafe_call("cudaEventSynchronize");
}

} // namespace

int synchronize(Stream &stream) {
    block_while_hung(stream.clock);
    const int error = check_wait(stream);
    return error != 0 ? error : wait_on_host(stream.clock);
}

int synchronize(const Event &event) {
    block_while_hung(event.clock);
    const int error = check_wait(event);
    return error != 0 ? error : wait_on_host(event.clock);
}

int synchronize_all() {
    Clock submitted;
    {
        const std::lock_guard<std::recursive_mutex> lock(device().mutex);
        for (const auto &stream : device().streams) {
            submitted.join(stream->clock);
        }
    }
    block_while_hung(submitted);
    finish(submitted);
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("synchronize");
    if (const int error = device_error()) {
        return error;
    }
    for (const auto &stream : device().streams) {
        if (stream->capture != nullptr) {
            stream->capture->invalidated = true;
            return cudaErrorStreamCaptureUnsupported;
        }
    }
    device().host.join(submitted);
    return 0;
}

namespace {

/* Returns 0 if the work before `clock` counts as complete: it is executed, none of it hangs and,
 * with the setting `incomplete`, the host has waited for it. The result 0 orders the host after the
 * work. */
int query_clock(const Clock &clock) {
    Device &state = device();
    if (is_hung(clock) || !is_finished(clock) ||
        (state.settings.incomplete != 0 && !state.host.covers(clock))) {
        return cudaErrorNotReady;
    }
    state.host.join(clock);
    return 0;
}

} // namespace

int query(const Stream &stream) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("query");
    if (const int error = device_error()) {
        return error;
    }
    if (stream.capture != nullptr) {
        stream.capture->invalidated = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    if (const int error = check_unsafe_call("cudaStreamQuery")) {
        return error;
    }
    return query_clock(stream.clock);
}

int query(const Event &event) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    count("query");
    if (const int error = device_error()) {
        return error;
    }
    if (event.capture != nullptr) {
        return cudaErrorCapturedEvent;
    }
    if (const int error = check_unsafe_call("cudaEventQuery")) {
        return error;
    }
    return event.recorded ? query_clock(event.clock) : 0;
}

} // namespace sim
