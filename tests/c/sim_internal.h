/* What the simulation's files share. Not for tests. */
#ifndef FSDP_C_TESTS_SIM_INTERNAL_H
#define FSDP_C_TESTS_SIM_INTERNAL_H

#include "sim.h"

enum { SIM_STREAMS_MAX = 24, SIM_DIMS_MAX = 4, SIM_USES_MAX = 64 };

/* at[s]: the operations of stream s up to this number have happened before. */
typedef struct sim_clock {
    uint32_t at[SIM_STREAMS_MAX];
} sim_clock;

/* ---- memory (sim_memory.c) ---- */

typedef struct sim_access {
    uint32_t seq; /* 0: none */
    int stream;
    const char *what;
} sim_access;

typedef struct sim_block {
    char *base;
    size_t capacity;
    size_t size; /* asked for */
    bool live;
    bool of_host;  /* beside a device with streams: memory that the host uses by itself */
    bool of_group; /* the memory of a process group */
    bool shared;   /* an array has it, too, and does not count as a reference */
    int stream;    /* whose pool it belongs to */
    uint64_t freed_at;
    sim_access written;
    sim_access read[SIM_STREAMS_MAX];
    struct sim_block *next_spare;
} sim_block;

typedef struct sim_use {
    sim_block *block;
    bool write;
} sim_use;

sim_block *sim_block_alloc(size_t bytes, bool of_host);
/* checked: the caller frees without knowing who else uses it, so on the CPU every use must be
 * ordered before. */
void sim_block_free(sim_block *block, bool checked);
/* The live block around these bytes; notes a failure and returns NULL where there is none. */
sim_block *sim_block_around(const void *address, int64_t bytes, const char *what);
void sim_block_touch(sim_block *block, bool write, int stream, uint32_t seq, const sim_clock *now,
                     const char *what);
void sim_memory_begin(void);
void sim_memory_end(void);

/* malloc for the simulation itself: never made to fail. */
void *sim_alloc(size_t bytes); /* zeroed */
/* The same for what only the simulation sees and drops soon (arguments of operations, lists of
 * values): kept for the next one, because a sanitizer's malloc is most of what an operation
 * costs. Goes back with sim_scratch_free(). */
void *sim_scratch(size_t bytes); /* zeroed */
void sim_scratch_free(void *block);

/* ---- streams (sim_stream.c) ---- */

typedef struct sim_point {
    int stream;
    uint32_t seq;
    sim_clock clock;
} sim_point;

typedef struct sim_op {
    const char *what;
    const sim_use *uses;
    size_t use_count;
    void (*run)(void *args); /* may be NULL */
    void *args;              /* sim_scratch(); taken */
    bool crosses;            /* copies between the host's memory and the device's */
    fct_tensor *held[2];     /* references that the backend keeps until it ran */
} sim_op;

/* Appends to the stream; *point (may be NULL) is its end. */
void sim_stream_push(int stream, const sim_op *op, sim_point *point);
void sim_stream_wait(int stream, const sim_point *point);
bool sim_point_passed(const sim_point *point);
void sim_host_saw(const sim_point *point); /* that it has passed */
void sim_host_waits(const sim_point *point);
/* Beside a device with streams: where the host's own operations stand, which run at once. */
int sim_host_lane(void);
sim_point sim_stream_now(int stream);
int sim_stream_current(void);
int sim_stream_of_native(void *native);
int sim_stream_reserve(bool collective); /* a new stream */
sim_clock sim_clock_of(int stream);
void sim_streams_begin(void);
void sim_streams_end(void);

/* ---- tensors (sim_tensor.c) ---- */

/* A strided array of memory, by value. */
typedef struct sim_view {
    char *data;
    fct_dtype dtype;
    int32_t ndim;
    int64_t sizes[SIM_DIMS_MAX];
    int64_t strides[SIM_DIMS_MAX];
    int64_t numel;
} sim_view;

int64_t sim_itemsize(fct_dtype dtype);
double sim_get(fct_dtype dtype, const void *address);
void sim_put(fct_dtype dtype, void *address, double value);
sim_view sim_view_of(const fct_tensor *t, const char *what);
void *sim_view_at(const sim_view *view, int64_t index);
sim_block *sim_tensor_block(const fct_tensor *t);
/* New alias of the same storage from element `offset` of t on; cannot fail. */
fct_tensor *sim_tensor_slice(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                             const int64_t *strides, int64_t offset);
/* Beside a device with streams: new, in the host's memory, with anything in it; whether it is
 * there, and pinned. */
fct_tensor *sim_tensor_in_host(fct_dtype dtype, int32_t ndim, const int64_t *sizes, bool pinned);
bool sim_tensor_is_of_host(const fct_tensor *t);
bool sim_tensor_is_pinned(const fct_tensor *t);
int sim_lane_of(const fct_tensor *t); /* where its memory is worked on */
/* Queued on the current stream: to = from, of which one may be in the host's memory. */
sim_point sim_tensor_cross(fct_tensor *to, const fct_tensor *from, const char *what);
/* Queued on the current stream: to = from, or zeros where there is none. */
void sim_tensor_assign(fct_tensor *to, const fct_tensor *from, const char *what);

/* ---- the rest ---- */

extern sim_config sim_now;   /* of the simulation that runs */
extern int sim_stream_count; /* how many streams it has: what clocks know about */
extern sim_alive sim_living;
void sim_faults_begin(void);
void sim_groups_begin(void);
void sim_groups_end(void);
void sim_autograd_begin(void);

#endif
