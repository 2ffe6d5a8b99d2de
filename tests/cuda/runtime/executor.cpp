/* Executes the work of operations, on one thread, in an order that streams and events allow.
 *
 * Each stream has a queue. The first task of a queue is ready if its clock covers no queued task of
 * another stream. Ready tasks may run in any order, which the setting `order_seed` selects. If it
 * is not 0, each task runs as late as possible: such schedules find missing waits.
 *
 * Lock order: the device's mutex, then the executor's mutex. */
#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "sim.h"

namespace sim {

namespace {

using Time = std::chrono::steady_clock;

/* Time between two checks whether the device is idle. */
constexpr std::chrono::milliseconds kIdleCheck{10};
/* Time between two calls of works that wait for other ranks. */
constexpr std::chrono::microseconds kRetry{100};

struct Task {
    int stream;
    Tick tick; /* at least that of the operation; does not decrease in a queue */
    Clock clock;
    Work work;
};

class Executor {
  public:
    void add(Task task) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!started_) {
            started_ = true;
            std::thread([this] { run(); }).detach();
        }
        queues_[task.stream].push_back(std::make_shared<Task>(std::move(task)));
        last_call_ = Time::now();
        changed_.notify_all();
    }

    bool is_finished(const Clock &clock) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return !is_pending(clock);
    }

    void finish(const Clock &clock) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!is_pending(clock)) {
            return;
        }
        waits_.push_back(&clock);
        changed_.notify_all();
        finished_.wait(lock, [&] { return !is_pending(clock); });
        waits_.erase(std::find(waits_.begin(), waits_.end(), &clock));
        finished_waits_++;
        last_call_ = Time::now();
    }

    void finish_all() {
        Clock clock;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto &[stream, queue] : queues_) {
                if (!queue.empty()) {
                    clock.join(queue.back()->clock);
                }
            }
        }
        finish(clock);
    }

  private:
    using Queue = std::deque<std::shared_ptr<Task>>;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable finished_;
    std::map<int, Queue> queues_;      /* by stream; a task stays in its queue until it is done */
    std::vector<const Clock *> waits_; /* of the host's threads */
    Time::time_point last_call_;
    uint64_t finished_waits_ = 0; /* of the host */
    bool started_ = false;

    bool is_pending(const Clock &clock) const {
        for (const auto &[stream, queue] : queues_) {
            if (!queue.empty() && clock.covers(stream, queue.front()->tick)) {
                return true;
            }
        }
        return false;
    }

    bool is_idle() const {
        return Time::now() - last_call_ > std::chrono::milliseconds(device().settings.idle_ms);
    }

    /* Returns true if a host thread waits for the task. Without `order_seed`, and if the host makes
     * no calls for `idle_ms`, every task is due. */
    bool is_due(const Task &task) const {
        if (device().settings.order_seed == 0 || is_idle()) {
            return true;
        }
        return std::any_of(waits_.begin(), waits_.end(),
                           [&](const Clock *wait) { return wait->covers(task.stream, task.tick); });
    }

    bool is_ready(const Task &task) const {
        for (const auto &[stream, queue] : queues_) {
            if (stream != task.stream && !queue.empty() &&
                task.clock.covers(stream, queue.front()->tick)) {
                return false;
            }
        }
        return true;
    }

    /* Changes with each wait of the host. */
    uint64_t priority(int stream) const {
        const auto seed = static_cast<uint64_t>(device().settings.order_seed);
        if (seed == 0) {
            return static_cast<uint64_t>(stream);
        }
        uint64_t x = (seed << 40) ^ (finished_waits_ << 16) ^ static_cast<uint64_t>(stream);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
        return x ^ (x >> 31);
    }

    /* Returns the tasks that may run now, in the order of priority. */
    std::vector<std::shared_ptr<Task>> choose() const {
        std::vector<std::shared_ptr<Task>> tasks;
        for (const auto &[stream, queue] : queues_) {
            if (!queue.empty() && is_due(*queue.front()) && is_ready(*queue.front())) {
                tasks.push_back(queue.front());
            }
        }
        std::sort(tasks.begin(), tasks.end(), [this](const auto &a, const auto &b) {
            return priority(a->stream) < priority(b->stream);
        });
        return tasks;
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            bool done = false;
            const auto tasks = choose();
            for (const auto &task : tasks) {
                lock.unlock();
                done = task->work();
                lock.lock();
                if (done) {
                    queues_[task->stream].pop_front();
                    finished_.notify_all();
                    break;
                }
            }
            if (!done && !tasks.empty()) {
                changed_.wait_for(lock, kRetry);
            } else if (!done) {
                changed_.wait_for(lock, kIdleCheck);
            }
        }
    }
};

Executor &executor() {
    static auto *const only = new Executor; /* never freed: its thread may run at exit */
    return *only;
}

} // namespace

bool executes() {
    return device().settings.execute != 0;
}

void submit(const Operation &by, Work work) {
    const std::lock_guard<std::recursive_mutex> lock(device().mutex);
    const Stream &stream = *device().streams[static_cast<size_t>(by.stream)];
    if (stream.capture != nullptr) {
        stream.capture->graph->works.push_back(std::make_shared<Work>(std::move(work)));
        return;
    }
    executor().add(Task{by.stream, stream.clock.tick_of(by.stream), stream.clock, std::move(work)});
}

void finish(const Clock &clock) {
    if (executes()) {
        executor().finish(clock);
    }
}

void finish_all() {
    if (executes()) {
        executor().finish_all();
    }
}

bool is_finished(const Clock &clock) {
    return !executes() || executor().is_finished(clock);
}

} // namespace sim
