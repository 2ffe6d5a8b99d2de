/* Checksums of device memory; see device_checksums.h. Owns the tables, and the copies of ended
 * intervals.
 *
 * All comm contexts of the process share one queue of ended intervals: the transport counts
 * intervals by process group, and contexts may share process groups. The queue keeps the order of
 * the ends of backwards, which is equal on all ranks. The times of the copies differ between ranks.
 * The GIL guards the queue.
 *
 * Streams: the stream that takes the first sum zeroes the table. Each addition waits for the event
 * `zeroed`. The end of the interval makes the current stream wait for all streams with additions.
 * The table is released when its stream waits for all additions and for the copy, unless a call of
 * the device has failed. */
#include "device_checksums.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/autograd.h"
#include "../bridge/error.h"
#include "../bridge/tensor.h"

enum {
    TABLE_SUMS = 2048,
    STREAMS_MAX = 8, /* with additions in one interval */
};

/* A completed collective. */
typedef struct checksum_entry {
    fct_pg *pg; /* counted */
    fct_op_tag tag;
    uint64_t number; /* of the interval of `pg` */
    int64_t index;   /* in the table; -1: the checksum is unknown */
} checksum_entry;

typedef struct entry_list {
    checksum_entry *items;
    size_t count;
    size_t capacity;
} entry_list;

/* An ended interval. */
typedef struct ended_interval {
    const fc_device_checksums *owner;
    entry_list entries;
    fct_tensor *table;
    fct_stream table_stream; /* that has allocated `table` */
    fct_event *zeroed;
    fct_tensor *sums; /* pinned copy of the table; NULL: no checksum is known */
    fct_event *copied;
    struct ended_interval *next;
} ended_interval;

struct fc_device_checksums {
    fct_device device;
    fct_tensor *table;               /* of the open interval; NULL: none */
    fct_stream table_stream;         /* that has allocated `table` */
    fct_event *zeroed;               /* of `table` */
    uint64_t *sums;                  /* the memory of `table` */
    size_t taken;                    /* sums of `table` */
    uint64_t interval;               /* number of the open interval */
    fct_stream streams[STREAMS_MAX]; /* with additions to `table` */
    size_t stream_count;
    entry_list entries;
    bool incomplete; /* an entry is missing: the interval is unknown */
};

static ended_interval *oldest; /* the queue; the GIL guards it */

/* ---- entries ---- */

static void release_entries(entry_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        fct_pg_release(list->items[i].pg);
    }
    free(list->items);
    *list = (entry_list){0};
}

/* Returns false if malloc fails. */
static bool reserve_entry(entry_list *list) {
    if (list->count < list->capacity) {
        return true;
    }
    const size_t capacity = list->capacity > 0 ? 2 * list->capacity : 64;
    checksum_entry *items = (checksum_entry *)realloc(list->items, capacity * sizeof *items);
    if (items == NULL) {
        return false;
    }
    list->items = items;
    list->capacity = capacity;
    return true;
}

/* ---- ended intervals ---- */

/* A later allocation on the stream of the table follows all uses of the table. */
static void free_ended(ended_interval *ended) {
    if (ended->copied != NULL) {
        void *error = fct_error_set_aside();
        FC_IGNORE(fct_event_wait(ended->copied, ended->table_stream));
        fct_error_put_back(error);
    }
    release_entries(&ended->entries);
    fct_tensor_release(ended->table);
    fct_tensor_release(ended->sums);
    fct_event_free(ended->zeroed);
    fct_event_free(ended->copied);
    free(ended);
}

static void append_ended(ended_interval *ended) {
    ended_interval **end = &oldest;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = ended;
}

/* Removes the intervals of a context from the queue. Returns them as a list. */
static ended_interval *remove_ended(const fc_device_checksums *owner) {
    ended_interval *removed = NULL;
    ended_interval **at = &oldest;
    while (*at != NULL) {
        ended_interval *ended = *at;
        if (ended->owner == owner) {
            *at = ended->next;
            ended->next = removed;
            removed = ended;
        } else {
            at = &ended->next;
        }
    }
    return removed;
}

