/* The part of the boundary that the negotiation of transports uses: properties of a process group,
 * the object that csrc/transport keeps for it, and all-gathers of integers.
 *
 * Owns the table of the objects. The GIL guards the table. */
#include "context_removal.hpp"
#include "gil.hpp"
#include "group.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>

using fct::guarded;

struct fct_exchange {
    c10::intrusive_ptr<c10d::Work> work; /* fills `results` */
    at::Tensor results;
    std::shared_ptr<fct::WaitStop> stop;
    size_t owners = 1;
};

namespace {

struct Attachment {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<void> object;
};

/* Returns the group's entry of the table, and adds the entry if there is none. The address of the
 * entry is constant while the group lives. */
std::shared_ptr<void> *attachment_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group) {
    static auto *const table = new std::unordered_map<const c10d::ProcessGroup *, Attachment>();
    const fct::HeldGil held; /* the caller may be in a scope of gil.h, without the GIL */
    for (auto it = table->begin(); it != table->end();) {
        it = it->second.group.expired() ? table->erase(it) : std::next(it);
    }
    auto entry = table->find(group.get());
    if (entry == table->end()) {
        entry =
            table
                ->emplace(group.get(),
                          Attachment{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), nullptr})
                .first;
    }
    return &entry->second.object;
}

/* The largest number of ranks for which fct_exchange_start_distinct uses an all-to-all, in which
 * each rank sends a message to each other rank. An all-gather of gloo is a ring: each rank sends to
 * one neighbor only. */
constexpr int kMaxAllToAllRanks = 64;

/* Allocates integers below the dispatcher: dispatch modes and transforms of functorch would observe
 * or replace the tensor. */
at::Tensor make_integers(int64_t count) {
    return at::detail::empty_cpu({count}, at::kLong);
}

/* Issues an all-gather of `count` integers, or an all-to-all with the same result. */
fct_exchange *start_exchange(fct_pg *pg, const int64_t *values, size_t count, bool all_to_all) {
    const auto backend = pg->group->getBackend(c10::DeviceType::CPU);
    auto exchange = std::make_unique<fct_exchange>();
    const int64_t world = pg->group->getSize();
    const auto length = static_cast<int64_t>(count);
    const int64_t copies = all_to_all ? world : 1;
    at::Tensor input = make_integers(copies * length);
    for (int64_t i = 0; i < copies; i++) {
        std::copy_n(values, count, input.mutable_data_ptr<int64_t>() + i * length);
    }
    exchange->results = make_integers(world * length);
    exchange->stop = pg->stop;
    const fct::ScopedContextRemoval no_context;
    {
        pybind11::gil_scoped_release released;
        const at::DisableRecordFunctionGuard no_record;
        std::vector<int64_t> equal_splits;
        exchange->work = all_to_all ? backend->alltoall_base(exchange->results, input, equal_splits,
                                                             equal_splits)
                                    : backend->_allgather_base(exchange->results, input);
    }
    return exchange.release();
}

} // namespace

extern "C" {

int64_t fct_pg_world_size(const fct_pg *pg) {
    return pg->group->getSize();
}

int64_t fct_pg_rank(const fct_pg *pg) {
    return pg->group->getRank();
}

const char *fct_pg_name(const fct_pg *pg) {
    return pg->group->getGroupName().c_str();
}

bool fct_pg_is_gloo(fct_pg *pg) {
    return fct::backend_kind(pg, c10::DeviceType::CPU) == fct::BackendKind::gloo;
}

/* Compares the name of the class, because the header of the class includes headers of gloo, which
 * torch does not ship. */
bool fct_pg_has_plain_gloo(const fct_pg *pg) {
    const auto backend = pg->group->getBackend(c10::DeviceType::CPU);
    return std::string(typeid(*backend).name()) == "N4c10d16ProcessGroupGlooE";
}

bool fct_c10d_is_debugged(void) {
    return c10d::debug_level() != c10d::DebugLevel::Off;
}

int fct_pg_stop_waits(fct_pg *pg, const char *text) {
    return guarded("fct_pg_stop_waits", [&] { pg->stop->text = text; });
}

void *fct_pg_attachment(fct_pg *pg) {
    if (pg->attachment == nullptr) {
        pg->attachment = attachment_of(pg->group);
    }
    return pg->attachment->get();
}

void fct_pg_attach(fct_pg *pg, void *object, void (*release)(void *)) {
    (void)fct_pg_attachment(pg);
    *pg->attachment = std::shared_ptr<void>(object, release);
}

int fct_exchange_start(fct_pg *pg, const int64_t *values, size_t count, fct_exchange **out) {
    try {
        *out = start_exchange(pg, values, count, false);
        return 0;
    } catch (...) {
        return fct::set_error();
    }
}

int fct_exchange_start_distinct(fct_pg *pg, const int64_t *values, size_t count,
                                fct_exchange **out) {
    return guarded("fct_exchange_start_distinct", [&] {
        *out = start_exchange(pg, values, count, pg->group->getSize() <= kMaxAllToAllRanks);
    });
}

int fct_exchange_wait(fct_exchange *exchange, const int64_t **results) {
    try {
        const fct::ScopedContextRemoval no_context;
        fct::wait_in_slices(*exchange->work, *exchange->stop);
        *results = exchange->results.const_data_ptr<int64_t>();
        return 0;
    } catch (...) {
        return fct::set_error();
    }
}

void fct_exchange_retain(fct_exchange *exchange) {
    exchange->owners++;
}

void fct_exchange_release(fct_exchange *exchange) {
    if (exchange != nullptr && --exchange->owners == 0) {
        delete exchange;
    }
}

} // extern "C"
