/* Simulated device and process groups: the part of csrc/bridge that the core calls, without torch
 * and without Python. (Autograd nodes and Python objects belong to csrc/python.)
 *
 * Time. Every access to memory (kernel, copy, collective, allocation) is an operation on a stream.
 * On a device with streams operations are queued and run later, in any order that streams and
 * events allow; the seed selects the order. Without streams the host runs its own operations at
 * once and only collectives run late. Vector clocks record which operation is ordered before which.
 * The test fails if a use of a buffer is not ordered after its producer. It also fails if an
 * allocation may reuse memory that is still in use. Both are detected in every schedule.
 *
 * Memory. A freed block returns to the pool of the stream that allocated it and is reused at once.
 * An allocation sets its bytes to NaN in every floating dtype.
 *
 * Peers. A simulation is one rank. The data of the other ranks is known: their shards come from the
 * shard function of the process group. The gradient of rank j is (j + 1) times that of rank 0,
 * unless sim_pg_weigh() sets other factors. With sim_ranks the peers are simulations in other
 * threads (core_ranks.h): all state of a simulation belongs to its thread.
 *
 * Faults. Every call that can fail calls sim_fault() first; see sim_fault_arm().
 *
 * Failures are counted, and the text of the first is kept. sim_end() prints it and fails the test,
 * so that cmocka's longjmp does not skip code of the core. Only a misuse of the simulation, such as
 * a full log, fails the test at once. */
#ifndef FSDP_C_TESTS_SIM_H
#define FSDP_C_TESTS_SIM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "bridge/allocator.h"
#include "bridge/autograd.h"
#include "bridge/error.h"
#include "bridge/gil.h"
#include "bridge/stream.h"
#include "bridge/tensor.h"
#include "kernels/kernels.h"
#include "transport/transport.h"

/* ---- one simulation ---- */

typedef struct sim_config {
    uint64_t seed;
    bool streams; /* the device has streams */
    /* The device is neither CPU nor CUDA: the core has to copy through the torch boundary. */
    bool no_kernels;
    bool premul;  /* the backend can scale inside a collective */
    bool chunks;  /* without streams: the transport moves separate chunks */
    bool profile; /* a profiler is active */
} sim_config;

/* For fc_set_min_owned_chunk_bytes(): larger than every parameter, so that no plan is split. */
#define SIM_NEVER_SPLIT ((int64_t)1 << 60)

/* Starts a simulation. sim_end() must end it before the next one starts. */
void sim_begin(sim_config config);
/* Runs all queued operations, then fails the test if a failure was recorded or an object is
 * alive. */
