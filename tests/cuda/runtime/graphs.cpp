/* The part of libcudart's substitute for captures and graphs. */
#include "cudart.h"

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    const sim::Mode previous = sim::exchange_mode(static_cast<sim::Mode>(*mode));
    *mode = static_cast<cudaStreamCaptureMode>(previous);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return done(sim::begin_capture(sim::stream_of(stream), static_cast<sim::Mode>(mode)));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    sim::Graph *captured = nullptr;
    const int error = sim::end_capture(sim::stream_of(stream), &captured);
    *graph = reinterpret_cast<cudaGraph_t>(captured);
    return done(error);
}

static cudaStreamCaptureStatus status_of(const sim::Stream &stream) {
    return stream.capture == nullptr     ? cudaStreamCaptureStatusNone
           : stream.capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = status_of(sim::stream_of(stream));
    return cudaSuccess;
}

static cudaError_t describe_capture(cudaStream_t handle, cudaStreamCaptureStatus *status,
                                    unsigned long long *id, cudaGraph_t *graph,
                                    const cudaGraphNode_t **nodes, size_t *count) {
    const sim::Stream &stream = sim::stream_of(handle);
    *status = status_of(stream);
    if (id != nullptr) {
        *id = stream.capture != nullptr ? stream.capture->id : 0;
    }
    if (graph != nullptr) {
        *graph = stream.capture != nullptr
                     ? reinterpret_cast<cudaGraph_t>(stream.capture->graph.get())
                     : nullptr;
    }
    if (nodes != nullptr) {
        *nodes = nullptr;
    }
    if (count != nullptr) {
        *count = 0;
    }
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (edges != nullptr) {
        *edges = nullptr;
    }
    return describe_capture(stream, status, id, graph, nodes, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *,
                                                const cudaGraphEdgeData *, size_t, unsigned) {
    return cudaSuccess;
}

#else /* CUDA 12, without edge data; its header renames cudaStreamGetCaptureInfo to its _v2 */

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, size_t *count) {
    return describe_capture(stream, status, id, graph, nodes, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, size_t, unsigned) {
    return cudaSuccess;
}

#endif

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long) {
    *executable = reinterpret_cast<cudaGraphExec_t>(
        new sim::Graph(*reinterpret_cast<const sim::Graph *>(graph)));
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return done(sim::launch_graph(*reinterpret_cast<const sim::Graph *>(executable),
                                  sim::stream_of(stream)));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<sim::Graph *>(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete reinterpret_cast<sim::Graph *>(executable);
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
    *object = reinterpret_cast<cudaUserObject_t>(new std::shared_ptr<void>(data, destroy));
    return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
    delete reinterpret_cast<std::shared_ptr<void> *>(object);
    return cudaSuccess;
}

/* With cudaGraphUserObjectMove the graph takes the caller's reference. */
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned flags) {
    auto *const reference = reinterpret_cast<std::shared_ptr<void> *>(object);
    reinterpret_cast<sim::Graph *>(graph)->objects.push_back(*reference);
    if ((flags & cudaGraphUserObjectMove) != 0) {
        delete reference;
    }
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
    *count = reinterpret_cast<const sim::Graph *>(graph)->operations;
    return cudaSuccess;
}
}
