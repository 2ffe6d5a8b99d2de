/* A c10d backend of several ranks. One rank is this process, the others are simulated. The backend
 * moves the same data, pauses and fills outputs like loop_group.py, so both give the same bits.
 *
 * The collectives of fsdp_c and torch reach this backend through c10d's dispatcher, as they reach
 * NCCL. `inner` is a backend of one rank, such as ProcessGroupNCCL; its collectives move the data.
 * Without `inner`, copies move the data. As in NCCL, a synchronous collective runs on the current
 * stream and returns no Work. An asynchronous one runs on a stream of the backend. */
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

/* ---- pauses ---- */

enum Kind { kGather, kScatter, kReduce, kKinds };

struct Pauses {
    std::mutex mutex;
    std::array<int64_t, kKinds> means = {}; /* device clock cycles */
    std::mt19937 random;
} pauses;

std::atomic<int64_t> inner_collectives;

/* Pauses the current stream for a random time. Devices other than CUDA do not pause. */
void pause(Kind kind, c10::Device device) {
    using Sleep = void (*)(int64_t);
    static const auto occupy_stream = /* at::cuda::sleep */
        reinterpret_cast<Sleep>(dlsym(RTLD_DEFAULT, "_ZN2at4cuda5sleepEl"));
    const std::lock_guard<std::mutex> lock(pauses.mutex);
    if (device.is_cuda() && occupy_stream != nullptr && pauses.means[kind] > 0) {
        std::uniform_int_distribution<int64_t> cycles(0, 2 * pauses.means[kind]);
        occupy_stream(cycles(pauses.random));
    }
}

void poison(at::Tensor tensor) {
    if (tensor.numel() > 0) {
        tensor.view(at::kByte).fill_(0xFF);
    }
}

/* ---- works ---- */

/* The work of an asynchronous collective. Holds the tensors until wait() is called. */
class QueuedWork : public Work {
  public:
    QueuedWork(c10::Event event, c10::Stream stream, Tensors tensors)
        : event_(std::move(event)), stream_(stream), tensors_(std::move(tensors)) {}
    ~QueuedWork() override {
        for (const at::Tensor &tensor : tensors_) {
            tensor.record_stream(stream_);
        }
    }
    bool isCompleted() override {
        return tensors_.empty();
    }
    bool wait(std::chrono::milliseconds) override {
        const c10::impl::VirtualGuardImpl guard(stream_.device_type());
        event_.block(guard.getStream(stream_.device()));
        tensors_.clear();
        return true;
    }

  private:
    c10::Event event_;
    c10::Stream stream_;
    Tensors tensors_;
};

/* A work for callers that require one, of a collective that the current stream already orders. */
class FinishedWork : public Work {
  public:
    bool isCompleted() override {
        return true;
    }
    bool wait(std::chrono::milliseconds) override {
        return true;
    }
};

WorkPtr finished_work() {
    return c10::make_intrusive<FinishedWork>();
}

/* ---- the backend ---- */

class OneRankGroup : public c10d::Backend {
  public:
    OneRankGroup(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner)
        : Backend(rank, size), inner_(std::move(inner)) {}

