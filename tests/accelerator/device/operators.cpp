/* torch's operators on the simulated device. Each runs on the CPU, because the memory of the device
 * is host memory, and records its reads and writes. */
#include "launch.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

namespace sim {

namespace {

using OptionalDevice = std::optional<c10::Device>;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::ScalarType type_or_default(std::optional<c10::ScalarType> type) {
    return type.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type,
                 std::optional<c10::Layout>, OptionalDevice device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, device_allocator(), kKeys, type_or_default(type),
                                     format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                         OptionalDevice device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                             type_or_default(type));
}

/* Copies the CPU result of an operation into a new device tensor. */
at::Tensor to_device(const at::Tensor &result, c10::Device device, Launch &launch) {
    if (!result.defined()) {
        return result;
    }
    at::Tensor copy =
        empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device, {});
    launch.writes(copy);
    as_host(copy).copy_(result);
    return copy;
}

/* ---- the fallback ---- */

/* A call of an operator whose device tensors are replaced by CPU tensors over the same memory. */
class Call {
  public:
    Call(const c10::OperatorHandle &op, torch::jit::Stack &stack) : op_(op), stack_(stack) {
        const auto &arguments = op.schema().arguments();
        const size_t begin = stack.size() - arguments.size();
        for (size_t i = 0; i < arguments.size(); i++) {
            const c10::AliasInfo *const alias = arguments[i].alias_info();
            replace(stack[begin + i], alias != nullptr && alias->isWrite());
        }
    }

    void run() {
        check_devices();
        const c10::Device device = device_;
        const c10::DeviceGuard guard(device);
        const bool is_view = is_view_operator();
        std::optional<Launch> launch;
        if (!is_view) {
            launch.emplace(op_.schema().name().c_str(), current_stream(device.index()));
            for (const Pair &pair : pairs_) {
                pair.write ? launch->writes(pair.device) : launch->reads(pair.device);
            }
        }
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        const size_t results = op_.schema().returns().size();
        for (size_t i = stack_.size() - results; i < stack_.size(); i++) {
            convert_result(stack_[i], launch);
        }
        if (launch && synchronizes_host()) {
            launch->host_waits();
        }
    }

  private:
    struct Pair {
        at::Tensor host, device;
        bool write;
    };
    const c10::OperatorHandle &op_;
    torch::jit::Stack &stack_;
    std::vector<Pair> pairs_;
    c10::Device device_{kType, current_device()};
    bool has_cpu_argument_ = false; /* an argument is a CPU tensor with dimensions */

    void check_devices() const {
        const std::string &name = op_.schema().name();
        const bool indexes =
            name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
        TORCH_CHECK(!has_cpu_argument_ || pairs_.empty() || indexes,
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, ",
                    device_, " and cpu, in ", name);
    }

    at::Tensor host_of(const at::Tensor &tensor, bool write) {
        if (!on_device(tensor)) {
            has_cpu_argument_ = has_cpu_argument_ || (tensor.defined() && tensor.dim() > 0);
            return tensor;
        }
        if (pairs_.empty()) {
            device_ = tensor.device();
        }
        at::Tensor host = as_host(tensor);
        pairs_.push_back({host, tensor, write});
        return host;
    }

