#include "operators_on_host.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

namespace sim {

namespace {

using Values = std::vector<c10::IValue>;

/* Returns a CPU tensor over the memory of a CUDA tensor. CUDA operators read CPU arguments at the
 * call, so CPU tensors are cloned. */
at::Tensor on_host(const at::Tensor &tensor) {
    if (!tensor.defined()) {
        return tensor;
    }
    if (!tensor.is_cuda()) {
        return tensor.detach().clone();
    }
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

c10::IValue on_host(const c10::IValue &value) {
    if (value.isTensor()) {
        return on_host(value.toTensor());
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorList()) {
            list.push_back(on_host(tensor));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList()) {
            list.push_back(tensor ? std::make_optional(on_host(*tensor)) : std::nullopt);
        }
        return list;
    }
    if (value.isDevice()) {
        return c10::Device(at::kCPU);
    }
    return value;
}

/* Returns a CPU generator for one call of an operator that takes the generator `value` or, if that
 * is None, CUDA's default one. The seed depends on the generator's seed and offset, so the order in
 * which operators are executed does not change random numbers. */
c10::IValue generator_on_host(const c10::IValue &value) {
    const at::Generator generator =
        value.isGenerator() ? value.toGenerator()
                            : at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, 0));
    try {
        const uint64_t seed = 0x9E3779B97F4A7C15u * generator.current_seed();
        return at::detail::createCPUGenerator((seed >> 32) ^ generator.get_offset());
    } catch (const c10::Error &) { /* CUDA generators have no offset during a capture */
        return c10::IValue();
    }
}

Values all_on_host(const Values &values) {
    Values result;
    result.reserve(values.size());
    for (const c10::IValue &value : values) {
        result.push_back(on_host(value));
    }
    return result;
}

Values all_on_host(const c10::OperatorHandle &handle, const Values &arguments) {
    Values result = all_on_host(arguments);
    for (size_t i = 0; i < result.size(); i++) {
        if (handle.schema().arguments()[i].name() == "generator") {
            result[i] = generator_on_host(arguments[i]);
        }
    }
    return result;
}

/* Copies a result into the memory of the CUDA operator's output, unless it is that memory. */
void store(const at::Tensor &result, const at::Tensor &output) {
    if (result.defined() && output.defined() && result.data_ptr() != output.data_ptr()) {
        TORCH_CHECK(result.sizes() == output.sizes(), "the CPU's result has the shape ",
                    result.sizes(), ", and CUDA's has ", output.sizes());
        output.copy_(result);
    }
}

void store(const c10::IValue &result, const c10::IValue &output) {
    if (result.isTensor() && output.isTensor()) {
        store(result.toTensor(), output.toTensor());
    } else if (result.isTensorList() && output.isTensorList()) {
        const auto from = result.toTensorVector(), to = output.toTensorVector();
        for (size_t i = 0; i < from.size(); i++) {
            store(from[i], to[i]);
        }
    }
}

/* Changes arguments for the CPU kernel. CUDA's layer norm returns float32 statistics for 16-bit
 * inputs. The CPU's backward kernel expects the dtype of the weight, or of the input if there is no
 * weight. The CPU's sum of a column depends on the number of columns, because it adds the last
 * columns in another order. Sums in float64 hide this. */
void adapt(const std::string &name, Values &arguments) {
    if (name == "aten::native_layer_norm_backward.") {
        const at::ScalarType type = arguments[5].isTensor() ? arguments[5].toTensor().scalar_type()
                                                            : arguments[1].toTensor().scalar_type();
        for (const size_t statistic : {3, 4}) {
            arguments[statistic] = arguments[statistic].toTensor().to(type);
        }
    }
    if (name == "aten::sum.dim_IntList" && arguments[0].toTensor().is_floating_point()) {
        arguments[0] = arguments[0].toTensor().to(at::kDouble);
        arguments[3] = at::kDouble;
    }
}

void run(const c10::OperatorHandle &handle, const std::string &name, Values arguments,
         const Values &outputs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::DisableRecordFunctionGuard not_recorded;
    adapt(name, arguments);
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    handle.callBoxed(stack);
    for (size_t i = 0; i < stack.size() && i < outputs.size(); i++) {
        store(stack[i], outputs[i]);
    }
}

} // namespace

Work operator_work(const c10::OperatorHandle &handle, const std::string &name,
                   const Values &arguments, const Values &outputs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::DisableRecordFunctionGuard not_recorded;
    return [=, inputs = all_on_host(handle, arguments), results = all_on_host(outputs)] {
        try {
            run(handle, name, inputs, results);
        } catch (const std::exception &error) {
            const std::lock_guard<std::recursive_mutex> lock(device().mutex);
            report("not executed: " + name + ": " + error.what());
        }
        return true;
    };
}

} // namespace sim
