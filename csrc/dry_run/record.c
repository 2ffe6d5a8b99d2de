/* The record of a dry run; see record.h. Owns the events and the names of ranges. If there is no
 * memory for an event, the record sets `failed`, because the callers cannot fail. */
#include "record.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local fcd_record *fcd_current_record;

const char *const fcd_kind_names[FCD_KIND_COUNT] = {
#define FCD_KIND_NAME(name, text) text,
    FCD_KINDS(FCD_KIND_NAME)
#undef FCD_KIND_NAME
};

const char *const fcd_purpose_names[FCD_PURPOSE_COUNT] = {
#define FCD_PURPOSE_NAME(name, text) text,
    FCD_PURPOSE_LIST(FCD_PURPOSE_NAME)
#undef FCD_PURPOSE_NAME
};

void fcd_record_init(fcd_record *r, bool has_streams) {
    assert(fcd_current_record == NULL);
    memset(r, 0, sizeof *r);
    r->has_streams = has_streams;
    r->grad_enabled = true;
    r->call = -1;
    fcd_current_record = r;
}

void fcd_record_fini(fcd_record *r) {
    assert(fcd_current_record == r && r->end_callbacks == NULL && r->deferred_count == 0);
    free((void *)r->deferred);
    free(r->events);
    for (size_t i = 0; i < r->label_count; i++) {
        free(r->labels[i]);
    }
    free((void *)r->labels);
    memset(r, 0, sizeof *r);
    fcd_current_record = NULL;
}

size_t fcd_record_objects(const fcd_record *r) {
    return r->tensors + r->storages + r->works + r->stream_events + r->groups + r->subscriptions;
}

static fcd_event *reserve_event(fcd_record *r) {
    if (r->closed || r->failed) {
        return NULL;
    }
    if (r->count == r->capacity) {
        const size_t capacity = r->capacity == 0 ? 1024 : 2 * r->capacity;
        fcd_event *grown = (fcd_event *)realloc(r->events, capacity * sizeof *grown);
        if (grown == NULL) {
            r->failed = true;
            return NULL;
        }
        r->events = grown;
        r->capacity = capacity;
    }
    return &r->events[r->count++];
}

/* Returns the unit of the innermost open range with a unit, or -1. */
static int32_t current_unit(const fcd_record *r) {
    for (size_t i = r->range_count; i-- > 0;) {
        if (r->ranges[i].unit >= 0) {
            return r->ranges[i].unit;
        }
    }
    return -1;
}

static void append_event(fcd_kind kind, int32_t unit, int64_t object, int64_t bytes, int64_t live,
                         const char *label) {
    fcd_record *r = fcd_current_record;
    assert(r != NULL);
    fcd_event *event = reserve_event(r);
    if (event != NULL) {
        *event = (fcd_event){.kind = kind,
                             .call = r->call,
                             .unit = unit >= 0 ? unit : current_unit(r),
                             .stream = (int32_t)r->stream,
                             .object = object,
                             .bytes = bytes,
                             .live = live,
                             .label = label};
    }
}

void fcd_append_event(fcd_kind kind, int32_t unit, int64_t object, int64_t bytes,
                      const char *label) {
    append_event(kind, unit, object, bytes, 0, label);
}

void fcd_append_memory_event(fcd_purpose purpose, int64_t storage, int64_t bytes) {
    fcd_record *r = fcd_current_record;
    assert(r != NULL);
    if (bytes == 0) {
        return;
    }
    r->live[purpose] += bytes;
    assert(r->live[purpose] >= 0);
    if (purpose != FCD_HOST) {
        r->device_live += bytes;
        r->device_peak = r->device_live > r->device_peak ? r->device_live : r->device_peak;
    }
    append_event(bytes > 0 ? FCD_ALLOC : FCD_FREE, -1, storage, bytes > 0 ? bytes : -bytes,
                 r->live[purpose], fcd_purpose_names[purpose]);
}

/* Returns the record's copy of the first `length` characters of `text`, or "" if malloc fails. */
static const char *intern(fcd_record *r, const char *text, size_t length) {
    for (size_t i = 0; i < r->label_count; i++) {
        if (strncmp(r->labels[i], text, length) == 0 && r->labels[i][length] == '\0') {
            return r->labels[i];
        }
    }
    char **grown = (char **)realloc((void *)r->labels, (r->label_count + 1) * sizeof *grown);
    char *copy = (char *)malloc(length + 1);
    if (grown != NULL) {
        r->labels = grown;
    }
    if (grown == NULL || copy == NULL) {
        free(copy);
        r->failed = true;
        return "";
    }
    memcpy(copy, text, length);
    copy[length] = '\0';
    r->labels[r->label_count++] = copy;
    return copy;
}

/* Enters a profiler range and records it. Torch's name of the range is "FSDP::LABEL (#3)" or
 * "FSDP::LABEL for #3" for unit 3, or "FSDP::LABEL". */
void fcd_enter_range(const char *name) {
    static const char prefix[] = "FSDP::";
    fcd_record *r = fcd_current_record;
    assert(r != NULL && r->range_count < FCD_RANGES_MAX);
    const char *label =
        strncmp(name, prefix, sizeof prefix - 1) == 0 ? name + sizeof prefix - 1 : name;
    const char *number = strchr(label, '#');
    fcd_range range = {.unit = number != NULL ? (int32_t)strtol(number + 1, NULL, 10) : -1};
    range.label = intern(r, label, strcspn(label, " "));
    r->ranges[r->range_count++] = range;
    fcd_append_event(FCD_ENTER, -1, 0, 0, range.label);
}

void fcd_leave_range(void) {
    fcd_record *r = fcd_current_record;
    assert(r != NULL && r->range_count > 0);
    fcd_append_event(FCD_LEAVE, -1, 0, 0, r->ranges[r->range_count - 1].label);
    r->range_count--;
}

int fcd_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(fcd_current_record->error, sizeof fcd_current_record->error, format, args);
    va_end(args);
    return -1;
}