/* Passes the checksums of the interval to the transport. */
static void pass_interval(const ended_interval *ended) {
    const entry_list *list = &ended->entries;
    fct_facts facts = {0};
    if (ended->sums != NULL) {
        fct_tensor_facts(ended->sums, &facts);
        assert(facts.numel == TABLE_SUMS * (int64_t)sizeof(uint64_t));
    }
    for (size_t i = 0; i < list->count; i++) {
        const checksum_entry *entry = &list->items[i];
        uint64_t sum = 0;
        if (facts.data != NULL && entry->index >= 0) {
            memcpy(&sum, (const char *)facts.data + entry->index * (int64_t)sizeof sum, sizeof sum);
            sum = sum != 0 ? sum : 1;
        }
        fct_add_device_checksum(entry->pg, &entry->tag, sum);
    }
    for (size_t i = 0; i < list->count; i++) {
        fct_end_checksum_interval(list->items[i].pg, list->items[i].number);
    }
}

/* Passes the intervals whose copies are done, up to the first one that is not. */
static fc_status pass_ended(void) {
    fc_status status = FC_OK;
    while (oldest != NULL) {
        ended_interval *ended = oldest;
        bool done = true;
        if (ended->copied != NULL) {
            FC_TRY_RAISED(fct_event_is_done(ended->copied, &done));
        }
        if (!done) {
            return FC_OK;
        }
        oldest = ended->next;
        pass_interval(ended);
        free_ended(ended);
    }
done:
    return status;
}

/* ---- the table of the open interval ---- */

/* Makes a stream wait for all additions. */
static fc_status join_streams(fct_stream waiter, const fct_stream *streams, size_t count) {
    fc_status status = FC_OK;
    fct_event *event = NULL;
    for (size_t i = 0; i < count; i++) {
        if (streams[i].id == waiter.id) {
            continue;
        }
        FC_TRY_RAISED(fct_event_new(waiter.device, &event));
        FC_TRY_RAISED(fct_event_record(event, streams[i]));
        FC_TRY_RAISED(fct_event_wait(event, waiter));
        fct_event_free(event);
        event = NULL;
    }
done:
    fct_event_free(event);
    return status;
}

void fc_device_checksums_free(fc_device_checksums *d) {
    assert(d == NULL || d->taken <= TABLE_SUMS);
    if (d == NULL) {
        return;
    }
    for (ended_interval *ended = remove_ended(d); ended != NULL;) {
        ended_interval *next = ended->next;
        free_ended(ended);
        ended = next;
    }
    release_entries(&d->entries);
    void *error = fct_error_set_aside();
    FC_IGNORE(join_streams(d->table_stream, d->streams, d->stream_count));
    fct_error_put_back(error);
    fct_tensor_release(d->table);
    fct_event_free(d->zeroed);
    free(d);
}

/* Returns the kernels of the device, or NULL if they compute no checksums. */
static const fck_backend *find_kernels(fct_device device) {
    const fck_backend *kernels = fck_backend_of(device.type);
    return kernels != NULL && kernels->add_checksums != NULL ? kernels : NULL;
}

/* Writes whether a CUDA graph captures the current stream. */
static fc_status query_capture(fct_device device, bool *capturing) {
    fct_device before;
    void *stream = NULL;
    const fck_backend *kernels = find_kernels(device);
    *capturing = false;
    if (kernels == NULL || kernels->is_capturing == NULL) {
        return FC_OK;
    }
    if (fct_launch_enter(device, &before, &stream) != 0) {
        return FC_ERAISED;
    }
    *capturing = kernels->is_capturing(stream) != 0;
    fct_launch_leave(before);
    return FC_OK;
}

