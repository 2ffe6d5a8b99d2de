/* Checksums of the data of collectives, for the guard mode "hash".
 *
 * After an all-gather or an all-reduce all ranks of the process group have equal data. Each rank
 * adds a checksum of this data, and the agreement at the end of the backward compares them
 * (agreement.h). So ranks detect data that changes in memory or on its way between ranks.
 * All-gathers and all-reduces are counted apart, because a rank may finish an all-reduce earlier or
 * later than another rank.
 *
 * On devices with streams a rank learns its checksums after the end of the backward, and there is
 * no agreement. The struct keeps the hashes of the latest intervals, which the stall monitors
 * compare (fsdp_c/_runtime/label_comparison.py).
 *
 * The negotiation of a process group has one struct for the CPU, and one for devices with streams.
 * The GIL guards them. Precondition of all functions: the struct was zeroed before its first use.
 */
#ifndef FSDP_C_TRANSPORT_CHECKSUMS_H
#define FSDP_C_TRANSPORT_CHECKSUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../bridge/group.h"
#include "op_tag.h"

/* Kinds of entries that are no fct_op_kind: exchanges of fsdp_c, collectives that functions of
 * torch issue, and data after all-gathers and all-reduces. */
enum {
    OP_AGREEMENT = FCT_OP_ALL_REDUCE + 1,
    OP_PLAN_COMPARISON,
    OP_OF_TORCH,
    OP_GATHERED_DATA,
    OP_REDUCED_DATA
};

/* An issued collective, or the data after it. */
typedef struct op_entry {
    /* of the labels of the interval so far, or the checksum of the data; 0: no entry, or unknown */
    uint64_t hash;
    uint64_t kind; /* fct_op_kind, or one of the kinds above */
    fct_op_label label;
} op_entry;

/* Kinds of collectives. The latest checksums of each kind are kept. An agreement compares at most
 * OP_CHECKSUMS of them. */
enum { OP_CHECKSUM_KINDS = 2, OP_CHECKSUMS = 256, OP_CHECKSUMS_KEPT = 4096 };
/* The latest intervals that are kept, on devices with streams. */
enum { OP_INTERVALS = 512 };

typedef struct op_checksum {
    uint64_t value; /* 0: unknown, never a mismatch */
    fct_op_label label;
} op_checksum;

/* The checksums of one kind. */
typedef struct op_checksum_list {
    op_checksum *entries; /* [OP_CHECKSUMS_KEPT] by number; NULL: none */
    uint64_t total;       /* of all intervals, with those that were dropped */
    uint64_t count;       /* of the open interval */
    uint64_t hash;        /* of the open interval */
    bool unknown;         /* a checksum of the open interval is unknown */
    uint64_t closed;      /* of the latest closed interval */
    uint64_t first;       /* number of the first checksum of the closed interval */
} op_checksum_list;

/* A closed interval on a device with streams. */
typedef struct op_interval {
    uint64_t number; /* see op_checksums_number_interval */
    uint64_t hash;   /* of its checksums; 0: unknown, never a mismatch */
    uint64_t first[OP_CHECKSUM_KINDS];
    uint64_t count[OP_CHECKSUM_KINDS];
} op_interval;

typedef struct op_checksums {
    op_checksum_list kinds[OP_CHECKSUM_KINDS];
    op_interval *intervals; /* [OP_INTERVALS], a ring; NULL: none */
    uint64_t interval_count;
    uint64_t last_number; /* 0: no interval was numbered */
} op_checksums;

/* Releases the memory. The struct can be used again. */
void op_checksums_fini(op_checksums *c);
/* Adds the checksum of a completed collective, other than a reduce-scatter. 0: unknown. */
void op_checksums_add(op_checksums *c, const fct_op_tag *tag, uint64_t value);
/* Drops the checksums of the open interval. If there are any, the rest of the interval is unknown,
 * because other ranks may have dropped none. */
void op_checksums_drop(op_checksums *c);
/* Whether the open interval has a checksum. */
bool op_checksums_any(const op_checksums *c);
/* Closes the interval. Returns its hash, or 0 if a checksum is unknown or there is none. */
uint64_t op_checksums_close(op_checksums *c);
/* Returns a number for the next interval to end. It consists of the number of collectives at the
 * end of the interval, and of its place among the intervals that end there. So a rank that has lost
 * an interval continues with the numbers of the other ranks. */
uint64_t op_checksums_number_interval(op_checksums *c, uint64_t collectives);
/* Closes an interval on a device with streams, and keeps its hash. No effect without a checksum. */
void op_checksums_end_interval(op_checksums *c, uint64_t number);
/* Returns a kept interval, the oldest first, or NULL at the end. */
const op_interval *op_checksums_interval(const op_checksums *c, size_t index);
/* Copies the checksums of a kept interval as entries of collectives: first those of all-gathers,
 * then those of all-reduces. Checksums that are not kept any more count as unknown. Returns their
 * number, at most `capacity`; 0 without the interval. */
size_t op_checksums_copy(const op_checksums *c, uint64_t number, op_entry *entries,
                         size_t capacity);
/* Describes the first all-gather of the closed interval with different checksums, or else the first
 * such all-reduce. All ranks must call it. The most frequent checksum counts as right. A tie favors
 * the lower rank. Returns -1 with a Python exception. */
FCT_CHECK int op_checksums_describe(const op_checksums *c, fct_pg *pg, char *text, size_t bytes);

#endif
