/* Collectives and their works.
 *
 * A group (group.hpp) written in C++ is called through the methods of ProcessGroup, which call the
 * c10d ops. A group that is a Python class is called through its Python methods, like in
 * torch.distributed. The GIL is released while a collective is issued and while a work is waited
 * for.
 *
 * Waits for gloo must be interruptible by signals, and gloo's works do not handle them. Waits for
 * works that can be polled are divided into slices. Two kinds of works need a thread that waits for
 * them: gloo's reduce-scatter, which cannot be polled, and collectives over shared memory with
 * messages that do not fit into the ring. Such works go to the progress thread of the group when
 * they are issued. Then they progress in the background, and can be polled. The thread owns a
 * reference to its works and calls no Python. When the group is released, the thread exits after
 * its last work.
 *
 * Waits for works of other backends are not divided. With streams, wait() returns at once. Backends
 * without streams may not support polling. */
#include "collective.h"

#include "context_removal.hpp"
#include "error.h"
#include "gil.hpp"
#include "group.hpp"
#include "pyobject.h"
#include "shm_backend.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

using fct::backend_kind;
using fct::BackendKind;
using fct::Borrowed;
using fct::guarded;
using fct::ScopedContextRemoval;

namespace {

#if FCT_TORCH_AT_LEAST(2, 13)
constexpr const char *kAllGather = "all_gather_single";
constexpr const char *kReduceScatter = "reduce_scatter_single";
#else
constexpr const char *kAllGather = "_allgather_base";
constexpr const char *kReduceScatter = "_reduce_scatter_base";
#endif

} // namespace

struct fct_work {
    c10::intrusive_ptr<c10d::Work> work;
    pybind11::object python; /* instead of `work` if the group is a Python class */
    BackendKind kind = BackendKind::unknown;
    fct::WaitTask wait_task;                   /* set if the progress thread waits */
    std::shared_ptr<const fct::WaitStop> stop; /* set for gloo */
};

namespace {

c10d::ReduceOp reduce_op(fct_reduce_op op, double factor) {
    switch (op) {
    case FCT_SUM:
        return c10d::ReduceOp(c10d::ReduceOp::SUM);
    case FCT_AVG:
        return c10d::ReduceOp(c10d::ReduceOp::AVG);
    case FCT_PREMUL_SUM:
        break;
    }
    c10d::ReduceOp premul;
    premul.op_ = c10d::ReduceOp::PREMUL_SUM;
    premul.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
    return premul;
}

/* Whether the backend refuses to move elements of the dtype. */
bool is_unsupported(BackendKind kind, c10::ScalarType type) {
    switch (type) {
    case c10::ScalarType::Short:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
        return kind == BackendKind::gloo || kind == BackendKind::nccl_like;
    default:
        return kind == BackendKind::gloo && c10::elementSize(type) == 1 &&
               type != c10::ScalarType::Byte && type != c10::ScalarType::Char &&
               type != c10::ScalarType::Bool;
    }
}

/* A complex tensor as pairs of real numbers, as torch.distributed passes it to backends. Sums and
 * averages of the pairs equal those of the complex numbers. */
at::Tensor as_real(const at::Tensor &tensor) {
    if (!tensor.is_complex()) {
        return tensor;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::view_as_real(tensor).view(-1);
}

/* A gather's tensor in a form that the backend supports: bytes if it does not support the dtype,
 * else the result of as_real(). */
at::Tensor as_supported(fct_pg *pg, const at::Tensor &tensor) {
    if (is_unsupported(backend_kind(pg, tensor.device().type()), tensor.scalar_type())) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return tensor.view(c10::ScalarType::Byte);
    }
    return as_real(tensor);
}

/* The group that has the shared-memory backend of `pg` as its own CPU backend. */
const c10::intrusive_ptr<c10d::ProcessGroup> &shm_group_of(fct_pg *pg) {
    if (!pg->shm_group) {
        pg->shm_group = fct::make_shm_group(pg->group);
    }
    return pg->shm_group;
}

/* Whether the operator has a kernel at a dispatch key for which torch registers none. */
bool is_intercepted(const c10::OperatorHandle &op) {
    for (const c10::DispatchKey key :
         {c10::DispatchKey::BackendSelect, c10::DispatchKey::Python,
          c10::DispatchKey::Functionalize, c10::DispatchKey::ADInplaceOrView,
          c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradOther,
          c10::DispatchKey::Tracer}) {
        if (op.hasKernelForDispatchKey(key)) {
            return true;
        }
    }
    return false;
}

/* Whether a dispatch mode, a profiler or a registered kernel observes the c10d ops of gathers and
 * reduce-scatters. */
bool ops_are_observed() {
    static const auto find = [](const char *name) {
        return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    };
    static const auto *const gather = new c10::OperatorHandle(find("c10d::_allgather_base_"));
    static const auto *const scatter = new c10::OperatorHandle(find("c10d::_reduce_scatter_base_"));
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || at::hasCallbacks() ||
           is_intercepted(*gather) || is_intercepted(*scatter);
}

/* The group on which a collective is called. Dispatch modes receive that group. So under a mode the
 * class uses the user's group, with a ScopedShmBackend. */
class TransportGroup {
  public:
    TransportGroup(fct_pg *pg, bool shm) : group_(shm ? shm_group_of(pg) : pg->group) {
        if (shm && c10::impl::TorchDispatchModeTLS::any_modes_set()) {
            scope_.emplace(pg->group, group_);
            group_ = pg->group;
        }
    }
    c10d::ProcessGroup *operator->() const {
        return group_.get();
    }

