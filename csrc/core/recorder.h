/* The last collectives of this process, in a ring buffer. Reports about ranks that wait read it.
 *
 * There is one buffer per process, because a report covers all models. Nothing is allocated. On
 * devices with streams, threads add records at the same time, without the GIL. Only the thread that
 * adds a record, and later the thread that waits for its work, change the record.
 * fc_recorder_write also runs in a signal handler.
 *
 * Preconditions: `facts`, `work` in fc_recorder_wait, `copy` and `copies` are not NULL. */
#ifndef FSDP_C_CORE_RECORDER_H
#define FSDP_C_CORE_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FC_RECORDS = 4096, FC_RECORD_GROUP_BYTES = 24, FC_RECORD_MODULES_BYTES = 48 };

/* The first three values equal those of fct_op_kind. */
typedef enum fc_record_kind {
    FC_RECORD_ALL_GATHER = 0,
    FC_RECORD_REDUCE_SCATTER,
    FC_RECORD_ALL_REDUCE,
    /* the comparison of plans (fc_process_group_compare_plan), until it has succeeded for the
     * process group */
    FC_RECORD_COMPARE,
    FC_RECORD_AGREE /* the comparison of collectives at the end of a backward */
} fc_record_kind;

typedef enum fc_record_state {
    FC_RECORD_ISSUED = 0, /* nothing waits for the collective */
    FC_RECORD_WAITING,    /* a thread is in a call that issues the collective or waits for it */
    FC_RECORD_COMPLETE,   /* complete; on devices with streams: ordered before later work */
    FC_RECORD_FAILED,     /* the call that issued the collective or waited for it raised */
    FC_RECORD_ABANDONED   /* no call waits for it any more, because of another exception */
} fc_record_state;

/* A collective. Times are nanoseconds of CLOCK_MONOTONIC, 0: not reached. A file of
 * fc_recorder_write contains this struct, so _RECORD of fsdp_c/_runtime/records.py has the same
 * fields. */
typedef struct fc_record {
    uint64_t number;  /* of this process, from 1; 0: the record is empty */
    uint64_t begin;   /* time of the issue */
    uint64_t waiting; /* time at which the latest call that waits began */
    uint64_t end;     /* time of the completion or the failure */
    uint64_t work;    /* address of the fct_work; 0: none */
    uint32_t step;    /* fc_comm_ctx.step */
    uint16_t pass;    /* fct_op_pass */
    uint8_t kind;     /* fc_record_kind */
    uint8_t state;    /* fc_record_state */
    int32_t rank;     /* in the process group */
    int32_t world;
    char group[FC_RECORD_GROUP_BYTES];     /* end of the process group's name; terminated */
    char modules[FC_RECORD_MODULES_BYTES]; /* end of the modules' FQNs, "" for the root */
} fc_record;

/* Adds a record in state FC_RECORD_WAITING and returns its number. Sets number, begin, waiting and
 * both texts, and sets end and work to 0. step, pass, kind, rank and world are those of *facts.
 * Overwrites the oldest record. `group` and `modules` may be NULL. */
uint64_t fc_recorder_add(const fc_record *facts, const char *group, const char *modules);
/* Records that the call that issued the collective has returned. `work` is NULL if the collective
 * is complete. This function and the following ones ignore records that are overwritten. */
void fc_recorder_issued(uint64_t number, const void *work);
/* Records that a call waits for `work`. Returns the number of its record, 0 if there is none. */
uint64_t fc_recorder_wait(const void *work);
/* Records the end of the collective. `state`: FC_RECORD_COMPLETE or a later one. */
void fc_recorder_end(uint64_t number, fc_record_state state);
/* Copies a record. Returns false, and writes nothing, if the record is overwritten. */
bool fc_recorder_read(uint64_t number, fc_record *copy);

/* Copies the `count` newest records, and older ones in state FC_RECORD_WAITING, newest first.
 * `copies` has space for FC_RECORDS. Returns the number of copies. If another thread changes a
 * record during the copy, this copy may be inconsistent. */
size_t fc_recorder_copy(fc_record *copies, size_t count);
/* Returns the time of the records' clock. */
uint64_t fc_recorder_now(void);
/* Writes all records to a file descriptor, in the order of the buffer. Returns 0, or -1 with errno.
 * Async-signal-safe; a record that another thread changes at the time may be inconsistent. */
int fc_recorder_write(int fd);

#endif
