/* Autograd: the post-backward node, gradient hooks, the end-of-backward callback, functorch, and
 * profiler ranges.
 *
 * Hooks run with the GIL, on the engine's thread. A failed hook throws python_error, so the caller
 * of backward() receives the exception with its type. The thread that destroys a graph releases the
 * owners (see HookRef), with the GIL and only while the interpreter is alive. */
#include "autograd.h"

#include "gil.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <typeinfo>

using fct::Borrowed;
using fct::guarded;
using fct::HookRef;
namespace autograd = torch::autograd;

inline void HookRef::call() const {
    const pybind11::gil_scoped_acquire gil;
    if (hook_.owner != nullptr && hook_.call(hook_.owner) != 0) {
        fct::throw_python_error();
    }
}

namespace {

/* The gradients of a node whose hook runs, and their handles. */
struct RunningNode {
    autograd::variable_list &grads;
    std::vector<fct_tensor *> handles;
};

/* The innermost running node of this thread. A hook may run a nested backward. */
thread_local RunningNode *running_node = nullptr;

/* Before it runs a graph, compiled autograd calls compiled_args of each node and hook. Compiled
 * autograd does not run end-of-backward callbacks, so torch's FSDP2 continues with unreduced
 * gradients. fsdp_c raises instead. */
[[noreturn]] void refuse_to_compile() {
    const pybind11::gil_scoped_acquire gil;
    PyErr_SetString(PyExc_NotImplementedError,
                    "compiled autograd cannot run the backward of sharded or replicated modules: "
                    "their gradients would not be reduced. Switch it off; torch.compile of modules "
                    "and whole models works without it");
    fct::throw_python_error();
}

/* A node that calls the hook and passes its gradients through. The hook may replace them with
 * fct_autograd_node_set_grad. Undefined gradients become zeros first, like in
 * torch.autograd.Function. */
struct PostBackwardNode final : autograd::Node {
    explicit PostBackwardNode(const fct_hook &h) : hook(h) {}

    std::string name() const override {
        return "RegisterPostBackwardFunctionBackward";
    }

    autograd::variable_list apply(autograd::variable_list &&grads) override {
        autograd::variable_list result = std::move(grads);
        for (size_t i = 0; i < result.size(); i++) {
            if (!result[i].defined()) {
                result[i] = input_metadata(i).zeros_like();
            }
        }
        RunningNode node{result, {}};
        RunningNode *outer = std::exchange(running_node, &node);
        try {
            hook.call();
        } catch (...) {
            running_node = outer;
            throw;
        }
        running_node = outer;
        return result;
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        refuse_to_compile();
    }

#if FCT_TORCH_AT_LEAST(2, 13)
    void release_resources() override {
        Node::release_resources();
        hook.reset();
    }
#endif

