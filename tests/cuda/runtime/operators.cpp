/* The accesses of torch's operators. A launch within an operator reads the operator's inputs and
 * writes its mutable inputs and its outputs, on the stream of the launch. Arguments of kernels are
 * not examined: memory that an operator allocates and frees is not observed.
 *
 * With the setting `execute`, an operator that has launched kernels itself is executed on the host
 * when it returns (operators_on_host.h). */
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>

#include <exception>
#include <unordered_map>

#include "operators_on_host.h"

#include "sim.h"

namespace {

struct Tensor {
    const void *data;
    size_t bytes;
    bool written;
};

/* An operator that runs in this thread. */
struct Frame : at::ObserverContext {
    const struct Schema *schema = nullptr;
    std::vector<Tensor> inputs;
    std::vector<c10::IValue> arguments;   /* if operators are executed */
    std::vector<sim::Operation> launches; /* of the operator itself; one per stream */
};

thread_local std::vector<Frame *> frames; /* outermost first */

struct Schema {
    std::string name;
    std::vector<bool> written; /* for each argument, whether the operator writes it */
    std::optional<c10::OperatorHandle> handle;
};

/* Returns the schema of the operator, which lives until the process ends. */
const Schema &schema_of(const at::RecordFunction &function) {
    static std::mutex mutex;
    static auto *const known = new std::unordered_map<std::string, Schema>;
    const auto name = function.operator_name();
    const std::lock_guard<std::mutex> lock(mutex);
    const std::string key =
        name ? name->name + "." + name->overload_name : std::string(function.name());
    const auto found = known->find(key);
    if (found != known->end()) {
        return found->second;
    }
    Schema schema{key, {}, {}};
    if (name) {
        if (const auto handle = c10::Dispatcher::singleton().findSchema(*name)) {
            schema.handle = handle;
            for (const auto &argument : handle->schema().arguments()) {
                schema.written.push_back(argument.alias_info() != nullptr &&
                                         argument.alias_info()->isWrite());
            }
        }
    }
    return known->emplace(key, std::move(schema)).first->second;
}

void add(std::vector<Tensor> &tensors, const at::Tensor &tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0 || !tensor.has_storage() ||
        tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
        return;
    }
    size_t last = 0; /* offset of the last element */
    for (int64_t d = 0; d < tensor.dim(); d++) {
        last += static_cast<size_t>((tensor.size(d) - 1) * tensor.stride(d));
    }
    const auto *const data = static_cast<const char *>(tensor.storage().data());
    if (data != nullptr) {
        const size_t size = tensor.itemsize();
        const auto offset = static_cast<size_t>(tensor.storage_offset()) * size;
        tensors.push_back({data + offset, (last + 1) * size, written});
    }
}

void add(std::vector<Tensor> &tensors, const at::IValue &value, bool written) {
    if (value.isTensor()) {
        add(tensors, value.toTensor(), written);
    } else if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorList()) {
            add(tensors, tensor, written);
        }
    } else if (value.isList()) {
        for (const at::IValue &item : value.toListRef()) {
            add(tensors, item, written);
        }
    }
}

void access(const sim::Operation &by, const Tensor &tensor, bool write) {
    sim::access(by, tensor.data, tensor.bytes, write);
}

/* Names the launch by its operator, and declares that it accesses the operator's inputs. Called
 * under the device's mutex. */
void on_launch(sim::Operation *by) {
    if (frames.empty()) {
        if (sim::executes()) {
            sim::report(std::string("not executed: ") + by->name + ", outside of an operator");
        }
        return;
    }
    Frame &frame = *frames.back();
    by->name = frame.schema->name.c_str();
    bool first = true;
    for (sim::Operation &launch : frame.launches) {
        if (launch.stream == by->stream) {
            launch = *by;
            first = false;
        }
    }
    if (first) {
        frame.launches.push_back(*by);
    }
    for (const Tensor &input : frame.inputs) {
        access(*by, input, false);
        if (input.written) {
            access(*by, input, true);
        }
    }
}

/* The work of an operator is submitted when the operator returns, so the operator, and operators
 * that it calls, must not wait for its launches. Called under the device's mutex. */
void on_wait() {
    for (const Frame *frame : frames) {
        if (sim::executes() && !frame->launches.empty()) {
            sim::report("not executed: " + frame->schema->name +
                        ", which waits for its own launches");
        }
    }
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction &function) {
    auto frame = std::make_unique<Frame>();
    const Schema &schema = schema_of(function);
    const std::vector<bool> &written = schema.written;
    frame->schema = &schema;
    const auto inputs = function.inputs();
    if (sim::executes()) {
        frame->arguments.assign(inputs.begin(), inputs.end());
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        add(frame->inputs, inputs[i], i < written.size() && written[i]);
    }
    frames.push_back(frame.get());
    return frame;
}

/* Submits the work of an operator that has launched kernels and has not raised. */
void execute(const Frame &frame, const std::vector<c10::IValue> &outputs) {
    if (frame.launches.empty() || std::uncaught_exceptions() > 0) {
        return;
    }
    if (!frame.schema->handle) {
        const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
        sim::report("not executed: " + frame.schema->name + ", which has no schema");
        return;
    }
    try {
        sim::submit(frame.launches.back(),
                    sim::operator_work(*frame.schema->handle, frame.schema->name, frame.arguments,
                                       outputs));
    } catch (const std::exception &error) { /* RecordFunction would ignore it */
        const std::lock_guard<std::recursive_mutex> lock(sim::device().mutex);
        sim::report("not executed: " + frame.schema->name + ": " + error.what());
    }
}

void leave(const at::RecordFunction &function, at::ObserverContext *context) {
    auto *const frame = static_cast<Frame *>(context);
    std::vector<Tensor> outputs;
    for (const at::IValue &output : function.outputs()) {
        add(outputs, output, true);
    }
    for (const sim::Operation &launch : frame->launches) {
        for (const Tensor &output : outputs) {
            access(launch, output, true);
        }
    }
    if (!frames.empty() && frames.back() == frame) {
        frames.pop_back();
    }
    if (sim::executes()) {
        execute(*frame, function.outputs());
    }
}

at::CallbackHandle handle;

} // namespace

extern "C" {

/* Starts or stops the observation. */
void sim_observe_operators(int on) {
    if (on != 0 && handle == 0) {
        handle = at::addGlobalCallback(at::RecordFunctionCallback(enter, leave)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
    } else if (on == 0 && handle != 0) {
        at::removeCallback(handle);
        handle = 0;
    }
    sim::device().on_launch = on != 0 ? on_launch : nullptr;
    sim::device().on_wait = on != 0 ? on_wait : nullptr;
}
}
