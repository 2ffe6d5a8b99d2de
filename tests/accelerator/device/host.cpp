/* Checks CPU operators that use pinned memory. torch's profiler callbacks report these operators.
 * The host must have waited for all conflicting device operations on the same block, whichever of
 * its bytes they use. */
#include "journal.h"
#include "memory.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>

namespace sim {

namespace {

bool is_complete_for_host(const Epoch &epoch) {
    const World &state = world();
    const auto index = static_cast<size_t>(epoch.stream_index);
    if (epoch.stream_index < 0 || index >= state.streams.size()) {
        return true;
    }
    const auto device = static_cast<size_t>(state.streams[index].stream.device_index());
    return state.devices.at(device).host.covers(epoch.stream_index, epoch.tick);
}

/* Returns an operation that conflicts with the host's access to the cell, and for which the host
 * has not waited, or NULL. */
const Epoch *find_incomplete_access(const Cell &cell, bool write) {
    if (!is_complete_for_host(cell.write)) {
        return &cell.write;
    }
    for (const Epoch &read : cell.reads) {
        if (write && !is_complete_for_host(read)) {
            return &read;
        }
    }
    return nullptr;
}

void check(const at::Tensor &tensor, bool write, const char *name) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) {
        return;
    }
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    const Block *const block = memory().block_at(tensor.storage().data());
    if (block == nullptr || block->device != Block::kHost) {
        return;
    }
    for (const auto &[from, cell] : block->cells) {
        const Epoch *const incomplete = find_incomplete_access(cell, write);
        if (incomplete != nullptr) {
            journal().report(std::string("race: the ") + (write ? "write" : "read") + " by " +
                             name + " of the host does not wait for " +
                             world().describe(*incomplete) + ": pinned memory");
            return;
        }
    }
}

void check(const c10::IValue &value, bool write, const char *name) {
    if (value.isTensor()) {
        check(value.toTensor(), write, name);
    } else if (value.isTensorList()) {
        for (const at::Tensor &element : value.toTensorVector()) {
            check(element, write, name);
        }
    }
}

std::unique_ptr<at::ObserverContext> check_inputs(const at::RecordFunction &call) {
    const auto schema = call.operator_schema();
    const auto inputs = call.inputs();
    for (size_t i = 0; schema && i < inputs.size() && i < schema->arguments().size(); i++) {
        const c10::AliasInfo *const alias = schema->arguments()[i].alias_info();
        if (alias == nullptr || alias->isWrite()) { /* a view reads nothing */
            check(inputs[i], alias != nullptr, call.name());
        }
    }
    return nullptr;
}

} // namespace

void check_host_operators() {
    static const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&check_inputs)
                                                         .needsInputs(true)
                                                         .scopes({at::RecordScope::FUNCTION}));
    (void)handle;
}

} // namespace sim
