/* Checksums of the data of collectives, for the guard mode "hash".
 *
 * After an all-gather or an all-reduce all ranks of the process group have equal data. Each rank
 * adds a checksum of this data, and the agreement at the end of the backward compares them
 * (agreement.h). So ranks detect data that changes in memory or on its way between ranks.
 * All-gathers and all-reduces are counted apart, because a rank may finish an all-reduce earlier or
 * later than another rank.
 *
 * The struct belongs to the agreement of the process group, and the GIL guards it. Precondition of
 * all functions: the struct was zeroed before its first use. */
#ifndef FSDP_C_TRANSPORT_CHECKSUMS_H
#define FSDP_C_TRANSPORT_CHECKSUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../bridge/group.h"
#include "op_tag.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of collectives, and the number of the latest checksums of each kind that are kept. */
enum { OP_CHECKSUM_KINDS = 2, OP_CHECKSUMS = 256 };

typedef struct op_checksum {
    uint64_t value; /* 0: unknown, equal to all */
    fct_op_label label;
} op_checksum;

/* The checksums of one kind. */
typedef struct op_checksum_list {
    op_checksum *entries; /* [OP_CHECKSUMS] by number; NULL: none */
    uint64_t total;       /* of all intervals */
    uint64_t count;       /* of the open interval */
    uint64_t hash;        /* of the open interval */
    bool unknown;         /* a checksum of the open interval is unknown */
    uint64_t closed;      /* of the latest closed interval */
    uint64_t first;       /* number of the first checksum of the closed interval */
} op_checksum_list;

typedef struct op_checksums {
    op_checksum_list kinds[OP_CHECKSUM_KINDS];
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
/* Describes the first collective of the closed interval with different checksums. All ranks must
 * call it. The most frequent checksum counts as right. A tie favors the lower rank. Returns -1 with
 * a Python exception. */
FCT_CHECK int op_checksums_describe(const op_checksums *c, fct_pg *pg, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
