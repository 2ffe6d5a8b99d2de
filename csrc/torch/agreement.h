/* What the ranks of a process group agree upon: see agreement.cpp. */
#ifndef FSDP_C_TORCH_AGREEMENT_H
#define FSDP_C_TORCH_AGREEMENT_H

#include "office.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fct {

/* Numbers of each rank that all are to know. */
class Question {
  public:
    /* Sends this rank's, and waits for nobody. */
    void ask(c10d::Backend &engine, at::Tensor answer);
    /* All ranks' numbers, in their order; sees signals, with the GIL, and can be called again. */
    at::Tensor answers() const;
    bool is_open() const;

  private:
    c10::intrusive_ptr<c10d::Work> work_; /* fills the answers */
    at::Tensor answers_;
};

/* What the ranks of one process group have agreed upon, once, and where its messages stand. All who
 * use the group share it.
 *
 * The question goes out in front of the group's first gather, and nobody waits for it there: the
 * other ranks may be anywhere in their programs. So the first gathers are torch's, on all ranks as
 * many as the rank with most parameter groups has: of one gather more, one before it has been
 * waited for, and the question was answered then. */
struct Agreement {
    enum class State : uint8_t { open, direct, declined };
    State state = State::open;
    bool paused = false;               /* by all ranks at the same point of their programs */
    std::atomic<uint32_t> messages{0}; /* exchanges so far: the same on every rank */
    int64_t gathers = 0;               /* that were torch's */
    int64_t first = 0;                 /* gathers that are; this rank's own while open */
    Question question;
    /* Of shared memory, where all may use it: */
    std::shared_ptr<Office> office; /* where this rank's is; in the end, where all's are */
    std::vector<fcb_offer> offers;  /* all ranks', until they are looked for */
    Question found;                 /* whether all were, and who is crowded: see Found */
    int64_t direct_gathers = 0;     /* since then */
};

/* What is done with rows. Reduce-scatters follow gathers that have been waited for, and so may wait
 * for answers. All-reduces count as gathers: there are groups that have nothing else. */
enum class Use : uint8_t { gather, reduce, all_reduce };

/* The agreement of `group`, kept while anybody has it or the group lives. Needs the GIL. */
std::shared_ptr<Agreement> agreement_of(const c10::intrusive_ptr<c10d::ProcessGroup> &group);

/* Whether the next gather or reduction of `group` is direct. Asks all ranks, once, whether they
 * want that over the CPU's backend, by a collective that dispatch modes do not see; without a
 * question where the backend is not gloo's own. A wait for the answers sees signals; what was
 * interrupted can be called again. Shared memory is offered where `attach` sees to it that the
 * group's end will close the office. */
using Attach = std::function<bool()>;
bool goes_directly(Agreement &agreement, const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                   Use use, const Attach &attach);

/* Who posts rows in shared memory, at the next direct exchange; empty: nobody. To be called once
 * for each of them, without the GIL. */
std::shared_ptr<Office> office_of(Agreement &agreement, c10d::Backend &engine, Use use);

/* Whether rows of so many bytes would be copied in computation's time, if they were posted now. */
bool is_copied(const Agreement &agreement, size_t row_bytes);

/* Counts a parameter group that gathers over the process group of that name, if it has not been
 * asked yet. Needs the GIL. */
void announce_user(const std::string &name);

} // namespace fct

#endif
