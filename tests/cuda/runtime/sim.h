/* State of the simulated CUDA device: streams, events, memory, captures, counters, findings.
 *
 * The library of this header is linked by the substitutes of libcudart, libcuda, libnccl and
 * libcublas. Device memory is host memory. Without the setting `execute`, copies are executed at
 * once and kernels are not executed.
 *
 * Vector clocks hold the order that streams and events guarantee: one clock per stream, event and
 * the host. Each operation is one tick of its stream. An access that is not ordered after the last
 * conflicting access of the same bytes is a finding, whatever the timing.
 *
 * Functions on streams, events, captures and memory lock `device().mutex`, which is recursive. So
 * do count() and is_due(). The caller of report() and log_call() holds it. Functions that return
 * int return the number of a cudaError_t. */
#ifndef CUDA_SIM_H
#define CUDA_SIM_H

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "../../harness/simulation/vector_clock.h"

namespace sim {

/* An operation on a stream. */
struct Operation {
    int stream = -1; /* -1: no operation */
    Tick tick = 0;
    const char *name = "";
    uint64_t serial = 0; /* number of the operation, in the order of the host's calls */
};

/* ---- accesses ---- */

struct Access {
    uintptr_t from = 0;
    uintptr_t to = 0;
    bool write = false;
};

/* The last accesses of all bytes. */
class Accesses {
  public:
    /* Records an access by `by`, whose clock is `clock`. Reports it if it is not ordered after the
     * last conflicting access. */
    void add(const Access &access, const Operation &by, const Clock &clock);
    void forget(uintptr_t from, uintptr_t to);

  private:
    struct Cell {
        uintptr_t end = 0;
        Operation write;
        std::vector<Operation> reads; /* since the write; at most one per stream */
    };
    std::map<uintptr_t, Cell> cells_;

    void split(uintptr_t at);
};

/* ---- execution (setting `execute`) ---- */

/* The work of an operation. Returns true when it is done, and false if it must be called again:
 * a collective waits for other ranks. Called on the device's thread, without the device's mutex. A
 * work that has returned true can be called again, as a part of a graph. */
using Work = std::function<bool()>;

/* Whether operations have work, besides their accesses. */
bool executes();
/* Queues the work of `by` on its stream, or adds it to the graph that captures the stream. */
void submit(const Operation &by, Work work);
/* Blocks until the work of all operations before `clock` is done. The caller must not hold the
 * device's mutex. */
void finish(const Clock &clock);
void finish_all();
/* Whether the work of all operations before `clock` is done. */
bool is_finished(const Clock &clock);

/* ---- streams, events, captures ---- */

enum class Mode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 }; /* as cudaStreamCaptureMode */

struct Graph {
    std::vector<Access> accesses; /* of all captured operations, in order */
    size_t operations = 0;
    std::vector<std::shared_ptr<Work>> works;   /* of all captured operations, in order */
    std::vector<std::shared_ptr<void>> objects; /* user objects; freed with the last copy */
};

struct Capture {
    uint64_t id = 0;
    int origin = 0;
    Mode mode = Mode::kGlobal;
    std::thread::id thread;
    bool invalidated = false;
    Accesses accesses;
    std::unique_ptr<Graph> graph;
    std::map<int, Operation> last; /* last captured operation, by stream */
};

struct Stream {
    int index = 0;
    int priority = 0;
    bool blocking = true; /* synchronizes with the legacy default stream */
    Clock clock;
    std::shared_ptr<Capture> capture; /* NULL: not captured */
};

struct Event {
    Clock clock;
    bool recorded = false;
    std::shared_ptr<Capture> capture; /* of the last record; NULL: not captured */
};

/* Handles 0, 1 (legacy default stream) and 2 (default stream of the thread) are not pointers. */
Stream &stream_of(const void *handle);
Stream *new_stream(int priority, bool blocking);
Event *event_of(const void *handle); /* NULL, and a finding, if the event was destroyed */
Event *new_event();
void destroy_event(Event *event);

/* Starts an operation on the stream. Returns an error number if the capture rules refuse it, or if
 * the device has stopped. */
int begin(Stream &stream, const char *name, Operation *out);
/* Starts a kernel. Its accesses follow as calls of access(), or through Device::on_launch. */
int launch(Stream &stream, const char *name, Operation *out);
void access(const Operation &by, const void *data, size_t bytes, bool write);
/* An access of the host to pinned memory. */
void access_on_host(const void *data, size_t bytes, bool write);
int record(Event &event, Stream &stream, bool external);
int wait(Stream &stream, const Event &event, bool external);
/* The host waits for the stream, the event, or all streams. Returns an error number. */
int synchronize(Stream &stream);
int synchronize(const Event &event);
int synchronize_all();
int query(const Stream &stream);
int query(const Event &event);
/* Marks the operation as never complete. Waits of the host for it block until end_hang(). */
void hang(const Operation &operation);
void end_hang();

