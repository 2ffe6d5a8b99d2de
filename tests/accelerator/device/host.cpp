/* The host's own use of pinned memory: operators of the CPU, which know nothing of the device, are
 * seen as torch's profiler sees them. What they touch has to be over as far as the host knows. */
#include "journal.h"
#include "memory.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>

namespace sim {

namespace {

bool known_to_host(const Epoch &epoch) {
    const World &all = world();
    const auto lane = static_cast<size_t>(epoch.lane);
    if (epoch.lane < 0 || lane >= all.lanes.size()) {
        return true;
    }
    const auto device = static_cast<size_t>(all.lanes[lane].stream.device_index());
    return all.devices.at(device).host.covers(epoch.lane, epoch.tick);
}

/* The device operation that is still using the cell, as far as the host knows. */
const Epoch *pending(const Cell &cell, bool write) {
    if (!known_to_host(cell.write)) {
        return &cell.write;
    }
    for (const Epoch &read : cell.reads) {
        if (write && !known_to_host(read)) {
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
        const Epoch *const other = pending(cell, write);
        if (other != nullptr) {
            journal().find(std::string("race: the ") + (write ? "write" : "read") + " by " + name +
                           " of the host does not wait for " + world().describe(*other) +
                           ": pinned memory");
            return;
        }
    }
}

void check(const c10::IValue &value, bool write, const char *name) {
    if (value.isTensor()) {
        check(value.toTensor(), write, name);
    } else if (value.isTensorList()) {
        for (const at::Tensor &one : value.toTensorVector()) {
            check(one, write, name);
        }
    }
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction &call) {
    const auto schema = call.operator_schema();
    const auto inputs = call.inputs();
    for (size_t i = 0; schema && i < inputs.size() && i < schema->arguments().size(); i++) {
        const c10::AliasInfo *const alias = schema->arguments()[i].alias_info();
        if (alias == nullptr || alias->isWrite()) { /* of a view nothing is read */
            check(inputs[i], alias != nullptr, call.name());
        }
    }
    return nullptr;
}

} // namespace

void watch_the_host() {
    static const auto handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    (void)handle;
}

} // namespace sim