    const std::string getBackendName() const override {
        return inner_ ? inner_->getBackendName() : "one rank";
    }

    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                            const c10d::AllgatherOptions &options) override {
        return issue({output, input}, options.asyncOp, [this, output, input] {
            const at::Tensor shards = output.view({getSize(), -1});
            for (int r = 0; r < getSize(); r++) {
                if (r != getRank()) {
                    poison(shards[r]);
                }
            }
            pause(kGather, output.device());
            for (int r = 0; r < getSize(); r++) {
                if (shards[r].data_ptr() != input.data_ptr()) {
                    gather(shards[r], input.view(-1));
                }
            }
        });
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        const c10d::ReduceOp op = options.reduceOp;
        return issue({output, input}, options.asyncOp, [this, output, input, op] {
            poison(output);
            pause(kScatter, output.device());
            at::Tensor total = input.view({getSize(), -1}).sum(0, false, at::kFloat);
            if (op == c10d::ReduceOp::AVG) {
                total.div_(getSize());
            }
            reduce_scatter(output.view(-1), total.to(output.scalar_type()), op);
        });
    }

    /* All ranks hold equal data, so their average is that data. The factor differs from 1, so that
     * a missing all-reduce changes the bits. */
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
        const double factor = averages ? 1 + 1.0 / 1024 : getSize() + 1.0;
        return issue(tensors, options.asyncOp, [this, tensors, factor] {
            for (const at::Tensor &tensor : tensors) {
                pause(kReduce, tensor.device());
                const at::Tensor total = tensor * factor;
                poison(tensor);
                pause(kReduce, tensor.device());
                tensor.copy_(total);
                all_reduce(tensor);
            }
        });
    }

    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &options) override {
        Tensors used = outputs.at(0);
        used.push_back(inputs.at(0));
        return with_work(issue(used, options.asyncOp, [used] {
            for (size_t r = 0; r + 1 < used.size(); r++) {
                used[r].copy_(used.back());
            }
        }));
    }

    WorkPtr broadcast(Tensors &, const c10d::BroadcastOptions &) override {
        return finished_work();
    }

    WorkPtr barrier(const c10d::BarrierOptions &) override {
        return finished_work();
    }

  private:
    c10::intrusive_ptr<c10d::Backend> inner_;              /* NULL: none */
    std::unordered_map<c10::Device, c10::Stream> streams_; /* of asynchronous collectives */

    static WorkPtr with_work(WorkPtr work) {
        return work ? work : finished_work();
    }

    bool uses_inner(const at::Tensor &tensor) {
        const bool uses = inner_ && !tensor.is_cpu() && tensor.numel() > 0;
        inner_collectives += uses;
        return uses;
    }

    void gather(at::Tensor output, at::Tensor input) {
        if (uses_inner(output)) {
            c10d::AllgatherOptions options;
            options.asyncOp = false;
            (void)inner_->_allgather_base(output, input, options);
        } else {
            output.copy_(input);
        }
    }

    /* The caller has computed the average. The inner backend applies a factor (PREMUL_SUM). */
    void reduce_scatter(at::Tensor output, at::Tensor input, const c10d::ReduceOp &op) {
        if (uses_inner(output)) {
            c10d::ReduceScatterOptions options;
            options.asyncOp = false;
            if (!(op == c10d::ReduceOp::AVG)) {
                options.reduceOp = op;
            }
            (void)inner_->_reduce_scatter_base(output, input, options);
        } else {
            output.copy_(input);
        }
    }

    void all_reduce(const at::Tensor &tensor) {
        if (uses_inner(tensor)) {
            c10d::AllreduceOptions options;
            options.asyncOp = false;
            Tensors tensors = {tensor};
            (void)inner_->allreduce(tensors, options);
        }
    }

    c10::Stream stream_of(c10::Device device, const c10::impl::VirtualGuardImpl &guard) {
        const auto found = streams_.find(device);
        return found != streams_.end()
                   ? found->second
                   : streams_.emplace(device, guard.getStreamFromGlobalPool(device)).first->second;
    }

    template <typename Body> WorkPtr issue(const Tensors &tensors, bool async_op, Body &&body) {
        const at::NoGradGuard no_grad;
        const at::AutoDispatchBelowADInplaceOrView below;
        const c10::Device device = tensors.at(0).device();
        if (device.is_cpu() || !async_op) {
            body();
            return device.is_cpu() ? finished_work() : WorkPtr();
        }
        const c10::impl::VirtualGuardImpl guard(device.type());
        const c10::Stream current = guard.getStream(device);
        const c10::Stream stream = stream_of(device, guard);
        c10::Event begin(device.type()), end(device.type());
        begin.record(current);
        begin.block(stream);
        guard.exchangeStream(stream);
        try {
            body();
        } catch (...) {
            guard.exchangeStream(current);
            throw;
        }
        end.record(stream);
        guard.exchangeStream(current);
        return c10::make_intrusive<QueuedWork>(std::move(end), stream, tensors);
    }
};

void set_pauses(const std::vector<int64_t> &means, uint32_t seed) {
    const std::lock_guard<std::mutex> lock(pauses.mutex);
    for (size_t i = 0; i < kKinds; i++) {
        pauses.means[i] = means.at(i);
    }
    pauses.random.seed(seed);
}

} // namespace

PYBIND11_MODULE(one_rank_group, m) {
    pybind11::module_::import("torch._C._distributed_c10d");
    pybind11::class_<OneRankGroup, c10d::Backend, c10::intrusive_ptr<OneRankGroup>>(m,
                                                                                    "OneRankGroup")
        .def(pybind11::init<int, int, c10::intrusive_ptr<c10d::Backend>>(), pybind11::arg("rank"),
             pybind11::arg("size"), pybind11::arg("inner"));
    m.def("set_pauses", &set_pauses, "Sets the mean pauses by kind, in clock cycles.");
    m.def("inner_collectives", [] { return inner_collectives.load(); });
}