void sim_end(void);
/* The same; the message of a failure includes the formatted text. */
void sim_named_end(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same without a failed test. Returns the number of failures, and writes the first. */
size_t sim_finish(char *first, size_t bytes);
/* Records a failure. sim_end() then fails the test. */
void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Returns the number of recorded failures and clears them. For tests of the simulation itself. */
size_t sim_take_failures(void);
/* Records a failure if an object is alive. sim_end() calls it, too. */
void sim_check_nothing_alive(void);
/* Numbers of live objects. */
typedef struct sim_alive {
    size_t tensors, storages, works, events, groups, hooks, launches;
} sim_alive;
sim_alive sim_count_alive(void);
size_t sim_live_bytes(void); /* bytes of allocated memory */

fct_device sim_device(void);
uint64_t sim_random(void);

/* ---- time ---- */

void sim_drain(void); /* the host waits for all operations, also for abandoned collectives */
void sim_tick(void);  /* runs a few of the operations that may run now */

/* ---- log of events, in order; words separated by blanks ---- */

void sim_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *sim_log_text(void);
void sim_log_clear(void);

/* Returns the names of boundary calls that can fail, in order, except for fct_tensor_alias() and
 * fct_tensor_alias_as(). Calls that do not fit into the buffer are dropped. */
const char *sim_calls_text(void);
void sim_calls_clear(void);

/* ---- faults ---- */

typedef enum sim_fault_kind {
    SIM_NO_FAULT = 0,
    SIM_FAULT_BOUNDARY, /* a fct_ call fails */
    SIM_FAULT_CALLBACK, /* an fc_callbacks callback fails */
    SIM_FAULT_KERNEL,   /* a kernel launch fails */
    SIM_FAULT_MEMORY,   /* the core's malloc returns NULL */
} sim_fault_kind;

typedef enum sim_fault_span {
    SIM_ONCE,
    SIM_ALL_AFTER,       /* and every later call */
    SIM_CALLBACKS_AFTER, /* and every later callback of fc_callbacks */
} sim_fault_span;

/* Makes the n-th fallible call from now on fail (n >= 1). 0: no fault. */
void sim_fault_arm(int64_t n, sim_fault_span span);
/* Returns the kind of the call that failed by the armed fault, or SIM_NO_FAULT if the fault was not
 * reached. `name` may be NULL. */
sim_fault_kind sim_fault_fired(const char **name);
/* Called first by every call that can fail. Returns true if the call must fail. In this case it
 * sets the pending error for a boundary call and for a callback. */
bool sim_fault(sim_fault_kind kind, const char *name);
bool sim_error_pending(void); /* an exception is set */
int sim_raise(void);          /* sets the pending error, and returns -1 */
void sim_discard_error(void); /* discards the pending error */
/* Returns the text that the core last added to an exception's message, or "". */
const char *sim_error_explanation(void);

/* ---- data ---- */

double sim_round(fct_dtype dtype, double value); /* rounds to the nearest value of the dtype */
/* Creates a contiguous tensor with the given values on the simulated device. NULL: undefined
 * values. Cannot fail. */
fct_tensor *sim_tensor_new(fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                           const double *values);
/* The same, 1-D, in host memory of a device with streams. */
fct_tensor *sim_tensor_new_in_host(fct_dtype dtype, int64_t numel, bool pinned,
                                   const double *values);
/* Queued on the current stream; for host memory executed at once. write: stores `values` and
 * increments the version. expect: records a failure if the tensor has other values. */
void sim_tensor_write(fct_tensor *t, const double *values, const char *what);
void sim_tensor_expect(const fct_tensor *t, const double *values, const char *what);
/* Queued on the current stream: reads the tensor and records a failure if it contains NaN. */
void sim_tensor_touch(const fct_tensor *t, const char *what);
/* Changes the device of the tensor's memory. No data moves. */
void sim_tensor_relocate(fct_tensor *t, fct_device device);
/* Creates an alias. Cannot fail. */
fct_tensor *sim_tensor_view(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                            const int64_t *strides);
/* Waits for all queued operations, then copies the values. `out` has space for all elements. */
void sim_tensor_read(const fct_tensor *t, double *out);
int64_t sim_tensor_numel(const fct_tensor *t);
size_t sim_tensor_refs(const fct_tensor *t);
bool sim_tensor_has_memory(const fct_tensor *t);
/* Changes one bit of a tensor that has elements, at once, without a check of the order. `bit` is
 * taken modulo the number of its bits. */
void sim_tensor_flip_bit(const fct_tensor *t, uint64_t bit);
/* Marks the memory as shared with a numpy array: it must not be freed. */
void sim_tensor_share(fct_tensor *t);
/* Sets .grad or adds to it, as autograd does. Takes `grad`. */
void sim_grad_accumulate(fct_tensor *t, fct_tensor *grad);
fct_tensor *sim_grad_peek(const fct_tensor *t); /* borrowed, NULL if none */

/* ---- process groups ---- */

/* Writes the rank shard that `rank` sends in an all-gather. */
typedef void (*sim_shard_fn)(void *context, int64_t rank, void *shard, int64_t bytes);
/* Registers a process group for fct_pg_resolve(). `name` and `context` are borrowed until
 * sim_end(). */
void sim_pg_register(const char *name, int64_t world, int64_t rank, sim_shard_fn write_shard,
                     void *context);
/* Sets the gradient factors of the ranks: base + k * step for rank k. The default is 1 and 1. */
void sim_pg_weigh(const char *name, double base, double step);
/* From now on, all-gathers and reduce-scatters require memory of a process group's allocator.
 * `has_allocator`: this process group has an allocator. */
void sim_pg_has_memory(const char *name, bool has_allocator);
/* Returns an allocator of the process group, whose reference it takes. */
fct_allocator *sim_allocator_new(fct_pg *pg);
/* The process group for whose collectives a tensor was allocated; NULL: none. */
const fct_pg *sim_tensor_user(const fct_tensor *t);
/* While set, collectives do not complete before a wait. */
void sim_collectives_stall(bool stall);
/* Number of calls of fct_pg_register_user that succeeded. */
int sim_registered_users(void);
/* Sets the result of fct_compare_plan for plans other than 0, if the caller waits. */
void sim_set_plans_differ(bool differ);
/* A checksum that fct_add_checksum received. */
typedef struct sim_checksum {
    fct_op_kind kind;
    uint32_t step;
    uint64_t value;
} sim_checksum;
/* Writes the list of checksums since the latest fct_drop_checksums, and returns their number. */
size_t sim_checksums(const sim_checksum **list);
/* Returns the number of intervals of checksums that ended, summed over the process groups. */
size_t sim_checksum_intervals(void);
/* Whether kernels report that a CUDA graph captures their stream. */
void sim_capture(bool capturing);
bool sim_captures(void);
/* Sets whether fct_agree_start issues an agreement, and the difference that it finds ("": none). */
void sim_set_agreement(bool enabled, const char *difference);
/* Returns the number of agreements that were issued and not waited for. */
int sim_agreements_in_flight(void);
/* Sets the result of fct_work_is_cpu_bound and fct_gather_is_cpu_bound. */
void sim_set_cpu_bound(bool is_bound);

/* ---- several ranks ---- */

/* One collective, as all ranks of its process group issue it. */
typedef struct sim_collective sim_collective;

typedef struct sim_ranks_table {
    /* Returns the collective that this rank issues next in the process group. */
    sim_collective *(*issue)(const char *group, const fct_op_tag *tag);
    /* Whether the collective may run: all ranks have sent their data, or it has failed. The first
     * call sends the data of this rank. */
    bool (*is_complete)(sim_collective *c, const void *data, int64_t bytes);
    bool (*has_failed)(const sim_collective *c);
    /* Returns the data of a rank of the group. Precondition: complete, not failed. */
    const void *(*data_of)(const sim_collective *c, int64_t rank);
    void (*wait)(void);    /* until a collective of any rank completes or fails */
    void (*preempt)(void); /* another rank may continue */
} sim_ranks_table;

/* NULL: this process is one rank, and the data of its peers is computed. */
extern const sim_ranks_table *sim_ranks;
/* This rank has received no data for a failed collective. Wrong values are then no failure. */
extern _Thread_local bool sim_data_is_lost;
/* For seeded bugs: drops the n-th wait for an event, or for a work, from now on. 0: none, -1: all.
 */
typedef enum sim_wait_kind { SIM_EVENT_WAIT, SIM_WORK_WAIT, SIM_WAIT_KINDS } sim_wait_kind;
void sim_wait_drop(sim_wait_kind kind, int64_t n);
bool sim_wait_is_dropped(sim_wait_kind kind);

/* ---- the GIL ---- */

/* Returns how often the GIL was released for calls that launch or allocate (bridge/gil.h). The
 * simulator records a failure if a scope contains a callback. */
size_t sim_gil_releases(void);

/* ---- autograd ---- */

void sim_set_in_backward(bool value);
/* Later backwards record a graph (create_graph). */
void sim_set_recording(bool value);
/* Calls the hook of the leaf's subscription, as autograd does after it has accumulated into the
 * leaf. Records a failure if the leaf has a second subscription. */
int sim_subscriptions_run(const fct_tensor *leaf);
/* sim_run_at_end() runs and removes the callback for the end of the backward. Returns 0 if there is
 * no callback. sim_drop_at_end() removes the callback without a call. */
int sim_run_at_end(void);
void sim_drop_at_end(void);

#endif
