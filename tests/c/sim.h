/* The simulated device and process groups: all of csrc/torch/torch_abi.h that the core calls,
 * without torch and without Python (autograd nodes and Python objects belong to csrc/python and are
 * not here).
 *
 * Time. Everything that touches memory (kernels, copies, collectives, fresh allocations) is an
 * operation on a stream. On a device with streams operations are queued and executed later, in any
 * order that streams and events allow, drawn from the seed. On a device without streams the host
 * executes its own at once and only collectives run late. Vector clocks say which operation is
 * ordered before which; a use of a buffer that is not ordered after what produced it, or an
 * allocation that may reuse memory still in use elsewhere, fails the test, however lucky the
 * schedule was.
 *
 * Memory. Freed blocks go back to the pool of the stream that allocated them and are reused at
 * once, filled with bytes that are NaN in every floating type.
 *
 * Peers. This process is one rank. What the others send is known: their shards by way of the
 * process group's oracle, their gradients because rank j's gradient is (j + 1) times the gradient
 * of rank 0 (or as sim_pg_weigh() says).
 *
 * Faults. Every call that may fail asks sim_fault() first; see sim_fault_arm().
 *
 * A failure is noted, printed and raised by sim_end(), never thrown through the core. */
#ifndef FSDP_C_TESTS_SIM_H
#define FSDP_C_TESTS_SIM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "torch/torch_abi.h"

/* ---- one simulation ---- */

typedef struct sim_config {
    uint64_t seed;
    bool streams; /* the device has streams */
    /* The device is neither CPU nor CUDA: the core has to copy through the boundary. */
    bool no_kernels;
    bool premul;  /* the backend can scale inside a collective */
    bool chunks;  /* without streams: the transport moves separate chunks */
    bool profile; /* somebody records profiler ranges */
} sim_config;

/* For fc_chunks_from(): larger than every parameter. */
#define SIM_NEVER_SPLIT ((int64_t)1 << 60)

void sim_begin(sim_config config);
/* Runs what is still queued, then fails the test for every failure noted and for everything
 * still alive. */
void sim_end(void);
/* The same, and says what was simulated where it fails. */
void sim_named_end(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Notes a failure; sim_end() raises it. */
void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* How many failures were noted, and forgets them: for tests of the simulation itself. */
size_t sim_take_failures(void);
/* Notes a failure if anything is alive; sim_end() does it, too. */
void sim_check_nothing_alive(void);
/* Counts of what is alive. */
typedef struct sim_alive {
    size_t tensors, storages, works, events, groups, hooks, launches;
} sim_alive;
sim_alive sim_count_alive(void);
size_t sim_live_bytes(void); /* of memory that is allocated now */

fct_device sim_device(void);
uint64_t sim_random(void);

/* ---- time ---- */

void sim_drain(void); /* the host waits for everything, collectives that nobody waited for too */
void sim_tick(void);  /* executes a few operations that may run now */

/* ---- what happened, in order; words separated by blanks ---- */

void sim_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *sim_log_text(void);
void sim_log_clear(void);

/* The boundary's calls that may fail, aliases left out, in order; what is too long is cut off. */
const char *sim_calls_text(void);
void sim_calls_clear(void);

/* ---- faults ---- */

typedef enum sim_fault_kind {
    SIM_NO_FAULT = 0,
    SIM_FAULT_BOUNDARY, /* a fct_ call fails */
    SIM_FAULT_HOST,     /* a fc_host call-back fails */
    SIM_FAULT_KERNEL,   /* a kernel launch fails */
    SIM_FAULT_MEMORY,   /* the core's malloc returns NULL */
} sim_fault_kind;

typedef enum sim_fault_span {
    SIM_ONCE,
    SIM_ALL_AFTER,  /* and every later call */
    SIM_HOST_AFTER, /* and every later host call-back */
} sim_fault_span;

/* The n-th call from now on that can fail does (n >= 1). 0: off. */
void sim_fault_arm(int64_t n, sim_fault_span span);
/* What the armed fault did fail; SIM_NO_FAULT if it was not reached. name may be NULL. */
sim_fault_kind sim_fault_fired(const char **name);
/* Asked by every call that can fail: true if it has to. Notes the pending error. */
bool sim_fault(sim_fault_kind kind, const char *name);
bool sim_error_pending(void); /* an exception is set */
/* What the core has put in front of an exception's message last; "": nothing. */
const char *sim_error_explanation(void);

/* ---- data ---- */

double sim_round(fct_dtype dtype, double value); /* to the nearest value of the type */
/* New tensor of the given shape (contiguous, on the simulated device) holding values (NULL:
 * anything); cannot fail. */
fct_tensor *sim_tensor_new(fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                           const double *values);
/* The same, 1-D, in the memory of the host beside a device with streams. */
fct_tensor *sim_tensor_new_in_host(fct_dtype dtype, int64_t numel, bool pinned,
                                   const double *values);
/* Queued on the current stream (of the host's memory: at once): writes `values` into t (bumps its
 * version), or checks that it holds them. */
void sim_tensor_write(fct_tensor *t, const double *values, const char *what);
void sim_tensor_expect(const fct_tensor *t, const double *values, const char *what);
/* Queued on the current stream: reads t and checks that there is no NaN in it. */
void sim_tensor_touch(const fct_tensor *t, const char *what);
/* Says that t's memory is elsewhere; nothing moves. */
void sim_tensor_relocate(fct_tensor *t, fct_device device);
/* New alias; cannot fail. */
fct_tensor *sim_tensor_view(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                            const int64_t *strides);
/* The values now, after everything queued before is done: the host waits. out has room for all
 * elements. */
void sim_tensor_read(const fct_tensor *t, double *out);
int64_t sim_tensor_numel(const fct_tensor *t);
size_t sim_tensor_refs(const fct_tensor *t);
bool sim_tensor_has_memory(const fct_tensor *t);
/* An array shares the memory from now on (numpy()): it must not be freed. */
void sim_tensor_share(fct_tensor *t);
/* Sets or adds to .grad as autograd does (steals grad). */
void sim_grad_accumulate(fct_tensor *t, fct_tensor *grad);
fct_tensor *sim_grad_peek(const fct_tensor *t); /* borrowed, NULL if none */

/* ---- process groups ---- */

/* Writes the row that `rank` sends in an all-gather. */
typedef void (*sim_row_fn)(void *context, int64_t rank, void *row, int64_t bytes);
/* A group that fct_pg_resolve() will find; name and context are borrowed until sim_end(). */
void sim_pg_register(const char *name, int64_t world, int64_t rank, sim_row_fn row, void *context);
/* In its reductions rank k's values are base + k * step times a common unit; 1 and 1 if nobody
 * says so. */
void sim_pg_weigh(const char *name, double base, double step);
/* Its all-gathers and reduce-scatters are to be over memory that groups have given; whether it has
 * some itself. */
void sim_pg_has_memory(const char *name, bool gives);
/* Collectives stay unfinished until someone waits for them or this is switched off. */
void sim_collectives_stall(bool stall);
/* What fct_work_is_copied and fct_gather_is_copied say of them. */
void sim_collectives_are_copied(bool copied);

/* ---- autograd ---- */

void sim_set_in_backward(bool value);
/* The backwards from now on make graphs of themselves (create_graph). */
void sim_set_recording(bool value);
/* What autograd does after it has accumulated into the leaf: calls the watches of it. */
int sim_watches_run(const fct_tensor *leaf);
/* Runs and forgets the call-back queued for the end of the backward; 0 if there is none. */
int sim_run_at_end(void);
void sim_drop_at_end(void);

#endif