/* Allocates and zeroes the table on the current stream. Leaves it NULL if it has no memory. */
static fc_status make_table(fc_device_checksums *d) {
    fc_status status = FC_OK;
    fct_tensor *sample = NULL;
    fct_tensor *table = NULL;
    fct_event *zeroed = NULL;
    fct_facts facts;
    void *pause = fct_functorch_pause(); /* transforms must not wrap the new tensors */
    FC_TRY_RAISED(
        fct_tensor_empty(TABLE_SUMS * (int64_t)sizeof(uint64_t), FCK_UINT8, d->device, &sample));
    FC_TRY_RAISED(fct_tensor_zeros_like(sample, &table));
    fct_tensor_facts(table, &facts);
    if (facts.data == NULL || !facts.contiguous) {
        goto done;
    }
    FC_TRY_RAISED(fct_event_new(d->device, &zeroed));
    FC_TRY_RAISED(fct_event_record(zeroed, fct_stream_current(d->device)));
    *d = (fc_device_checksums){.device = d->device,
                               .table = table,
                               .table_stream = fct_stream_current(d->device),
                               .zeroed = zeroed,
                               .sums = (uint64_t *)facts.data,
                               .interval = d->interval,
                               .entries = d->entries,
                               .incomplete = d->incomplete};
    table = NULL;
    zeroed = NULL;
done:
    fct_tensor_release(sample);
    fct_tensor_release(table);
    fct_event_free(zeroed);
    fct_functorch_resume(pause);
    return status;
}

/* Makes *d, unless it exists. */
static fc_status make_checksums(fc_device_checksums **d, fct_device device) {
    if (*d == NULL) {
        *d = (fc_device_checksums *)calloc(1, sizeof **d);
        if (*d == NULL) {
            return FC_ENOMEM;
        }
        (*d)->device = device;
    }
    return FC_OK;
}

fc_status fc_device_checksums_take(fc_device_checksums **d, fct_device device, fc_device_sum *sum) {
    assert(fct_device_has_streams(device));
    fc_status status = FC_OK;
    bool capturing = false;
    *sum = (fc_device_sum){0};
    FC_TRY(make_checksums(d, device));
    if ((*d)->table == NULL && find_kernels(device) != NULL) {
        FC_TRY(query_capture(device, &capturing));
        if (!capturing) {
            FC_TRY(make_table(*d));
        }
    }
    if ((*d)->table != NULL && (*d)->taken < TABLE_SUMS) {
        *sum = (fc_device_sum){
            .at = &(*d)->sums[(*d)->taken++], .owner = *d, .interval = (*d)->interval};
    }
done:
    return status;
}

/* Whether the sum is one of the open interval. */
static bool is_open(const fc_device_checksums *d, const fc_device_sum *sum) {
    return sum->at != NULL && sum->owner == d && sum->interval == d->interval;
}

/* Adds the stream to the list. Returns false if the list is full. */
static bool add_stream(fc_device_checksums *d, fct_stream stream) {
    size_t i = 0;
    while (i < d->stream_count && d->streams[i].id != stream.id) {
        i++;
    }
    if (i == STREAMS_MAX) {
        return false;
    }
    d->streams[i] = stream;
    d->stream_count += i == d->stream_count ? 1 : 0;
    return true;
}

fc_status fc_device_checksums_add(fc_device_checksums *d, fc_device_sum *sum,
                                  const fck_range *ranges, size_t count, fc_error *err) {
    assert(count <= FCK_RANGES);
    fct_device before;
    void *native = NULL;
    const char *failure = NULL;
    const fck_backend *kernels = is_open(d, sum) ? find_kernels(d->device) : NULL;
    if (kernels == NULL) {
        sum->at = NULL;
        return FC_OK;
    }
    const fct_stream stream = fct_stream_current(d->device);
    if (fct_launch_enter(d->device, &before, &native) != 0) {
        return FC_ERAISED;
    }
    const bool capturing = kernels->is_capturing != NULL && kernels->is_capturing(native) != 0;
    bool ordered = true;
    if (capturing || !add_stream(d, stream)) {
        sum->at = NULL;
    } else {
        ordered = fct_event_wait(d->zeroed, stream) == 0;
        failure = ordered ? kernels->add_checksums(ranges, count, sum->at, native) : NULL;
    }
    fct_launch_leave(before);
    if (failure != NULL) {
        return fc_error_set(err, FC_ESTATE, "a checksum kernel failed: %s", failure);
    }
    return ordered ? FC_OK : FC_ERAISED;
}

