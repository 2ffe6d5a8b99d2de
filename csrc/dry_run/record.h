/* The record of a dry run: its events in order, and the bytes of memory in use by purpose.
 *
 * The functions of the boundary have no argument for the record. The record of the running dry run
 * is therefore a thread-local pointer, fcd_current_record. A dry run is one call and holds the
 * GIL. */
#ifndef FSDP_C_DRY_RUN_RECORD_H
#define FSDP_C_DRY_RUN_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(enumerator, name). Every event has a call, a unit and a stream. The kind of an event determines
 * its other fields:
 *
 *   - alloc, free: object is the storage. bytes is the size. label is the purpose.
 *   - enter, leave: label is the name of torch's profiler range, without "FSDP::".
 *   - pack, unpack, pack_gradients: bytes that the kernel writes.
 *   - copy, cast, add, divide, fill: bytes that the operation writes. If autograd adds to the
 *     gradient of a parameter, label is the name of the parameter.
 *   - upload, download: bytes copied from, and to, host memory.
 *   - all_gather, reduce_scatter, all_reduce: object is the work. bytes is the size of the larger
 *     buffer. label is the process group: shard, replicate or smaller.
 *   - wait_work: object is the work.
 *   - record_event, wait_event, synchronize_event: object is the event. A wait is for the latest
 *     record_event of that event.
 *   - register: object is the fc_sharded_state. label is the name of the parameter.
 *   - gradient: bytes of the gradient. label is the name of the parameter. */
#define FCD_KINDS(X)                                                                               \
    X(FCD_ALLOC, "alloc")                                                                          \
    X(FCD_FREE, "free")                                                                            \
    X(FCD_ENTER, "enter")                                                                          \
    X(FCD_LEAVE, "leave")                                                                          \
    X(FCD_PACK, "pack")                                                                            \
    X(FCD_UNPACK, "unpack")                                                                        \
    X(FCD_PACK_GRADIENTS, "pack_gradients")                                                        \
    X(FCD_COPY, "copy")                                                                            \
    X(FCD_CAST, "cast")                                                                            \
    X(FCD_ADD, "add")                                                                              \
    X(FCD_DIVIDE, "divide")                                                                        \
    X(FCD_FILL, "fill")                                                                            \
    X(FCD_UPLOAD, "upload")                                                                        \
    X(FCD_DOWNLOAD, "download")                                                                    \
    X(FCD_ALL_GATHER, "all_gather")                                                                \
    X(FCD_REDUCE_SCATTER, "reduce_scatter")                                                        \
    X(FCD_ALL_REDUCE, "all_reduce")                                                                \
    X(FCD_WAIT_WORK, "wait_work")                                                                  \
    X(FCD_RECORD_EVENT, "record_event")                                                            \
    X(FCD_WAIT_EVENT, "wait_event")                                                                \
    X(FCD_SYNCHRONIZE_EVENT, "synchronize_event")                                                  \
    X(FCD_REGISTER, "register")                                                                    \
    X(FCD_GRADIENT, "gradient")

typedef enum fcd_kind {
#define FCD_KIND_ENUM(name, text) name,
    FCD_KINDS(FCD_KIND_ENUM)
#undef FCD_KIND_ENUM
        FCD_KIND_COUNT
} fcd_kind;

/* Purposes of memory, in order: sharded parameters; unsharded parameters and all-gather buffers;
 * gradients and reduction buffers; activations and other tensors of the model; host memory of a
 * device with streams. */
#define FCD_PURPOSE_LIST(X)                                                                        \
    X(FCD_SHARDS, "shards")                                                                        \
    X(FCD_GATHERED, "gathered")                                                                    \
    X(FCD_GRADIENTS, "gradients")                                                                  \
    X(FCD_ACTIVATIONS, "activations")                                                              \
    X(FCD_HOST, "host")

typedef enum fcd_purpose {
#define FCD_PURPOSE_ENUM(name, text) name,
    FCD_PURPOSE_LIST(FCD_PURPOSE_ENUM)
#undef FCD_PURPOSE_ENUM
        FCD_PURPOSE_COUNT
} fcd_purpose;

typedef struct fcd_event {
    fcd_kind kind;
    int32_t call;   /* index of the running call; -1: initialization of the model */
    int32_t unit;   /* -1: none */
    int32_t stream; /* current stream; 0: the compute stream */
    int64_t object;
    int64_t bytes;
    int64_t live;      /* bytes of the same purpose in use after an alloc or free */
    const char *label; /* valid until fcd_model_fini(); NULL: none */
} fcd_event;

enum { FCD_RANGES_MAX = 32 };

typedef struct fcd_range {
    int32_t unit;
    const char *label;
} fcd_range;

typedef struct fcd_record {
    fcd_event *events; /* owned */
    size_t count;
    size_t capacity;
    bool failed; /* no memory for an event: the list is incomplete */
    bool closed; /* the run is over: nothing is appended */
    int64_t live[FCD_PURPOSE_COUNT];
    int64_t device_live; /* sum of all purposes but FCD_HOST */
    int64_t device_peak; /* maximum of device_live so far */
    /* Numbers of boundary objects that exist. A dry run releases all of its objects. */
    size_t tensors, storages, works, stream_events, groups, subscriptions;
    /* State of the simulated device and of simulated autograd. */
    bool has_streams;
    bool in_backward;
    bool grad_enabled;
    int32_t call;
    fcd_purpose purpose; /* purpose of the device memory that the running call allocates */
    int64_t stream;      /* current stream */
    /* Numbers of objects created so far, from which new objects get their numbers. */
    int64_t streams_made, storages_made, works_made, events_made;
    fcd_range ranges[FCD_RANGES_MAX]; /* profiler ranges that are open, outermost first */
    size_t range_count;
    char **labels; /* [label_count] owned names of ranges */
    size_t label_count;
    struct fcd_end_callback *end_callbacks; /* callbacks for the end of backward, in order; owned */
    /* [deferred_count] references that are released at the end of the call */
    struct fct_tensor **deferred;
    size_t deferred_count;
    char error[512]; /* message of a failure of the boundary; empty: none */
} fcd_record;

extern _Thread_local fcd_record *fcd_current_record;

extern const char *const fcd_kind_names[FCD_KIND_COUNT];
extern const char *const fcd_purpose_names[FCD_PURPOSE_COUNT];

/* Initializes the record and installs it as the record of this thread. Precondition: no dry run is
 * running in this thread. */
void fcd_record_init(fcd_record *r, bool has_streams);
/* Frees the events and removes the record from this thread. Precondition: `r` is
 * fcd_current_record. */
void fcd_record_fini(fcd_record *r);
/* Returns the number of boundary objects that exist. */
size_t fcd_record_objects(const fcd_record *r);

/* Appends an event to the record of this thread. Unit and stream are the current ones, unless
 * `unit` is at least 0. */
void fcd_append_event(fcd_kind kind, int32_t unit, int64_t object, int64_t bytes,
                      const char *label);
/* Counts the bytes of an allocation (negative: of a free) and appends its event. A call with 0
 * bytes has no effect. */
void fcd_append_memory_event(fcd_purpose purpose, int64_t storage, int64_t bytes);
/* Opens a profiler range. `name` is torch's name of the range, such as "FSDP::all_gather (#3)" for
 * unit 3. */
void fcd_enter_range(const char *name);
void fcd_leave_range(void);
/* Stores the message of a failure in the record and returns -1. */
int fcd_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