    void replace(c10::IValue &value, bool write) {
        if (value.isTensor()) {
            value = host_of(value.toTensor(), write);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &element : value.toTensorVector()) {
                list.push_back(host_of(element, write));
            }
            value = list;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor> element : value.toOptionalTensorList()) {
                list.push_back(element ? std::optional(host_of(*element, write)) : element);
            }
            value = list;
        } else if (value.isDevice()) {
            device_ = value.toDevice().has_index() ? value.toDevice() : device_;
            value = c10::Device(c10::DeviceType::CPU);
        }
    }

    /* Whether the operator only returns views, so that it reads no data. */
    bool is_view_operator() const {
        for (const c10::Argument &result : op_.schema().returns()) {
            const c10::AliasInfo *const alias = result.alias_info();
            if (alias == nullptr || alias->isWrite()) {
                return false;
            }
        }
        return !op_.schema().returns().empty();
    }

    bool synchronizes_host() const {
        static const std::set<std::string> names = {"aten::nonzero", "aten::equal",
                                                    "aten::masked_select", "aten::_unique2",
                                                    "aten::unique_dim"};
        return names.count(op_.schema().name()) != 0;
    }

    void convert_result(c10::IValue &value, std::optional<Launch> &launch) {
        if (value.isTensor()) {
            value = device_of(value.toTensor(), launch);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &element : value.toTensorVector()) {
                list.push_back(device_of(element, launch));
            }
            value = list;
        }
    }

    /* Returns the device tensor for a result: an argument, a view of an argument, or a new
     * tensor. */
    at::Tensor device_of(const at::Tensor &result, std::optional<Launch> &launch) {
        if (!result.defined()) {
            return result;
        }
        for (const Pair &pair : pairs_) {
            if (pair.host.is_same(result)) {
                apply_resize(pair, result);
                return pair.device;
            }
        }
        for (const Pair &pair : pairs_) {
            if (result.has_storage() && result.storage().nbytes() != 0 &&
                pair.host.storage().data() == result.storage().data()) {
                auto view = at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, c10::Storage(pair.device.storage()), kKeys,
                    result.dtype());
                view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                                  result.storage_offset());
                return view;
            }
        }
        TORCH_CHECK(launch, op_.schema().name(),
                    ": a result of this view operator is not in the memory of an argument");
        return to_device(result, device_, *launch);
    }

    /* Resizes the device tensor of an output that the operator has resized. */
    static void apply_resize(const Pair &pair, const at::Tensor &result) {
        c10::TensorImpl *const impl = pair.device.unsafeGetTensorImpl();
        if (pair.host.storage().data() != pair.device.storage().data()) {
            const size_t bytes = result.storage().nbytes();
            c10::StorageImpl *const storage = pair.device.storage().unsafeGetStorageImpl();
            storage->set_data_ptr_noswap(device_allocator()->allocate(bytes));
            storage->set_nbytes(bytes);
            std::memcpy(storage->mutable_data(), result.storage().data(), bytes);
        }
        if (!impl->sizes().equals(result.sizes()) || !impl->strides().equals(result.strides())) {
            impl->set_sizes_and_strides(result.sizes(), result.strides());
        }
    }
};

void run_on_host(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
    const at::NoGradGuard no_grad;
    Call(op, *stack).run();
}

/* ---- operators that the fallback does not support ---- */

bool is_pinned(const at::Tensor &tensor) {
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    const Block *const block = memory().block_at(tensor.storage().data());
    return block != nullptr && block->device == Block::kHost;
}

/* The host waits for a copy to the host, unless the copy is non-blocking and its target is pinned.
 * The host also waits for a blocking copy from pinned memory. */
