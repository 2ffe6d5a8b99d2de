/* Implements for the dry run the functions of csrc/bridge that are not in boundary.c, the functions
 * of transport/transport.h, and the kernels of kernels/kernels.h.
 * Collectives complete at once and move nothing. The rank is 0, and all ranks have equal sizes.
 *
 * The dry run's device keeps buffers packed: fct_pg_takes_chunks() returns false. */
#include "boundary_device.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/allocator.h"
#include "../bridge/autograd.h"
#include "../bridge/error.h"
#include "../bridge/gil.h"
#include "../bridge/stream.h"
#include "../core/dtype.h"
#include "../kernels/cast.h"
#include "../kernels/kernels.h"
#include "../transport/transport.h"
#include "boundary.h"

/* A callback for the end of backward. */
typedef struct fcd_end_callback {
    fct_hook hook;
    struct fcd_end_callback *next;
} fcd_end_callback;

/* ---- process groups ---- */

struct fct_pg {
    size_t refs;
    int32_t unit;
    /* the group's name behind the number of the unit; borrowed. fcd_model_fini() frees the name, so
     * events are read before. */
    const char *role;
};

/* Parses a name such as "3 shard": the number of the unit, and the role of the process group. */
int fct_pg_resolve(const char *name, fct_pg **out) {
    fct_pg *pg = (fct_pg *)calloc(1, sizeof *pg);
    if (pg == NULL) {
        return fcd_fail("out of memory for a fake process group");
    }
    pg->refs = 1;
    pg->unit = (int32_t)strtol(name, NULL, 10);
    pg->role = strchr(name, ' ');
    pg->role = pg->role != NULL ? pg->role + 1 : "";
    fcd_current_record->groups++;
    *out = pg;
    return 0;
}

void fct_pg_retain(fct_pg *pg) {
    pg->refs++;
}

void fct_pg_release(fct_pg *pg) {
    if (pg != NULL && --pg->refs == 0) {
        fcd_current_record->groups--;
        free(pg);
    }
}

int fct_pg_register_user(const char *name) {
    (void)name;
    return 0;
}

bool fct_pg_has_premul(fct_pg *pg, fct_device device) {
    (void)pg;
    return device.type == FCT_DEVICE_CUDA;
}

/* The dry run allocates only tensors, so no group has an allocator of its own. */

void fct_allocator_free(fct_allocator *allocator) {
    assert(allocator == NULL);
    (void)allocator;
}

int fct_allocator_serves(fct_allocator *allocator, fct_device device, bool *serves) {
    (void)allocator;
    (void)device;
    *serves = false;
    return 0;
}

int fct_allocator_empty(fct_allocator *allocator, fct_pg *pg, int64_t numel, fct_dtype dtype,
                        fct_device device, fct_tensor **out) {
    (void)allocator;
    (void)pg;
    return fct_tensor_empty(numel, dtype, device, out);
}

int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes) {
    (void)pg;
    (void)device;
    (void)gathers;
    *takes = false;
    return 0;
}

/* ---- collectives ---- */

struct fct_work {
    int64_t number;
};

static int64_t bytes_of(const fct_tensor *t) {
    fct_facts facts;
    fct_tensor_facts(t, &facts);
    return facts.numel * facts.itemsize;
}

/* Records a collective. `larger` is the larger one of its buffers. */
static int issue_collective(fcd_kind kind, const fct_pg *pg, const fct_tensor *larger,
                            fct_work **work) {
    fct_work *new_work = (fct_work *)calloc(1, sizeof *new_work);
    if (new_work == NULL) {
        return fcd_fail("out of memory for a fake work");
    }
    new_work->number = fcd_current_record->works_made++;
    fcd_current_record->works++;
    fcd_append_event(kind, pg->unit, new_work->number, bytes_of(larger), pg->role);
    *work = new_work;
    return 0;
}

int fct_all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                   bool async_op, fct_work **work) {
    (void)tag;
    (void)input;
    (void)async_op;
    return issue_collective(FCD_ALL_GATHER, pg, output, work);
}

int fct_reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                       fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    (void)tag;
    (void)output;
    (void)op;
    (void)factor;
    (void)async_op;
    return issue_collective(FCD_REDUCE_SCATTER, pg, input, work);
}

int fct_all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                   double factor, bool async_op, fct_work **work) {
    (void)tag;
    (void)op;
    (void)factor;
    (void)async_op;
    return issue_collective(FCD_ALL_REDUCE, pg, tensor, work);
}

/* Never called, because no plan of the dry run is split. */
int fct_gather_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks, size_t count,
                      const fct_chunk_layout *layout, fct_work **work) {
    (void)tag;
    (void)pg;
    (void)chunks;
    (void)count;
    (void)layout;
    (void)work;
    return fcd_fail("the dry run has no split all-gather");
}

