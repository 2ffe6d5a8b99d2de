/* Checksums of device memory; see device_checksums.h. Owns the tables, and the copies of ended
 * intervals.
 *
 * All comm contexts of the process share one queue of ended intervals, because the transport counts
 * intervals by process group, and contexts may share process groups. The queue keeps the order of
 * the ends of backwards, which is equal on all ranks. Times of copies are not. */
#include "device_checksums.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/tensor.h"

enum {
    TABLE_SUMS = 2048,
    /* If more intervals wait for their copies, the checksums of the next one are unknown. */
    COPIES_MAX = 8,
};

/* A completed collective. */
typedef struct checksum_entry {
    fct_pg *pg; /* counted */
    fct_op_tag tag;
    uint64_t number; /* of the collectives over `pg` at the end of the interval */
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
    fct_tensor *sums; /* pinned copy of the table; NULL: no checksum is known */
    fct_event *copied;
    struct ended_interval *next;
} ended_interval;

struct fc_device_checksums {
    fct_device device;
    fct_tensor *sample; /* has the shape of a table */
    fct_tensor *table;  /* of the open interval; NULL: none */
    uint64_t *sums;     /* the memory of `table` */
    size_t taken;       /* sums of `table` */
    uint64_t interval;  /* number of the open interval */
    entry_list entries;
    bool incomplete; /* an entry is missing: all checksums of the interval are unknown */
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

/* Returns false without memory. */
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

static void free_ended(ended_interval *ended) {
    release_entries(&ended->entries);
    fct_tensor_release(ended->sums);
    fct_event_free(ended->copied);
    free(ended);
}

/* Returns the number of ended intervals. */
static size_t count_ended(void) {
    size_t count = 0;
    for (const ended_interval *e = oldest; e != NULL; e = e->next) {
        count++;
    }
    return count;
}

static void append_ended(ended_interval *ended) {
    ended_interval **end = &oldest;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = ended;
}

/* Passes the checksums of the interval to the transport. */
static void pass(const ended_interval *ended) {
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
        fct_add_checksum(entry->pg, &entry->tag, sum);
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
        pass(ended);
        oldest = ended->next;
        free_ended(ended);
    }
done:
    return status;
}

/* ---- the open interval ---- */

void fc_device_checksums_free(fc_device_checksums *d) {
    assert(d == NULL || d->taken <= TABLE_SUMS);
    ended_interval **at = &oldest;
    while (d != NULL && *at != NULL) {
        ended_interval *ended = *at;
        if (ended->owner == d) {
            *at = ended->next;
            free_ended(ended);
        } else {
            at = &ended->next;
        }
    }
    if (d != NULL) {
        release_entries(&d->entries);
        fct_tensor_release(d->table);
        fct_tensor_release(d->sample);
        free(d);
    }
}

