/* Accesses::add() reports each access that is not ordered after the last conflicting access of the
 * same bytes. */
#include <algorithm>
#include <set>
#include <sstream>

#include "sim.h"

namespace sim {

std::string describe(const Operation &operation) {
    std::ostringstream text;
    text << operation.name << " (operation " << operation.serial;
    if (operation.stream >= 0) {
        text << ", stream " << operation.stream;
    }
    text << ")";
    return text.str();
}

namespace {

/* Reports that `by` is not ordered after `last`. */
void report_race(const Access &access, const Operation &by, const Operation &last, bool was_write) {
    static std::set<std::pair<uint64_t, uint64_t>> reported; /* one finding for each pair */
    if (!reported.emplace(by.serial, last.serial).second) {
        return;
    }
    std::ostringstream text;
    text << "race: the " << (access.write ? "write" : "read") << " by " << describe(by)
         << " is not ordered after the " << (was_write ? "write" : "read") << " by "
         << describe(last) << ": " << access.to - access.from << " bytes at " << std::hex
         << access.from;
    report(text.str());
}

} // namespace

void Accesses::split(uintptr_t at) {
    const auto next = cells_.upper_bound(at);
    if (next == cells_.begin()) {
        return;
    }
    const auto cell = std::prev(next);
    if (cell->first < at && at < cell->second.end) {
        Cell second = cell->second;
        cell->second.end = at;
        cells_.emplace_hint(next, at, std::move(second));
    }
}

void Accesses::add(const Access &access, const Operation &by, const Clock &clock) {
    split(access.from);
    split(access.to);
    uintptr_t covered = access.from; /* bytes before it have a cell */
    auto at = cells_.lower_bound(access.from);
    while (at != cells_.end() && at->first < access.to) {
        Cell &cell = at->second;
        if (!clock.covers(cell.write.stream, cell.write.tick)) {
            report_race(access, by, cell.write, true);
        }
        for (const Operation &read : cell.reads) {
            if (access.write && !clock.covers(read.stream, read.tick)) {
                report_race(access, by, read, false);
            }
        }
        if (access.write) {
            at = cells_.erase(at);
            continue;
        }
        if (at->first > covered) { /* bytes without a recorded access */
            cells_.emplace_hint(at, covered, Cell{at->first, {}, {by}});
        }
        const auto same = std::find_if(cell.reads.begin(), cell.reads.end(),
                                       [&](const Operation &r) { return r.stream == by.stream; });
        if (same != cell.reads.end()) {
            *same = by;
        } else {
            cell.reads.push_back(by);
        }
        covered = cell.end;
        ++at;
    }
    if (access.write) {
        cells_[access.from] = Cell{access.to, by, {}};
    } else if (covered < access.to) {
        cells_.emplace_hint(at, covered, Cell{access.to, {}, {by}});
    }
}

void Accesses::forget(uintptr_t from, uintptr_t to) {
    split(from);
    split(to);
    cells_.erase(cells_.lower_bound(from), cells_.lower_bound(to));
}

} // namespace sim
