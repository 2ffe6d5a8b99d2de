/* Collectives with NCCL's stream semantics. An asynchronous collective runs on the group's
 * stream, and `wait()` orders the current stream after it. A synchronous one runs on the current
 * stream and returns no Work. The host waits for neither. The data go through a CPU group (gloo).
 * Without a CPU group ("loop"), the result is that of ranks with equal data; scatter and all-to-all
 * raise. */
#include "journal.h"
#include "launch.h"
#include "memory.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;
using Lock = std::lock_guard<std::recursive_mutex>;
using c10d::OpType;

class Work final : public c10d::Work {
  public:
    Work(int rank, OpType type, c10::Stream stream, Clock end, Tensors tensors)
        : c10d::Work(rank, type), stream_(stream), end_(std::move(end)),
          kept_tensors_(std::move(tensors)) {}

    /* Without a wait, the memory is not reused before the stream is done with it. */
    ~Work() override {
        const Lock lock(world().mutex);
        for (const at::Tensor &tensor : kept_tensors_) {
            memory().record_stream(tensor.storage().data(), stream_);
        }
    }

    bool isCompleted() override {
        const Lock lock(world().mutex);
        return world().devices.at(static_cast<size_t>(stream_.device_index())).host.covers(end_);
    }
    bool isSuccess() const override {
        return true;
    }
    bool wait(std::chrono::milliseconds) override {
        synchronize();
        return true;
    }
    void synchronize() override {
        Tensors done; /* destroyed after the lock is released */
        const Lock lock(world().mutex);
        const c10::Stream current = current_stream(stream_.device_index());
        if (journal().log_call("work wait", current) && journal().fault == "drop") {
            return;
        }
        world().streams[static_cast<size_t>(world().index_of(current))].clock.join(end_);
        done.swap(kept_tensors_);
    }
    Tensors result() override {
        return {};
    }

  private:
    c10::Stream stream_;
    Clock end_;
    Tensors kept_tensors_;
};

using c10::intrusive_ptr;
using WorkPtr = intrusive_ptr<c10d::Work>;

Tensors hosts_of(const Tensors &tensors) {
    Tensors hosts;
    for (const at::Tensor &tensor : tensors) {
        hosts.push_back(on_device(tensor) ? as_host(tensor) : tensor);
    }
    return hosts;
}

std::vector<Tensors> hosts_of(const std::vector<Tensors> &lists) {
    std::vector<Tensors> hosts;
    for (const Tensors &list : lists) {
        hosts.push_back(hosts_of(list));
    }
    return hosts;
}

Tensors flat(const std::vector<Tensors> &lists) {
    Tensors all;
    for (const Tensors &list : lists) {
        all.insert(all.end(), list.begin(), list.end());
    }
    return all;
}

bool is_premul(const c10d::ReduceOp &op) {
    return op.op_ == c10d::ReduceOp::PREMUL_SUM;
}

double factor_of(const c10d::ReduceOp &op) {
    if (!is_premul(op)) {
        return 1.0;
    }
    return static_cast<const c10d::NCCLPreMulSumSupplement &>(*op.supplement_).double_factor;
}

class Group final : public c10d::Backend {
  public:
    Group(int rank, int size, std::string name, intrusive_ptr<c10d::Backend> inner)
        : c10d::Backend(rank, size), name_(std::move(name)), inner_(std::move(inner)) {}