    HookRef hook;
};

#if FCT_TORCH_AT_LEAST(2, 13)
using NodePtr = c10::intrusive_ptr<autograd::Node>;
NodePtr make_node(const fct_hook &hook) {
    return c10::make_intrusive<PostBackwardNode>(hook);
}
#else
using NodePtr = std::shared_ptr<autograd::Node>;
NodePtr make_node(const fct_hook &hook) {
    return NodePtr(new PostBackwardNode(hook), autograd::deleteNode);
}
#endif

/* Whether view_of may make the alias without the dispatcher: t is a plain dense tensor, and no mode
 * observes view operations. */
bool is_plain(const at::Tensor &t) {
    c10::TensorImpl &impl = *t.unsafeGetTensorImpl();
    if (typeid(impl) != typeid(c10::TensorImpl) || impl.is_python_dispatch() ||
        impl.layout() != c10::Layout::Strided || impl.is_inference() ||
        impl.has_symbolic_sizes_strides() || !impl.has_storage() || !impl.support_as_strided() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set() || fct::functorch_active() ||
        t._fw_grad(0).defined()) {
        return false;
    }
    const autograd::DifferentiableViewMeta *view = autograd::impl::get_view_autograd_meta(t);
    return view == nullptr || (view->shared_view_info() && view->has_bw_view());
}

/* t.view_as(t) through Python, which calls __torch_function__ of modes and subclasses. */
at::Tensor view_by_method(const py::handle tensor) {
    const at::NoGradGuard no_grad;
    const py::object view = tensor.attr("view_as")(tensor);
    if (!THPVariable_Check(view.ptr())) {
        throw py::type_error("view_as must return a tensor");
    }
    return THPVariable_Unpack(view.ptr());
}

/* t.view_as(t) under no_grad. torch.autograd.Function makes the same view of an input that it
 * returns unchanged. A tensor subclass decides the type of the result. */
at::Tensor view_of(const at::Tensor &t) {
    const auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
    if (!tensor) {
        fct::throw_python_error();
    }
    if (at::impl::torch_function_mode_enabled() ||
        !THPVariable_CheckTypeExact(Py_TYPE(tensor.ptr()))) {
        return view_by_method(tensor);
    }
    if (!is_plain(t)) {
        const at::NoGradGuard no_grad;
        return t.view_as(t);
    }
    at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    autograd::CreationMeta meta = autograd::CreationMeta::NO_GRAD_MODE;
    const autograd::DifferentiableViewMeta *view = autograd::impl::get_view_autograd_meta(t);
    if (view == nullptr) {
        return autograd::make_variable_differentiable_view(
            result, autograd::ViewInfo(t, nullptr, nullptr), std::nullopt,
            /*shared_view_info=*/true, meta);
    }
    meta = autograd::propagate_creation_meta(view->get_creation_meta(), meta);
    return autograd::make_variable_differentiable_view(
        result, view->get_backward_view().chain(t, result), std::nullopt, /*shared_view_info=*/true,
        meta);
}

/* A tensor pre-hook of a node. */
struct GradHook final : autograd::FunctionPreHook {
    explicit GradHook(const fct_hook &h) : hook(h) {}

    autograd::variable_list operator()(const autograd::variable_list &grads) override {
        hook.call();
        return grads;
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        refuse_to_compile();
    }

    HookRef hook;
};

/* Shared by a subscription and its hook, because the graph may keep the hook longer. */
struct Subscription {
    fct_hook hook; /* its owner is NULL after fct_grad_subscription_free; the GIL guards it */
};

/* A post hook of a leaf's AccumulateGrad node. */
struct SubscriptionHook final : autograd::FunctionPostHook {
    explicit SubscriptionHook(std::shared_ptr<Subscription> subscription)
        : shared(std::move(subscription)) {}

    autograd::variable_list operator()(const autograd::variable_list &outputs,
                                       const autograd::variable_list &) override {
        const pybind11::gil_scoped_acquire gil;
        const fct_hook &hook = shared->hook;
        if (hook.owner != nullptr && hook.call(hook.owner) != 0) {
            fct::throw_python_error();
        }
        return outputs;
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        refuse_to_compile();
    }

