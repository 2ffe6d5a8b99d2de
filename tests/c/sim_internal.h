/* Declarations that the files of the simulation share. Not for tests. */
#ifndef FSDP_C_TESTS_SIM_INTERNAL_H
#define FSDP_C_TESTS_SIM_INTERNAL_H

#include "sim.h"

enum { SIM_STREAMS_MAX = 24, SIM_DIMS_MAX = 4, SIM_USES_MAX = 64 };

/* Vector clock. at[s]: operations of stream s up to this number happened before. */
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
    size_t size; /* requested bytes */
    bool live;
    bool of_host;       /* host memory of a device with streams */
    bool of_group;      /* memory of a process group's allocator */
    const fct_pg *user; /* the process group for whose collectives it was allocated */
    bool shared;        /* shared with a numpy array, which holds no reference */
    int stream;         /* stream whose pool owns the block */
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
/* `checked`: other code may still use the block, so on the CPU every use must be ordered before the
 * free. */
void sim_block_free(sim_block *block, bool checked);
/* Returns the live block that contains these bytes. Records a failure and returns NULL if there is
 * none. */
sim_block *sim_block_around(const void *address, int64_t bytes, const char *what);
void sim_block_touch(sim_block *block, bool write, int stream, uint32_t seq, const sim_clock *now,
                     const char *what);
void sim_memory_begin(void);
void sim_memory_end(void);

/* malloc for the simulation itself; never fails. */
void *sim_alloc(size_t bytes); /* zeroed */
/* The same for short-lived memory of the simulation (arguments of operations, lists of values).
 * Freed blocks are cached, because a sanitizer's malloc dominates the cost of an operation. Freed
 * with sim_scratch_free(). */
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
    void (*run)(void *args);     /* may be NULL */
    void *args;                  /* from sim_scratch(); taken */
    bool (*may_run)(void *args); /* NULL: as soon as earlier operations of the stream have run */
    bool crosses;                /* copies between host and device memory */
    fct_tensor *held[2];         /* references that the backend holds until the operation has run */
} sim_op;

/* Appends the operation to the stream. *point (may be NULL) is its end. */
void sim_stream_push(int stream, const sim_op *op, sim_point *point);
void sim_stream_wait(int stream, const sim_point *point);
bool sim_point_passed(const sim_point *point);
void sim_host_observe(const sim_point *point); /* records that the host has observed the point */
void sim_host_waits(const sim_point *point);
/* Returns the stream of the host's own operations, which run at once, on a device with streams. */
int sim_host_stream(void);
sim_point sim_stream_now(int stream);
int sim_stream_current(void);
int sim_stream_of_native(void *native);
int sim_stream_reserve(bool collective); /* returns a new stream */
sim_clock sim_clock_of(int stream);
void sim_streams_begin(void);
void sim_streams_end(void);

/* ---- tensors (sim_tensor.c) ---- */

/* A strided array in memory, by value. */
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
/* Creates an alias of the same storage, from element `offset` of `t`. Cannot fail. */
fct_tensor *sim_tensor_slice(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                             const int64_t *strides, int64_t offset);
/* Host memory of a device with streams: creates a tensor with undefined values; returns whether a
 * tensor is in host memory, and whether that is pinned. */
fct_tensor *sim_tensor_in_host(fct_dtype dtype, int32_t ndim, const int64_t *sizes, bool pinned);
bool sim_tensor_is_of_host(const fct_tensor *t);
bool sim_tensor_is_pinned(const fct_tensor *t);
int sim_stream_of(const fct_tensor *t); /* stream that works on the tensor's memory */
/* Queued on the current stream: copies `from` to `to`. `from` or `to` may be in host memory. */
sim_point sim_tensor_cross(fct_tensor *to, const fct_tensor *from, const char *what);
/* Queued on the stream of `to`: to = factor * to + from. `from` NULL: to = factor * to. */
void sim_queue_elementwise(fct_tensor *to, const fct_tensor *from, double factor, const char *what);

/* ---- chunks (sim_chunks.c, sim_checksum.c) ---- */

/* Records a failure if the runs do not fill the chunks of the rank shard exactly and in order. */
void sim_check_layout(int64_t world, fct_tensor *const *chunks, size_t count,
                      const fct_chunk_layout *layout);

/* The places of the runs of a gather in its chunks. Freed with free(). Borrows the memory of the
 * chunks. */
typedef struct sim_shard_places sim_shard_places;
sim_shard_places *sim_shard_places_new(fct_tensor *const *chunks, const fct_chunk_layout *layout,
                                       int64_t world);
/* See fct_work_rank_checksum. `places` may be NULL. */
bool sim_shard_checksum(const sim_shard_places *places, size_t run, int64_t rank,
                        uint64_t *checksum);

/* ---- several ranks (sim_ranks.c) ---- */

/* First member of the arguments of a collective's operation. */
typedef struct sim_shared {
    sim_collective *collective; /* NULL: the data of the peers is computed */
    const void *data;           /* of this rank */
    int64_t bytes;
} sim_shared;

void sim_ranks_begin(void);
/* Issues the collective of the operation with the other ranks. It runs after all ranks have sent
 * their data. Returns NULL if this process is one rank. */
sim_collective *sim_share(sim_op *op, const char *group, const fct_op_tag *tag);
/* Whether the collective has failed. Its output is then undefined. */
bool sim_is_lost(const sim_shared *s);
/* Returns -1 with a pending error if the collective has failed. NULL is allowed. */
int sim_check_shared(const sim_collective *c);

/* ---- other files ---- */

extern _Thread_local sim_config sim_now;   /* configuration of the running simulation */
extern _Thread_local int sim_stream_count; /* number of its streams, which is the size of clocks */
extern _Thread_local sim_alive sim_living;
void sim_faults_begin(void);
void sim_groups_begin(void);
void sim_agreements_begin(void);
void sim_groups_end(void);
void sim_autograd_begin(void);
void sim_gil_begin(void);
void sim_gil_end(void);                   /* records a failure if a scope was not left */
void sim_gil_need(const char *name);      /* records a failure in a scope: the call needs the GIL */
void sim_gil_note_call(const char *name); /* a call of the boundary */

#endif
