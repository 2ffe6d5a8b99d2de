/* Captures, with the rules of the CUDA manual ("Prohibited and Unhandled Operations"). A capture
 * covers its origin stream and all streams that wait for its events. */
#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "sim.h"

namespace sim {

namespace {

thread_local Mode thread_mode = Mode::kGlobal;

} // namespace

Mode exchange_mode(Mode mode) {
    return std::exchange(thread_mode, mode);
}

int check_unsafe_call(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    int error = 0;
    for (const auto &capture : device().captures) {
        const bool own = capture->thread == std::this_thread::get_id();
        const bool forbids =
            thread_mode != Mode::kRelaxed && capture->mode != Mode::kRelaxed &&
            (own || (thread_mode == Mode::kGlobal && capture->mode == Mode::kGlobal));
        if (forbids) {
            capture->invalidated = true;
            count("unsafe call in capture");
            report(std::string("capture: ") + name + " is not permitted during a capture");
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

int begin_capture(Stream &stream, Mode mode) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    if (stream.index == 0) {
        return cudaErrorStreamCaptureUnsupported;
    }
    if (stream.capture != nullptr) {
        return cudaErrorIllegalState;
    }
    auto capture = std::make_shared<Capture>();
    capture->id = ++device().capture_serial;
    capture->origin = stream.index;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->graph = std::make_unique<Graph>();
    stream.capture = capture;
    device().captures.push_back(std::move(capture));
    return 0;
}

int end_capture(Stream &stream, Graph **graph) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    const std::shared_ptr<Capture> capture = stream.capture;
    *graph = nullptr;
    if (capture == nullptr) {
        return cudaErrorIllegalState;
    }
    if (capture->origin != stream.index) {
        capture->invalidated = true;
        return cudaErrorStreamCaptureUnmatched;
    }
    if (capture->mode != Mode::kRelaxed && capture->thread != std::this_thread::get_id()) {
        return cudaErrorStreamCaptureWrongThread;
    }
    int error = capture->invalidated ? cudaErrorStreamCaptureInvalidated : 0;
    for (const auto &[index, operation] : capture->last) {
        if (error == 0 && !stream.clock.covers(index, operation.tick)) {
            report("capture: " + describe(operation) + " was not joined to the origin");
            error = cudaErrorStreamCaptureUnjoined;
        }
    }
    for (const auto &other : device().streams) {
        if (other->capture == capture) {
            other->capture = nullptr;
        }
    }
    auto &captures = device().captures;
    captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
    std::unique_ptr<Graph> captured = std::move(capture->graph);
    if (error == 0) {
        *graph = captured.release();
    }
    return error;
}

int launch_graph(const Graph &graph, Stream &stream) {
    Operation replay;
    if (const int error = begin(stream, "graph", &replay)) {
        return error;
    }
    count("graph launch");
    for (const Access &accessed : graph.accesses) {
        access(replay, reinterpret_cast<const void *>(accessed.from), accessed.to - accessed.from,
               accessed.write);
    }
    if (executes()) {
        submit(replay, [works = graph.works, next = size_t{0}]() mutable {
            while (next < works.size()) {
                if (!(*works[next])()) {
                    return false;
                }
                next++;
            }
            next = 0;
            return true;
        });
    }
    return 0;
}

} // namespace sim