/* Returns 0, or an error number if this thread must not make an unsafe call during a capture. Such
 * a call invalidates the captures that forbid it. */
int check_unsafe_call(const char *name);
Mode exchange_mode(Mode mode); /* of this thread; returns the previous mode */
int begin_capture(Stream &stream, Mode mode);
int end_capture(Stream &stream, Graph **graph);
int launch_graph(const Graph &graph, Stream &stream);

/* ---- memory ---- */

enum class Kind { kNone, kDevice, kPinned };

void *allocate(size_t bytes, Kind kind); /* NULL without memory */
bool release(void *address);
Kind kind_of(const void *address);
/* With the setting `execute`, queues the copy. Otherwise copies at once, but not in a capture, and
 * not within device memory if Settings::copies is 0. The caller must not hold the device's mutex: a
 * copy to pageable memory returns when it is done. */
void copy(const Operation &by, void *dst, const void *src, size_t bytes);

/* ---- the device ---- */

/* Changed through sim_set(). */
struct Settings {
    long checks = 0; /* accesses are checked */
    long copies = 1; /* copies within device memory, and sets, are executed */
    /* Queries report work as unfinished until the host has waited, so that the order does not
     * depend on the moment of a query. */
    long incomplete = 0;
    long memory_mib = 81920;
    long fail_malloc = 0;          /* the n-th cudaMalloc from now on fails */
    long malloc_failures = 1;      /* number of successive calls that fail, including the n-th */
    long malloc_failures_left = 0; /* state: calls that still fail after the n-th has failed */
    long fail_nccl = 0;            /* the n-th collective from now on fails */
    long nccl_error = 3;           /* ncclResult_t of that collective */
    long nccl_async = 0;           /* ncclResult_t that ncclCommGetAsyncError writes */
    long fail_launch = 0;          /* the n-th launch of a driver kernel from now on fails */
    long fail_operator = 0;        /* the n-th launch through the runtime from now on fails */
    long fail_device = 0;          /* the n-th launch of any kernel from now on stops the device */
    long stopped = 0;              /* operations, records, waits, queries and cudaMalloc fail */
    long hang_nccl = 0;            /* the n-th collective from now on ends only if it is aborted */
    /* Operations are executed: by the device's thread, in an order that streams and events allow.
     * NCCL's communicators connect processes. Set before the first use of the device. */
    long execute = 0;
    /* Seed of the order of operations. 0: as early as possible. Other seeds: as late as the host's
     * waits allow, in a random order of streams that changes with each wait. */
    long order_seed = 0;
    /* Milliseconds without calls of the host, after which queued operations run although no host
     * thread waits for them. The host may wait for another process, and that process for this
     * device. */
    long idle_ms = 20;
    long wrong_slice = 0;  /* the n-th reduce-scatter from now on takes the next rank's slice */
    long wrong_shard = 0;  /* the n-th all-gather from now on exchanges the first two shards */
    long missing_rank = 0; /* the n-th reduction from now on omits the last rank */
};

struct Device {
    std::recursive_mutex mutex;
    Settings settings;
    std::vector<std::unique_ptr<Stream>> streams; /* 0: the legacy default stream */
    std::unordered_set<const Event *> events;
    std::vector<std::shared_ptr<Capture>> captures; /* active */
    Clock host;                                     /* operations for which the host has waited */
    Accesses accesses;
    uint64_t serial = 0;
    uint64_t capture_serial = 0;
    size_t used = 0; /* bytes of device memory */
    std::map<std::string, long> counts;
    std::vector<std::string> findings;
    /* Number of ranks of each communicator that the next ncclCommSplit calls create. */
    std::deque<int> split_sizes;
    Operation hung; /* the collective that never ends */
    /* Called after each kernel launch: observes the accesses of torch's operators. */
    void (*on_launch)(Operation *by) = nullptr;
    /* Called before the host waits: reports an operator that waits for its own launches. */
    void (*on_wait)() = nullptr;
};

Device &device();
void count(const char *name);
void report(const std::string &text);
std::string describe(const Operation &operation);
bool holds_gil();
/* Counts down a setting that is a number of calls. Returns true at its last call. */
bool is_due(long &calls);

/* ---- seeded bugs: calls that order streams ---- */

/* Logs a call whose stack contains the library of sim_log_calls(). Returns true if the armed fault
 * must happen at this call. */
bool log_call(const char *kind);

/* ---- state of a thread ---- */

struct Thread {
    int last_error = 0;
    bool bound = false; /* the primary context is current */
};
Thread &thread();

} // namespace sim

#endif