    const std::string getBackendName() const override {
        return name_;
    }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override {
        return 0;
    }
    bool supportsTensorAlloc(c10::DeviceIndex) override {
        return true;
    }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override {
        {
            const Lock lock(world().mutex);
            journal().counts["group memory"]++;
        }
        return at::empty({size}, options);
    }

    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                            const c10d::AllgatherOptions &options) override {
        return issue("all_gather", OpType::_ALLGATHER_BASE, {input}, {output}, options.asyncOp,
                     [&](Tensors &in, Tensors &out) {
                         if (inner_) {
                             inner_->_allgather_base(out[0], in[0])->wait();
                             return;
                         }
                         const at::Tensor shard =
                             in[0].clone(); /* the input may be a part of the output */
                         for (at::Tensor &part : out[0].view(-1).chunk(size_)) {
                             part.copy_(shard.view(-1));
                         }
                     });
    }

    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override {
        return issue("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {input}, {output},
                     options.asyncOp, [&](Tensors &in, Tensors &out) {
                         if (!inner_) {
                             const at::Tensor part = in[0].view(-1).chunk(size_)[rank_];
                             out[0].view(-1).copy_(part * loop_factor(options.reduceOp));
                             return;
                         }
                         c10d::ReduceScatterOptions plain;
                         at::Tensor sent = premultiply(in[0], options.reduceOp, plain.reduceOp);
                         inner_->_reduce_scatter_base(out[0], sent, plain)->wait();
                     });
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        return issue("all_reduce", OpType::ALLREDUCE, {}, tensors, options.asyncOp,
                     [&](Tensors &, Tensors &out) {
                         if (!inner_) {
                             for (at::Tensor &tensor : out) {
                                 tensor.mul_(loop_factor(options.reduceOp));
                             }
                             return;
                         }
                         c10d::AllreduceOptions plain;
                         for (at::Tensor &tensor : out) {
                             tensor.copy_(premultiply(tensor, options.reduceOp, plain.reduceOp));
                         }
                         inner_->allreduce(out, plain)->wait();
                     });
    }

    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
        return issue("broadcast", OpType::BROADCAST, {}, tensors, options.asyncOp,
                     [&](Tensors &, Tensors &out) {
                         c10d::BroadcastOptions plain = options;
                         plain.asyncOp = false;
                         if (inner_) {
                             inner_->broadcast(out, plain)->wait();
                         }
                     });
    }

    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &options) override {
        return issue("all_gather", OpType::ALLGATHER, inputs, flat(outputs), options.asyncOp,
                     [&](Tensors &in, Tensors &out) {
                         if (!inner_) {
                             for (at::Tensor &tensor : out) {
                                 tensor.copy_(in[0]);
                             }
                             return;
                         }
                         std::vector<Tensors> lists = hosts_of(outputs);
                         inner_->allgather(lists, in)->wait();
                     });
    }

    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                    const c10d::ScatterOptions &options) override {
        TORCH_CHECK(inner_, "a group without a CPU group has no scatter");
        return issue("scatter", OpType::SCATTER, flat(inputs), outputs, options.asyncOp,
                     [&](Tensors &, Tensors &out) {
                         std::vector<Tensors> lists = hosts_of(inputs);
                         c10d::ScatterOptions plain = options;
                         plain.asyncOp = false;
                         inner_->scatter(out, lists, plain)->wait();
                     });
    }

    WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &to,
                          std::vector<int64_t> &from,
                          const c10d::AllToAllOptions &options) override {
        TORCH_CHECK(inner_, "a group without a CPU group has no all-to-all");
        return issue("all_to_all", OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp,
                     [&](Tensors &in, Tensors &out) {
                         inner_->alltoall_base(out[0], in[0], to, from)->wait();
                     });
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override {
        WorkPtr last;
        for (size_t i = 0; i < outputs.size(); i++) {
            last = _allgather_base(outputs[i], inputs[i], options);
        }
        return last;
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &options) override {
        WorkPtr last;
        for (size_t i = 0; i < outputs.size(); i++) {
            last = _reduce_scatter_base(outputs[i], inputs[i], options);
        }
        return last;
    }

    WorkPtr barrier(const c10d::BarrierOptions &) override {
        if (inner_) {
            inner_->barrier()->wait();
        }
        const Lock lock(world().mutex);
        world().host_waits_for_all(current_device());
        const c10::Stream stream = current_stream(current_device());
        return c10::make_intrusive<Work>(rank_, OpType::BARRIER, stream, Clock{}, Tensors{});
    }

  private:
    std::string name_;
    intrusive_ptr<c10d::Backend> inner_;
    std::map<c10::DeviceIndex, c10::Stream> streams_; /* under world().mutex */

    /* Returns the factor by which a reduction multiplies if all ranks have equal data. */
    double loop_factor(const c10d::ReduceOp &op) const {
        const bool adds = op.op_ == c10d::ReduceOp::SUM || is_premul(op);
        return adds ? factor_of(op) * size_ : 1.0;
    }

    /* gloo has no PREMUL_SUM: returns the multiplied tensor, and the op for gloo in `plain`. */
    static at::Tensor premultiply(const at::Tensor &tensor, const c10d::ReduceOp &op,
                                  c10d::ReduceOp &plain) {
        plain = is_premul(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
        return is_premul(op) ? tensor * factor_of(op) : tensor;
    }

    c10::Stream own_stream(c10::DeviceIndex device) {
        const auto found = streams_.find(device);
        return found != streams_.end() ? found->second
                                       : streams_.emplace(device, new_stream(device)).first->second;
    }

    /* Returns the collective's stream. An asynchronous collective waits for all earlier work of the
     * current stream. */
    c10::Stream stream_for(c10::DeviceIndex device, bool async_op) {
        const Lock lock(world().mutex);
        const c10::Stream current = current_stream(device);
        if (!async_op) {
            return current;
        }
        const c10::Stream own = own_stream(device);
        const Clock current_clock =
            world().streams[static_cast<size_t>(world().index_of(current))].clock;
        world().streams[static_cast<size_t>(world().index_of(own))].clock.join(current_clock);
        return own;
    }

    template <typename Body>
    WorkPtr issue(const char *name, OpType type, const Tensors &inputs, const Tensors &outputs,
                  bool async_op, Body &&body) {
        const at::NoGradGuard no_grad;
        const c10::DeviceIndex device = outputs.at(0).device().index();
        const c10::Stream stream = stream_for(device, async_op);
        Launch launch(name, stream);
        for (const at::Tensor &input : inputs) {
            launch.reads(input);
        }
        for (const at::Tensor &output : outputs) {
            launch.writes(output);
        }
        Tensors in = hosts_of(inputs);
        Tensors out = hosts_of(outputs);
        body(in, out);
        if (!async_op) {
            return nullptr;
        }
        Tensors tensors = inputs;
        tensors.insert(tensors.end(), outputs.begin(), outputs.end());
        return c10::make_intrusive<Work>(rank_, type, stream, launch.end_clock(),
                                         std::move(tensors));
    }
};

} // namespace

void define_group(pybind11::module &m) {
    m.def("make_group", [](int rank, int size, const std::string &name,
                           const intrusive_ptr<c10d::Backend> &inner) {
        return intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(rank, size, name, inner));
    });
    m.def("make_loop_group", [](int rank, int size, const std::string &name) {
        return intrusive_ptr<c10d::Backend>(
            c10::make_intrusive<Group>(rank, size, name, intrusive_ptr<c10d::Backend>()));
    });
}

} // namespace sim