  private:
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
    std::optional<fct::ScopedShmBackend> scope_;
};

/* Whether the work completes without a thread that waits for it, and isCompleted() is valid. Other
 * works of gloo and of the shared-memory backend have the operation type UNKNOWN. */
bool can_poll(const fct_work &work) {
    return work.kind != BackendKind::gloo || work.work->retrieveOpType() != c10d::OpType::UNKNOWN;
}

/* Issues a collective of a group written in C++. `cpp` returns the work. */
template <typename Cpp> fct_work *issue_cpp(fct_pg *pg, c10::DeviceType device, Cpp &&cpp) {
    const at::NoGradGuard no_grad;
    auto result = std::make_unique<fct_work>();
    result->kind = backend_kind(pg, device);
    if (result->kind == BackendKind::gloo) {
        result->stop = pg->stop;
    }
    {
        /* gloo copies this thread-local state to its threads, which copy into the outputs. So the
         * version counters of the outputs do not change. */
        const at::AutoDispatchBelowADInplaceOrView below;
        const ScopedContextRemoval no_context;
        const fct::ReleasedGil released;
        result->work = cpp();
        if (result->work && !can_poll(*result) && device == c10::DeviceType::CPU) {
            /* Without a thread the wait blocks without handling signals. */
            if (pg->progress) {
                result->wait_task = fct::wait_in_background(*pg->progress, result->work);
            }
        }
    }
    return result->work ? result.release() : nullptr;
}

/* Issues a collective of any group. `python` calls a group that is a Python class. */
template <typename Cpp, typename Python>
fct_work *issue(fct_pg *pg, const fct_tensor *tensor, Cpp &&cpp, Python &&python) {
    if (!pg->python) {
        return issue_cpp(pg, fct::impl(tensor)->device().type(), std::forward<Cpp>(cpp));
    }
    const at::NoGradGuard no_grad;
    const fct::HeldGil held;
    auto result = std::make_unique<fct_work>();
    result->kind = BackendKind::python;
    result->python = python();
    return result->python.is_none() ? nullptr : result.release();
}

std::vector<at::Tensor> tensors_of(fct_tensor *const *tensors, size_t count) {
    std::vector<at::Tensor> list;
    list.reserve(count);
    for (size_t i = 0; i < count; i++) {
        list.push_back(*Borrowed(tensors[i]));
    }
    return list;
}

/* A signal handler that runs during a wait may release `work`, by a reset. So this function and
 * fct_work_wait copy the reference to the c10d work first, and do not access `work` afterwards. */
void wait_on_gloo(const fct_work &work) {
    const auto wait_task = work.wait_task;
    const auto held = work.work;
    const auto stop = work.stop;
    if (wait_task) {
        fct::wait_in_slices(*wait_task, *stop);
    } else if (can_poll(work)) {
        fct::wait_in_slices(*held, *stop);
    } else {
        const fct::ReleasedGil released;
        held->wait();
    }
}

bool is_gloo_done(fct_work &work) {
    if (work.wait_task) {
        return progress_task_is_done(work.wait_task.get());
    }
    return !can_poll(work) || work.work->isCompleted();
}

/* Whether is_completed() of a Python group's Work is valid. The method that a Python class inherits
 * from the C++ base always returns False. */
bool can_poll_python_work(pybind11::handle work) {
    const pybind11::handle base = pybind11::type::of<c10d::Work>();
    const pybind11::handle type = reinterpret_cast<PyObject *>(Py_TYPE(work.ptr()));
    return type.is(base) || !type.attr("is_completed").is(base.attr("is_completed"));
}

/* A scope in which this thread's all-reduces reduce buffers of gradients. */
class GradientAllReduceScope {
  public:
    GradientAllReduceScope() = default;
    GradientAllReduceScope(const GradientAllReduceScope &) = delete;
    GradientAllReduceScope &operator=(const GradientAllReduceScope &) = delete;
    ~GradientAllReduceScope() {
        (void)fct::set_gradient_all_reduce(before_);
    }

