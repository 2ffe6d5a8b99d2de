/* The stack frames of one shared library, for tests/accelerator/device and tests/cuda/runtime. */
#ifndef SIMULATION_LIBRARY_FRAMES_H
#define SIMULATION_LIBRARY_FRAMES_H

#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace sim {

class LibraryFrames {
  public:
    /* Selects the loaded library whose path contains `name`. Selects no library if `name` is empty
     * or no path contains it. */
    void select(const std::string &name) {
        begin_ = end_ = 0;
        name_ = name;
        if (!name.empty()) {
            dl_iterate_phdr(&find_range, this);
        }
    }

    bool is_selected() const {
        return end_ != 0;
    }

    /* Returns the offsets of the calling thread's frames in the library, innermost first. */
    std::vector<uintptr_t> read() const {
        std::array<void *, 48> stack{};
        const int depth = backtrace(stack.data(), static_cast<int>(stack.size()));
        std::vector<uintptr_t> frames;
        for (int i = 0; i < depth; i++) {
            const auto address = reinterpret_cast<uintptr_t>(stack.at(static_cast<size_t>(i)));
            if (address >= begin_ && address < end_) {
                frames.push_back(address - begin_);
            }
        }
        return frames;
    }

  private:
    std::string name_;
    uintptr_t begin_ = 0, end_ = 0; /* address range; 0: no library */

    static int find_range(dl_phdr_info *info, size_t, void *data) {
        auto *const self = static_cast<LibraryFrames *>(data);
        if (std::strstr(info->dlpi_name, self->name_.c_str()) == nullptr) {
            return 0;
        }
        self->begin_ = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const auto &segment = info->dlpi_phdr[i];
            const uintptr_t segment_end = self->begin_ + segment.p_vaddr + segment.p_memsz;
            self->end_ = std::max(self->end_, segment_end);
        }
        return 1;
    }
};

} // namespace sim

#endif