void fc_device_checksums_complete(fc_device_checksums **d, fct_device device,
                                  const fc_device_sum *sum, fc_process_group *pg,
                                  const char *modules, fc_operation operation) {
    assert(operation != FC_REDUCE_SCATTER);
    fct_op_tag tag;
    if (make_checksums(d, device) != FC_OK ||
        !fc_process_group_describe_checksum(pg, modules, operation, &tag)) {
        return;
    }
    entry_list *entries = &(*d)->entries;
    /* entries without a sum count too */
    if (entries->count == 2 * (size_t)TABLE_SUMS || !reserve_entry(entries)) {
        (*d)->incomplete = true;
        return;
    }
    const bool known = is_open(*d, sum);
    tag.group = ""; /* the names of modules may not outlive this call */
    fct_pg_retain(pg->handle);
    entries->items[entries->count++] = (checksum_entry){
        .pg = pg->handle, .tag = tag, .index = known ? (int64_t)(sum->at - (*d)->sums) : -1};
}

/* ---- the end of an interval ---- */

bool fc_device_checksums_is_half_full(const fc_device_checksums *d) {
    return d != NULL && d->entries.count >= TABLE_SUMS / 2;
}

/* Queues the copy of the table to pinned memory, if `copies`. On failure, and without the copy, the
 * checksums are unknown. */
static fc_status copy_table(const fc_device_checksums *d, ended_interval *ended,
                            const fct_stream *streams, size_t count, bool copies) {
    fc_status status = FC_OK;
    fct_tensor *sums = NULL;
    void *pause = fct_functorch_pause(); /* transforms must not wrap the copy */
    FC_TRY(join_streams(fct_stream_current(d->device), streams, count));
    FC_TRY_RAISED(fct_event_new(d->device, &ended->copied));
    if (copies) {
        FC_TRY_RAISED(fct_tensor_to_host(ended->table, true, &sums));
    }
    FC_TRY_RAISED(fct_event_record(ended->copied, fct_stream_current(d->device)));
    ended->sums = sums;
    sums = NULL;
done:
    fct_functorch_resume(pause);
    fct_tensor_release(sums);
    return status;
}

/* Numbers the interval of each process group. */
static void number_entries(entry_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        size_t first = 0;
        while (list->items[first].pg != list->items[i].pg) {
            first++;
        }
        list->items[i].number =
            first < i ? list->items[first].number : fct_number_checksum_interval(list->items[i].pg);
    }
}

/* Moves the open interval to `ended`. Another one is open afterwards. */
static void detach(fc_device_checksums *d, ended_interval *ended) {
    number_entries(&d->entries);
    *ended = (ended_interval){.owner = d,
                              .entries = d->entries,
                              .table = d->table,
                              .table_stream = d->table_stream,
                              .zeroed = d->zeroed};
    *d = (fc_device_checksums){.device = d->device, .interval = d->interval + 1};
}

fc_status fc_device_checksums_end_interval(fc_device_checksums *d) {
    fc_status status = FC_OK;
    fct_stream streams[STREAMS_MAX];
    bool capturing = false;
    if (d == NULL) {
        return FC_OK;
    }
    assert(d->stream_count <= STREAMS_MAX && d->taken <= TABLE_SUMS);
    FC_TRY(query_capture(d->device, &capturing));
    if (capturing) { /* a capture allows no query of an event */
        fc_device_checksums_drop(d);
        return FC_OK;
    }
    if (d->entries.count > 0) {
        ended_interval *ended = (ended_interval *)calloc(1, sizeof *ended);
        if (ended == NULL) {
            return FC_ENOMEM;
        }
        const size_t count = d->stream_count;
        const bool copies = !d->incomplete;
        memcpy(streams, d->streams, sizeof streams);
        detach(d, ended);
        if (count > 0) { /* may release the GIL, so `ended` is not in the queue yet */
            status = copy_table(d, ended, streams, count, copies);
        }
        append_ended(ended);
    }
    FC_TRY(status);
    FC_TRY(pass_ended());
done:
    return status;
}

void fc_device_checksums_drop(fc_device_checksums *d) {
    assert(d == NULL || d->entries.count <= d->entries.capacity);
    for (size_t i = 0; d != NULL && i < d->entries.count; i++) {
        d->entries.items[i].index = -1;
    }
}