    std::shared_ptr<Subscription> shared;
};

/* A hook on a leaf. The leaf owns its hooks, and may be a parameter of the model that owns the
 * hook. The weak reference avoids a cycle. */
struct LeafHook {
    py::weakref owner;
    int (*call)(void *owner);
};

constexpr const char *kCapsule = "fsdp_c.hook";

LeafHook *leaf_hook(PyObject *capsule) {
    return static_cast<LeafHook *>(PyCapsule_GetPointer(capsule, kCapsule));
}

PyObject *call_capsule(PyObject *self, PyObject *) {
    const LeafHook *hook = leaf_hook(self);
    const auto run = [&] {
        const py::object owner = hook->owner();
        if (!owner.is_none() && hook->call(owner.ptr()) != 0) {
            fct::throw_python_error();
        }
    };
    if (hook == nullptr || guarded("gradient hook", run) != 0) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

void free_capsule(PyObject *capsule) {
    delete leaf_hook(capsule);
}

PyMethodDef hook_method = {"fsdp_c_grad_hook", call_capsule, METH_O, nullptr};

/* Whether an earlier forward has registered this hook on the leaf. */
bool is_hooked(const py::object &leaf, const fct_hook &hook) {
    const py::object hooks = leaf.attr("_backward_hooks");
    if (hooks.is_none()) {
        return false;
    }
    for (const py::handle value : hooks.attr("values")()) {
        if (!PyCFunction_Check(value.ptr()) ||
            PyCFunction_GET_FUNCTION(value.ptr()) != call_capsule) {
            continue;
        }
        const LeafHook *registered = leaf_hook(PyCFunction_GET_SELF(value.ptr()));
        if (registered->call == hook.call && registered->owner().ptr() == hook.owner) {
            return true;
        }
    }
    return false;
}

/* Registers through Tensor.register_hook. A leaf keeps its Python hooks in one dict, and
 * registering a Python hook replaces hooks that C++ has registered. */
void register_python_hook(const at::Tensor &t, const fct_hook &hook) {
    const auto leaf = py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
    if (!leaf) {
        fct::throw_python_error();
    }
    if (is_hooked(leaf, hook)) {
        return;
    }
    auto new_hook = std::make_unique<LeafHook>(
        LeafHook{py::weakref(static_cast<PyObject *>(hook.owner)), hook.call});
    const auto capsule =
        py::reinterpret_steal<py::object>(PyCapsule_New(new_hook.get(), kCapsule, free_capsule));
    if (!capsule) {
        fct::throw_python_error();
    }
    (void)new_hook.release();
    const auto callable =
        py::reinterpret_steal<py::object>(PyCFunction_New(&hook_method, capsule.ptr()));
    if (!callable) {
        fct::throw_python_error();
    }
    leaf.attr("register_hook")(callable);
}

} // namespace

/* The leaf holds its AccumulateGrad node weakly. The subscription keeps the node and its hook
 * alive. */
struct fct_grad_subscription {
    decltype(autograd::impl::grad_accumulator(at::Tensor())) node;
    std::shared_ptr<Subscription> shared;
};

namespace fct {

void HookRef::reset() noexcept {
    void *owner = std::exchange(hook_.owner, nullptr);
    if (owner == nullptr || !python_alive()) {
        return;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    /* The graph may be destroyed while an exception is pending. Finalizers of the owner must not
     * clear that exception. */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    hook_.release(owner);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

} // namespace fct

/* Excludes functorch's dispatch keys, like torch._C._DisableFuncTorch. */
struct FuncTorchPause {
    c10::impl::ExcludeDispatchKeyGuard front{c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
    c10::impl::ExcludeDispatchKeyGuard back{c10::DispatchKey::FuncTorchDynamicLayerBackMode};
};

extern "C" {

bool fct_grad_enabled(void) {
    return at::GradMode::is_enabled();
}

bool fct_has_observer(void) {
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || torch::jit::tracer::isTracing();
}

bool fct_has_function_mode(void) {
    return at::impl::torch_function_mode_enabled();
}

bool fct_in_backward(void) {
    return autograd::get_current_graph_task_id() != -1;
}

int fct_autograd_node(fct_tensor *const *in, size_t n, const fct_hook *hook, fct_tensor **out) {
    return guarded("fct_autograd_node", [&] {
        const auto sequence = static_cast<int64_t>(at::sequence_number::peek());
        RECORD_FUNCTION("RegisterPostBackwardFunction", c10::ArrayRef<const c10::IValue>(),
                        sequence);
        NodePtr node = make_node(*hook);
        autograd::edge_list edges;
        edges.reserve(n);
        for (size_t i = 0; i < n; i++) {
            edges.push_back(autograd::impl::gradient_edge(*Borrowed(in[i])));
        }
        node->set_next_edges(std::move(edges));
        std::vector<at::Tensor> outputs;
        outputs.reserve(n);
        for (size_t i = 0; i < n; i++) {
            at::Tensor output = view_of(*Borrowed(in[i]));
            autograd::impl::set_gradient_edge(output, {node, node->add_input_metadata(output)});
            auto *view = autograd::impl::get_view_autograd_meta(output);
            if (view != nullptr && view->has_bw_view()) {
                view->set_creation_meta(n > 1 ? autograd::CreationMeta::MULTI_OUTPUT_NODE
                                              : autograd::CreationMeta::IN_CUSTOM_FUNCTION);
            }
            outputs.push_back(std::move(output));
        }
        for (size_t i = 0; i < n; i++) {
            out[i] = fct::new_handle(std::move(outputs[i]));
        }
    });
}

fct_tensor *const *fct_autograd_node_grads(size_t *count) {
    *count = running_node != nullptr ? running_node->grads.size() : 0;
    if (running_node == nullptr) {
        return nullptr;
    }
    running_node->handles.clear();
    for (const at::Tensor &grad : running_node->grads) {
        running_node->handles.push_back(fct::handle(grad.unsafeGetTensorImpl()));
    }
    return running_node->handles.data();
}

void fct_autograd_node_set_grad(size_t index, fct_tensor *grad) {
    if (running_node != nullptr && index < running_node->grads.size()) {
        running_node->grads[index] = *Borrowed(grad);
    }
}

int fct_autograd_on_grad(fct_tensor *t, const fct_hook *hook) {
    return guarded("fct_autograd_on_grad", [&] {
        Borrowed tensor(t);
        TORCH_CHECK(tensor->requires_grad(),
                    "cannot register a hook on a tensor that doesn't require gradient");
        const auto &node = tensor->grad_fn();
        if (node) {
            node->add_tensor_pre_hook(std::make_unique<GradHook>(*hook));
        } else {
            register_python_hook(*tensor, *hook);
        }
    });
}

int fct_autograd_subscribe(fct_tensor *leaf, const fct_hook *hook, fct_grad_subscription **out) {
    return guarded("fct_autograd_subscribe", [&] {
        auto subscription = std::make_unique<fct_grad_subscription>();
        subscription->node = autograd::impl::grad_accumulator(*Borrowed(leaf));
        TORCH_CHECK(subscription->node, "the tensor accumulates no gradient");
        subscription->shared = std::make_shared<Subscription>(Subscription{*hook});
        subscription->node->add_post_hook(std::make_unique<SubscriptionHook>(subscription->shared));
        *out = subscription.release();
    });
}

bool fct_grad_subscription_owns_node(const fct_grad_subscription *subscription) {
    return subscription->node.use_count() == 1;
}

void fct_grad_subscription_free(fct_grad_subscription *subscription) {
    if (subscription != nullptr) {
        const fct::HeldGil held;
        subscription->shared->hook.owner = nullptr;
        delete subscription;
    }
}

int fct_autograd_at_end(const fct_hook *hook) {
    return guarded("fct_autograd_at_end", [&] {
        auto ref = std::make_shared<HookRef>(*hook);
        autograd::Engine::get_default_engine().queue_callback([ref] { ref->call(); });
    });
}

int fct_cast_differentiable(fct_tensor *t, fct_dtype dtype, fct_tensor **out) {
    return guarded("fct_cast_differentiable", [&] {
        const fct::DeviceCall call(fct::impl(t)->device_type());
        *out = fct::new_handle(Borrowed(t)->to(fct::scalar_type(dtype)));
    });
}

bool fct_has_functorch(void) {
#if FCT_TORCH_AT_LEAST(2, 13)
    return fct::functorch_active();
#else
    return false;
#endif
}

void *fct_functorch_pause(void) {
    return fct::functorch_active() ? new FuncTorchPause : nullptr;
}

void fct_functorch_resume(void *pause) {
    delete static_cast<FuncTorchPause *>(pause);
}

bool fct_profile_active(void) {
    return at::isRecordFunctionEnabled() && at::hasCallbacks();
}

void *fct_profile_enter(const char *name) {
    try {
        auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
        if (!callbacks.has_value()) {
            return nullptr;
        }
        auto range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
        range->before(std::string(name));
        return range.release();
    } catch (...) { /* a callback of the profiler failed: continue without this range */
        return nullptr;
    }
}

void fct_profile_exit(void *token) {
    delete static_cast<at::RecordFunction *>(token);
}

} // extern "C"
