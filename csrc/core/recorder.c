/* The last collectives of this process; see recorder.h. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "recorder.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static fc_record records[FC_RECORDS];
static _Atomic uint64_t last_number;

uint64_t fc_recorder_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static fc_record *slot_of(uint64_t number) {
    return &records[number % FC_RECORDS];
}

/* Returns the record, or NULL if it is overwritten. */
static fc_record *find_record(uint64_t number) {
    fc_record *record = slot_of(number);
    return number != 0 && record->number == number ? record : NULL;
}

/* Copies the end of the text, because FQNs differ at their ends. */
static void copy_end(char *target, size_t bytes, const char *text) {
    const size_t length = text != NULL ? strlen(text) : 0;
    const size_t copied = length < bytes ? length : bytes - 1;
    if (copied > 0) {
        memcpy(target, text + length - copied, copied);
    }
    target[copied] = '\0';
}

uint64_t fc_recorder_add(const fc_record *facts, const char *group, const char *modules) {
    assert(facts->kind <= FC_RECORD_AGREE);
    const uint64_t number = atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
    fc_record *record = slot_of(number);
    *record = *facts;
    record->number = number;
    record->begin = record->waiting = fc_recorder_now();
    record->end = record->work = 0;
    record->state = FC_RECORD_WAITING;
    copy_end(record->group, sizeof record->group, group);
    copy_end(record->modules, sizeof record->modules, modules);
    return number;
}

void fc_recorder_issued(uint64_t number, const void *work) {
    fc_record *record = find_record(number);
    if (work == NULL) {
        fc_recorder_end(number, FC_RECORD_COMPLETE);
    } else if (record != NULL) {
        record->work = (uint64_t)(uintptr_t)work;
        record->state = FC_RECORD_ISSUED;
    }
}

/* The search begins with the newest record: few collectives are in flight. */
uint64_t fc_recorder_wait(const void *work) {
    assert(work != NULL);
    const uint64_t address = (uint64_t)(uintptr_t)work;
    const uint64_t newest = last_number;
    const uint64_t oldest = newest > FC_RECORDS ? newest - FC_RECORDS : 0;
    for (uint64_t number = newest; number > oldest; number--) {
        fc_record *record = slot_of(number);
        if (record->work == address && record->state == FC_RECORD_ISSUED) {
            record->waiting = fc_recorder_now();
            record->state = FC_RECORD_WAITING;
            return number;
        }
    }
    return 0;
}

void fc_recorder_end(uint64_t number, fc_record_state state) {
    assert(state >= FC_RECORD_COMPLETE && state <= FC_RECORD_ABANDONED);
    fc_record *record = find_record(number);
    if (record != NULL) {
        record->end = fc_recorder_now();
        record->work = 0;
        record->state = (uint8_t)state;
    }
}

bool fc_recorder_read(uint64_t number, fc_record *copy) {
    assert(copy != NULL);
    const fc_record *record = find_record(number);
    if (record == NULL) {
        return false;
    }
    *copy = *record;
    return true;
}

size_t fc_recorder_copy(fc_record *copies, size_t count) {
    assert(copies != NULL);
    const uint64_t newest = last_number;
    size_t copied = 0;
    for (size_t age = 0; age < FC_RECORDS && age < newest; age++) {
        const fc_record *record = slot_of(newest - age);
        if (age < count || record->state == FC_RECORD_WAITING) {
            copies[copied] = *record;
            copied++;
        }
    }
    return copied;
}

int fc_recorder_write(int fd) {
    const char *data = (const char *)records;
    size_t left = sizeof records;
    while (left > 0) {
        const ssize_t written = write(fd, data, left);
        if (written < 0) {
            return -1;
        }
        data += written;
        left -= (size_t)written;
    }
    return 0;
}