at::Tensor copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking) {
    const bool to_device = on_device(target);
    const c10::Device device = to_device ? target.device() : source.device();
    const bool crosses_devices = on_device(source) != to_device;
    Launch launch("aten::copy_", current_stream(device.index()));
    launch.reads(source);
    launch.writes(target);
    at::Tensor to = to_device ? as_host(target) : target;
    to.copy_(on_device(source) ? as_host(source) : source);
    const at::Tensor &host_tensor = to_device ? source : target;
    if (crosses_devices && !(non_blocking && is_pinned(host_tensor)) &&
        (!to_device || is_pinned(host_tensor))) {
        launch.host_waits();
    }
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor &source, const at::Tensor &target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

c10::Scalar local_scalar(const at::Tensor &tensor) {
    Launch launch("aten::_local_scalar_dense", current_stream(tensor.device().index()));
    launch.reads(tensor);
    launch.host_waits();
    return as_host(tensor).item();
}

at::Tensor view(const at::Tensor &tensor, c10::SymIntArrayRef size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor &tensor, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
    std::optional<int64_t> start;
    if (offset) {
        start = offset->guard_int(__FILE__, __LINE__);
    }
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                             C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor reshape_alias(const at::Tensor &tensor, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor &resize(const at::Tensor &tensor, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
    c10::TensorImpl *const impl = tensor.unsafeGetTensorImpl();
    at::native::resize_impl_cpu_(impl, C10_AS_INTARRAYREF_SLOW(size), std::nullopt, false);
    const int64_t bytes = static_cast<int64_t>(tensor.dtype().itemsize()) *
                          (tensor.numel() + tensor.storage_offset());
    if (bytes > static_cast<int64_t>(tensor.storage().nbytes())) {
        at::native::resize_bytes_nocuda(tensor.storage(), bytes);
    }
    if (format) {
        impl->empty_tensor_restride(*format);
    }
    return tensor;
}

at::Tensor &set_storage(at::Tensor &tensor, at::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    c10::TensorImpl *const impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                offset.guard_int(__FILE__, __LINE__));
    return tensor;
}

at::Tensor &set_tensor(at::Tensor &tensor, const at::Tensor &source) {
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(),
                       source.sym_strides());
}

void record_stream(at::Tensor &tensor, at::Stream stream) {
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    memory().record_stream(tensor.storage().data(), stream);
}

/* Allows `tensor.data = ...` between the CPU and the device, as torch does for its own devices. */
bool can_take_data(const at::Tensor &tensor, const at::Tensor &other) {
    return tensor.layout() == c10::kStrided && other.layout() == c10::kStrided;
}

/* PrivateUse1 devices implement convolutions with separate operators. */
at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight,
                       const std::optional<at::Tensor> &bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
    Launch launch("aten::convolution", current_stream(input.device().index()));
    launch.reads(input);
    launch.reads(weight);
    std::optional<at::Tensor> host_bias;
    if (bias && bias->defined()) {
        launch.reads(*bias);
        host_bias = as_host(*bias);
    }
    const at::Tensor output =
        at::convolution_symint(as_host(input), as_host(weight), host_bias, stride, padding,
                               dilation, transposed, output_padding, groups);
    return to_device(output, input.device(), launch);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
convolution_backward(const at::Tensor &grad, const at::Tensor &input, const at::Tensor &weight,
                     c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                     c10::SymIntArrayRef dilation, bool transposed,
                     c10::SymIntArrayRef output_padding, c10::SymInt groups,
                     std::array<bool, 3> mask) {
    Launch launch("aten::convolution_backward", current_stream(input.device().index()));
    launch.reads(grad);
    launch.reads(input);
    launch.reads(weight);
    const std::vector<c10::SymInt> bias_size = {grad.sym_size(1)};
    const auto [first, second, third] = at::convolution_backward_symint(
        as_host(grad), as_host(input), as_host(weight), c10::SymIntArrayRef(bias_size), stride,
        padding, dilation, transposed, output_padding, groups, mask);
    const c10::Device device = input.device();
    return {to_device(first, device, launch), to_device(second, device, launch),
            to_device(third, device, launch)};
}

/* Operators that are one kernel on other devices. torch's composites would be several. */
bool is_one_kernel(const std::string &name) {
    static const std::set<std::string> names = {"aten::split_with_sizes_copy", "aten::_chunk_cat",
                                                "aten::native_layer_norm",
                                                "aten::native_group_norm", "aten::native_dropout"};
    return name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::_fused_", 0) == 0 ||
           names.count(name) != 0;
}

int64_t choose_attention(const at::Tensor &, const at::Tensor &, const at::Tensor &,
                         const std::optional<at::Tensor> &, double, bool, std::optional<double>,
                         bool) {
    return 0; /* SDPBackend::math */
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar);
    m.impl("view", &view);
    m.impl("as_strided", &as_strided);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("record_stream", &record_stream);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
    m.impl("_has_compatible_shallow_copy_type", &can_take_data);
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (is_one_kernel(name.name)) {
            const auto op = c10::Dispatcher::singleton().findSchema(name);
            if (op && !op->schema().arguments().empty()) {
                const std::string full =
                    name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
                m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
            }
        }
    }
}

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
} // namespace at::native