int fct_reduce_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                      fct_tensor *const *chunks, size_t count, const fct_chunk_layout *layout,
                      fct_reduce_op op, fct_work **work) {
    (void)tag;
    (void)pg;
    (void)output;
    (void)chunks;
    (void)count;
    (void)layout;
    (void)op;
    (void)work;
    return fcd_fail("the dry run has no split reduce-scatter");
}

int fct_work_wait(fct_work *work) {
    fcd_append_event(FCD_WAIT_WORK, -1, work->number, 0, NULL);
    return 0;
}

bool fct_work_done(fct_work *work) {
    (void)work;
    return true;
}

bool fct_work_is_cpu_bound(const fct_work *work) {
    (void)work;
    return false;
}

bool fct_work_rank_checksum(const fct_work *work, size_t run, int64_t rank, uint64_t *checksum) {
    (void)work, (void)run, (void)rank, (void)checksum;
    return false;
}

int fct_compare_plan(fct_pg *pg, fct_device device, uint64_t plan, bool waits,
                     fct_plan_result *result) {
    (void)pg, (void)device, (void)plan, (void)waits;
    *result = (fct_plan_result){.state = FCT_PLANS_EQUAL};
    return 0;
}

int fct_number_root(fct_pg *pg, fct_device device, uint64_t root, uint64_t *number) {
    (void)pg, (void)device, (void)root;
    *number = 0;
    return 0;
}

void fct_add_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    (void)pg, (void)tag, (void)checksum;
}

void fct_add_device_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    (void)pg, (void)tag, (void)checksum;
}

void fct_end_checksum_interval(fct_pg *pg, uint64_t number) {
    (void)pg, (void)number;
}

uint64_t fct_number_checksum_interval(fct_pg *pg) {
    (void)pg;
    return 0;
}

void fct_drop_checksums(fct_pg *pg) {
    (void)pg;
}

int fct_agree_start(fct_pg *pg, bool *issued) {
    (void)pg;
    *issued = false;
    return 0;
}

bool fct_agree_start_waits(fct_pg *pg) {
    (void)pg;
    return false;
}

int fct_agree_await(fct_pg *pg, fct_difference *difference) {
    (void)pg;
    difference->text[0] = '\0';
    return 0;
}

bool fct_gather_is_cpu_bound(fct_pg *pg, int64_t rank_bytes) {
    (void)pg;
    (void)rank_bytes;
    return false;
}

void fct_work_release(fct_work *work) {
    if (work != NULL) {
        fcd_current_record->works--;
        free(work);
    }
}

/* ---- streams and events ---- */

struct fct_event {
    size_t references;
    int64_t number;
    bool recorded;
};

bool fct_device_has_streams(fct_device device) {
    return device.type != FCT_DEVICE_CPU;
}

fct_stream fct_stream_current(fct_device device) {
    return (fct_stream){.id = fcd_current_record->stream, .device = device};
}

int fct_stream_new(fct_device device, bool high_priority, fct_stream *out) {
    (void)high_priority;
    *out = (fct_stream){.id = ++fcd_current_record->streams_made, .device = device};
    return 0;
}

fct_stream fct_stream_set_current(fct_stream s) {
    const fct_stream previous = fct_stream_current(s.device);
    fcd_current_record->stream = s.id;
    return previous;
}

int fct_launch_enter(fct_device device, fct_device *before, void **native) {
    *before = device;
    *native = NULL;
    return 0;
}

void fct_launch_leave(fct_device before) {
    (void)before;
}

void fct_gil_enter(void) {}

void fct_gil_leave(void) {}

int fct_event_new(fct_device device, fct_event **out) {
    (void)device;
    fct_event *e = (fct_event *)calloc(1, sizeof *e);
    if (e == NULL) {
        return fcd_fail("out of memory for a fake event");
    }
    e->references = 1;
    e->number = fcd_current_record->events_made++;
    fcd_current_record->stream_events++;
    *out = e;
    return 0;
}

/* Records an event of stream `s`, which may differ from the current stream. */
static void append_event_on(fcd_kind kind, const fct_event *e, fct_stream s) {
    const int64_t current = fcd_current_record->stream;
    fcd_current_record->stream = s.id;
    fcd_append_event(kind, -1, e->number, 0, NULL);
    fcd_current_record->stream = current;
}

int fct_event_record(fct_event *e, fct_stream s) {
    e->recorded = true;
    append_event_on(FCD_RECORD_EVENT, e, s);
    return 0;
}

int fct_event_wait(fct_event *e, fct_stream s) {
    if (e->recorded) {
        append_event_on(FCD_WAIT_EVENT, e, s);
    }
    return 0;
}

int fct_event_synchronize(fct_event *e) {
    if (e->recorded) {
        fcd_append_event(FCD_SYNCHRONIZE_EVENT, -1, e->number, 0, NULL);
    }
    return 0;
}

int fct_event_is_done(fct_event *e, bool *done) {
    (void)e;
    *done = true;
    return 0;
}