/* Writes whether a CUDA graph captures the current stream. */
static fc_status query_capture(fct_device device, bool *capturing) {
    fct_device before;
    void *stream = NULL;
    const fck_backend *kernels = fck_backend_of(device.type);
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

fc_status fc_device_checksums_begin(fc_device_checksums **d, fct_device device) {
    assert(d != NULL && fct_device_has_streams(device));
    fc_status status = FC_OK;
    const fck_backend *kernels = fck_backend_of(device.type);
    fct_tensor *table = NULL;
    fct_facts facts;
    bool capturing = false;
    if (*d == NULL) {
        *d = (fc_device_checksums *)calloc(1, sizeof **d);
        if (*d == NULL) {
            return FC_ENOMEM;
        }
        (*d)->device = device;
    }
    if ((*d)->table != NULL || kernels == NULL || kernels->add_checksums == NULL) {
        return FC_OK;
    }
    FC_TRY(query_capture(device, &capturing));
    if (capturing) {
        return FC_OK;
    }
    if ((*d)->sample == NULL) {
        FC_TRY_RAISED(fct_tensor_empty(TABLE_SUMS * (int64_t)sizeof(uint64_t), FCK_UINT8, device,
                                       &(*d)->sample));
    }
    FC_TRY_RAISED(fct_tensor_zeros_like((*d)->sample, &table));
    fct_tensor_facts(table, &facts);
    (*d)->table = table;
    (*d)->sums = (uint64_t *)facts.data;
    (*d)->taken = 0;
done:
    return status;
}

fc_device_sum fc_device_checksums_take(fc_device_checksums *d) {
    assert(d == NULL || d->taken <= TABLE_SUMS);
    if (d == NULL || d->table == NULL || d->taken == TABLE_SUMS) {
        return (fc_device_sum){0};
    }
    return (fc_device_sum){.at = &d->sums[d->taken++], .interval = d->interval};
}

fc_status fc_device_checksums_add(const fc_device_checksums *d, fc_device_sum *sum,
                                  const fck_range *ranges, size_t count, fc_error *err) {
    assert(count <= FCK_RANGES);
    fct_device before;
    void *stream = NULL;
    const char *failure = NULL;
    if (sum->at == NULL) {
        return FC_OK;
    }
    const fck_backend *kernels = fck_backend_of(d->device.type);
    if (sum->interval != d->interval || kernels == NULL || kernels->add_checksums == NULL) {
        sum->at = NULL;
        return FC_OK;
    }
    if (fct_launch_enter(d->device, &before, &stream) != 0) {
        return FC_ERAISED;
    }
    if (kernels->is_capturing != NULL && kernels->is_capturing(stream) != 0) {
        sum->at = NULL;
    } else {
        failure = kernels->add_checksums(ranges, count, sum->at, stream);
    }
    fct_launch_leave(before);
    return failure == NULL ? FC_OK
                           : fc_error_set(err, FC_ESTATE, "a checksum kernel failed: %s", failure);
}

void fc_device_checksums_complete(fc_device_checksums *d, const fc_device_sum *sum,
                                  fc_process_group *pg, const char *modules,
                                  fc_operation operation) {
    assert(operation != FC_REDUCE_SCATTER);
    fct_op_tag tag;
    if (d == NULL || !fc_process_group_describe_checksum(pg, modules, operation, &tag)) {
        return;
    }
    if (!reserve_entry(&d->entries)) {
        d->incomplete = true;
        return;
    }
    const bool known = sum->at != NULL && sum->interval == d->interval;
    tag.group = ""; /* the names of modules may not outlive this call */
    fct_pg_retain(pg->handle);
    d->entries.items[d->entries.count++] = (checksum_entry){
        .pg = pg->handle, .tag = tag, .index = known ? (int64_t)(sum->at - d->sums) : -1};
}

fc_status fc_device_checksums_needs_copy(const fc_device_checksums *d, bool *copies) {
    assert(copies != NULL);
    fc_status status = FC_OK;
    bool capturing = false;
    *copies = false;
    if (d == NULL || d->table == NULL || d->taken == 0 || d->incomplete ||
        count_ended() >= COPIES_MAX) {
        return FC_OK;
    }
    FC_TRY(query_capture(d->device, &capturing));
    *copies = !capturing;
done:
    return status;
}

/* Queues the copy of the table to pinned memory, and releases the table. */
static fc_status copy_table(fc_device_checksums *d, ended_interval *ended) {
    fc_status status = FC_OK;
    FC_TRY_RAISED(fct_event_new(d->device, &ended->copied));
    FC_TRY_RAISED(fct_tensor_to_host(d->table, true, &ended->sums));
    FC_TRY_RAISED(fct_event_record(ended->copied, fct_stream_current(d->device)));
    fct_tensor_release(d->table);
    d->table = NULL;
    d->sums = NULL;
done:
    return status;
}

fc_status fc_device_checksums_end_interval(fc_device_checksums *d, bool copies) {
    assert(d == NULL || !copies || d->table != NULL);
    fc_status status = FC_OK;
    if (d == NULL || d->entries.count == 0) {
        return d == NULL ? FC_OK : pass_ended();
    }
    ended_interval *ended = (ended_interval *)calloc(1, sizeof *ended);
    if (ended == NULL) {
        return FC_ENOMEM;
    }
    ended->owner = d;
    if (copies) {
        FC_TRY(copy_table(d, ended));
    }
    for (size_t i = 0; i < d->entries.count; i++) {
        d->entries.items[i].number = fct_count_collectives(d->entries.items[i].pg);
    }
    ended->entries = d->entries;
    d->entries = (entry_list){0};
    d->incomplete = false;
    d->interval++;
    append_ended(ended);
    return pass_ended();
done:
    free_ended(ended);
    return status;
}

void fc_device_checksums_drop(fc_device_checksums *d) {
    assert(d == NULL || d->entries.count <= d->entries.capacity);
    for (size_t i = 0; d != NULL && i < d->entries.count; i++) {
        d->entries.items[i].index = -1;
    }
}