  private:
    bool before_ = fct::set_gradient_all_reduce(true);
};

/* The state between fct_pg_enter_shm and fct_pg_leave_shm. */
struct ShmScope {
    ShmScope(c10::intrusive_ptr<c10d::ProcessGroup> group,
             const c10::intrusive_ptr<c10d::ProcessGroup> &shm_group, bool reduces_gradients)
        : backend(std::move(group), shm_group) {
        if (reduces_gradients) {
            gradients.emplace();
        }
    }
    fct::ScopedShmBackend backend;
    std::optional<GradientAllReduceScope> gradients;
};

/* `group` is the group of the handle or its TransportGroup. */
template <typename Group>
fct_work *all_reduce(fct_pg *pg, const Group &group, fct_tensor *tensor, c10d::ReduceOp op,
                     bool async_op) {
    std::vector<at::Tensor> tensors = {as_real(*Borrowed(tensor))};
    c10d::AllreduceOptions options;
    options.reduceOp = std::move(op);
    options.asyncOp = async_op;
    return issue(
        pg, tensor, [&] { return group->allreduce(tensors, options); },
        [&] { return pg->python.attr("allreduce")(tensors, options); });
}

} // namespace

extern "C" {

int fct_py_shm_group(fct_pg *pg, PyObject **out) {
    return guarded("fct_py_shm_group",
                   [&] { *out = pybind11::cast(shm_group_of(pg)).release().ptr(); });
}

int fct_pg_add_shm_backend(fct_pg *pg, const fct_shm_methods *methods, shm_negotiation *negotiation,
                           bool *added) {
    return guarded("fct_pg_add_shm_backend",
                   [&] { *added = fct::add_shm_backend(*pg->group, *methods, negotiation); });
}

int fct_pg_enter_shm(fct_pg *pg, bool gradients, void **entered) {
    return guarded("fct_pg_enter_shm",
                   [&] { *entered = new ShmScope(pg->group, shm_group_of(pg), gradients); });
}

void fct_pg_leave_shm(void *entered) {
    delete static_cast<ShmScope *>(entered);
}

bool fct_set_gradient_all_reduce(bool gradients) {
    return fct::set_gradient_all_reduce(gradients);
}

int fct_pg_all_gather(fct_pg *pg, bool shm, fct_tensor *output, fct_tensor *input, bool async_op,
                      fct_work **work) {
    return guarded("fct_pg_all_gather", [&] {
        at::Tensor to = as_supported(pg, *Borrowed(output)),
                   from = as_supported(pg, *Borrowed(input));
        c10d::AllgatherOptions options;
        options.asyncOp = async_op;
        const TransportGroup group(pg, shm);
        *work = issue(
            pg, output,
            [&] {
#if FCT_TORCH_AT_LEAST(2, 13)
                return group->all_gather_single(to, from, options);
#else
                return group->_allgather_base(to, from, options);
#endif
            },
            [&] { return pg->python.attr(kAllGather)(to, from, options); });
    });
}

int fct_pg_reduce_scatter(fct_pg *pg, bool shm, fct_tensor *output, fct_tensor *input,
                          fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    return guarded("fct_pg_reduce_scatter", [&] {
        at::Tensor to = as_real(*Borrowed(output)), from = as_real(*Borrowed(input));
        c10d::ReduceScatterOptions options;
        options.reduceOp = reduce_op(op, factor);
        options.asyncOp = async_op;
        const TransportGroup group(pg, shm);
        *work = issue(
            pg, output,
            [&] {
#if FCT_TORCH_AT_LEAST(2, 13)
                return group->reduce_scatter_single(to, from, options);
#else
                return group->_reduce_scatter_base(to, from, options);
#endif
            },
            [&] { return pg->python.attr(kReduceScatter)(to, from, options); });
    });
}

int fct_pg_all_reduce(fct_pg *pg, bool shm, fct_tensor *tensor, fct_reduce_op op, double factor,
                      bool async_op, fct_work **work) {
    return guarded("fct_pg_all_reduce", [&] {
        const TransportGroup group(pg, shm);
        const GradientAllReduceScope gradients;
        *work = all_reduce(pg, group, tensor, reduce_op(op, factor), async_op);
    });
}

int fct_sum_over_ranks(fct_pg *pg, fct_tensor *tensor, fct_work **work) {
    return guarded("fct_sum_over_ranks", [&] {
        *work = all_reduce(pg, pg->group, tensor, reduce_op(FCT_SUM, 1.0), true);
    });
}

int fct_pg_can_pass_chunks(fct_pg *pg, bool *can) {
    return guarded("fct_pg_can_pass_chunks", [&] { *can = !pg->python && !ops_are_observed(); });
}

int fct_pg_gather_chunks(fct_pg *pg, fct_tensor *const *chunks, size_t count,
                         const fct_chunk_layout *layout, fct_work **work) {
    return guarded("fct_pg_gather_chunks", [&] {
        const std::vector<at::Tensor> tensors = tensors_of(chunks, count);
        *work = issue_cpp(pg, c10::DeviceType::CPU,
                          [&] { return fct::gather_chunks(*shm_group_of(pg), tensors, *layout); });
    });
}

int fct_pg_reduce_chunks(fct_pg *pg, fct_tensor *output, fct_tensor *const *chunks, size_t count,
                         const fct_chunk_layout *layout, fct_reduce_op op, fct_work **work) {
    return guarded("fct_pg_reduce_chunks", [&] {
        const std::vector<at::Tensor> tensors = tensors_of(chunks, count);
        const at::Tensor to = *Borrowed(output);
        TORCH_CHECK(op == FCT_SUM || op == FCT_AVG, "chunks are summed or averaged");
        *work = issue_cpp(pg, c10::DeviceType::CPU, [&] {
            return fct::reduce_chunks(*shm_group_of(pg), to, tensors, *layout, op == FCT_AVG);
        });
    });
}

int fct_work_wait(fct_work *work) {
    return guarded("fct_work_wait", [&] {
        const at::NoGradGuard no_grad;
        if (work->python) {
            const fct::HeldGil gil;
            const pybind11::object held = work->python;
            held.attr("wait")();
            return;
        }
        /* Some works copy into the output inside wait(). */
        const at::AutoDispatchBelowADInplaceOrView below;
        if (work->kind == BackendKind::gloo) {
            wait_on_gloo(*work);
            return;
        }
        const auto held = work->work;
        const fct::ReleasedGil released;
        held->wait();
    });
}

bool fct_work_is_cpu_bound(const fct_work *work) {
    return work->work && fct::is_cpu_bound(*work->work);
}

bool fct_work_rank_checksum(const fct_work *work, size_t run, int64_t rank, uint64_t *checksum) {
    return work->work && fct::rank_checksum(*work->work, run, rank, checksum);
}

bool fct_work_done(fct_work *work) {
    if (fct_fault_left() > 0) {
        /* While a fault is armed, the order of calls must not depend on timing: ranks must fail at
         * the same call. */
        return false;
    }
    /* Clean-up code calls this function with an exception set, and a Python group runs code. */
    const fct::HeldGil held;
    const pybind11::error_scope pending_exception;
    try {
        switch (work->kind) {
        case BackendKind::gloo:
            return is_gloo_done(*work);
        case BackendKind::nccl_like:
            return work->work->isCompleted();
        case BackendKind::fake:
            return true;
        case BackendKind::python:
            return !can_poll_python_work(work->python) ||
                   work->python.attr("is_completed")().cast<bool>();
        default:
            return work->work->isCompleted();
        }
    } catch (...) {
        return true;
    }
}

void fct_work_release(fct_work *work) {
    const fct::HeldGil held; /* a work of a Python group is a Python object */
    delete work;
}

} // extern "C"