void fct_event_share(fct_event *e) {
    e->references++;
}

bool fct_event_unshare(fct_event *e) {
    if (e->references == 1) {
        return false;
    }
    e->references--;
    return true;
}

void fct_event_free(fct_event *e) {
    if (e != NULL) {
        assert(e->references == 1);
        fcd_current_record->stream_events--;
        free(e);
    }
}

/* ---- autograd ---- */

bool fct_grad_enabled(void) {
    return fcd_current_record->grad_enabled;
}

bool fct_in_backward(void) {
    return fcd_current_record->in_backward;
}

int fct_autograd_subscribe(fct_tensor *leaf, const fct_hook *hook, fct_grad_subscription **out) {
    fct_grad_subscription *subscription = (fct_grad_subscription *)calloc(1, sizeof *subscription);
    if (subscription == NULL) {
        return fcd_fail("out of memory for a gradient hook");
    }
    subscription->hook = *hook;
    fcd_add_subscription(leaf, subscription);
    fcd_current_record->subscriptions++;
    *out = subscription;
    return 0;
}

void fct_grad_subscription_free(fct_grad_subscription *subscription) {
    if (subscription == NULL) {
        return;
    }
    if (subscription->leaf != NULL) {
        fcd_remove_subscription(subscription->leaf, subscription);
    }
    fcd_current_record->subscriptions--;
    free(subscription);
}

int fct_autograd_at_end(const fct_hook *hook) {
    fcd_end_callback *end = (fcd_end_callback *)calloc(1, sizeof *end);
    if (end == NULL) {
        return fcd_fail("out of memory for a callback");
    }
    end->hook = *hook;
    fcd_end_callback **link = &fcd_current_record->end_callbacks;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = end;
    hook->retain(hook->owner);
    return 0;
}

static fct_hook take_end_callback(void) {
    fcd_end_callback *end = fcd_current_record->end_callbacks;
    const fct_hook hook = end->hook;
    fcd_current_record->end_callbacks = end->next;
    free(end);
    return hook;
}

int fcd_run_end_callbacks(void) {
    int result = 0;
    while (result == 0 && fcd_current_record->end_callbacks != NULL) {
        const fct_hook hook = take_end_callback();
        result = hook.call(hook.owner);
        hook.release(hook.owner);
    }
    return result;
}

void fcd_drop_end_callbacks(void) {
    while (fcd_current_record->end_callbacks != NULL) {
        const fct_hook hook = take_end_callback();
        hook.release(hook.owner);
    }
}

/* ---- profiler, errors, functorch ---- */

bool fct_profile_active(void) {
    return true;
}

void *fct_profile_enter(const char *name) {
    fcd_enter_range(name);
    return fcd_current_record;
}

void fct_profile_exit(void *token) {
    if (token != NULL) {
        fcd_leave_range();
    }
}

void *fct_error_set_aside(void) {
    return NULL;
}

void fct_error_put_back(void *error) {
    (void)error;
}

void fct_error_explain(const char *text) {
    (void)text;
}

void *fct_functorch_pause(void) {
    return NULL;
}

void fct_functorch_resume(void *pause) {
    (void)pause;
}

/* ---- kernels ---- */

static const char *pack(const fck_segment *segments, size_t count, void *stream) {
    int64_t bytes = 0;
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        bytes += segments[i].count * fc_dtype_size(segments[i].dst_dtype);
    }
    fcd_append_event(FCD_PACK, -1, 0, bytes, NULL);
    return NULL;
}

static const char *unpack(const void *gathered, int64_t rank_bytes, int64_t world,
                          const fck_slot *slots, size_t count, void *stream) {
    int64_t bytes = 0;
    (void)gathered;
    (void)rank_bytes;
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        bytes += world * slots[i].blocks * slots[i].bytes;
    }
    fcd_append_event(FCD_UNPACK, -1, 0, bytes, NULL);
    return NULL;
}

static const char *pack_gradients(const fck_gradient *gradients, size_t count, int64_t world,
                                  void *dst, int64_t rank_numel, fck_dtype dst_dtype,
                                  void *stream) {
    (void)gradients;
    (void)count;
    (void)dst;
    (void)stream;
    fcd_append_event(FCD_PACK_GRADIENTS, -1, 0, world * rank_numel * fc_dtype_size(dst_dtype),
                     NULL);
    return NULL;
}

static int can_cast(fck_dtype src, fck_dtype dst) {
    return fck_castable(src, dst);
}

const fck_backend *fck_backend_of(int device_type) {
    static const fck_backend counting = {.name = "counting",
                                         .pack = pack,
                                         .unpack = unpack,
                                         .pack_gradients = pack_gradients,
                                         .can_cast = can_cast};
    (void)device_type;
    return &counting;
}

int fck_can_cast(int device_type, fck_dtype src, fck_dtype dst) {
    (void)device_type;
    return can_cast(src, dst);
}
