/* The agreement of ranks on the collectives that they have issued over one process group.
 *
 * Collectives over shared memory carry their labels. For all others each rank hashes its labels,
 * and the ranks compare the hashes at the end of a backward. With the guard mode "hash" the ranks
 * also compare checksums of data, over shared memory too. An interval is the collectives between
 * two agreements. The struct belongs to the negotiation of the process group, and the GIL guards
 * it. Exception: op_agreement_add_of_device may run without the GIL (bridge/gil.h), while another
 * thread reads `total`, `entries` and `blocks`. The copy of an entry that is written meanwhile may
 * be inconsistent; entries are for messages. Precondition of all functions: the struct was zeroed
 * before its first use. */
#ifndef FSDP_C_TRANSPORT_AGREEMENT_H
#define FSDP_C_TRANSPORT_AGREEMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../bridge/group.h"
#include "checksums.h"
#include "label_blocks.h"
#include "op_tag.h"

enum { OP_ENTRIES = 512, FCT_DIFFERENCE_BYTES = 416 };

typedef struct op_agreement {
    uint64_t hash;          /* of the labels of the open interval */
    uint64_t count;         /* collectives of the open interval */
    _Atomic uint64_t total; /* collectives of all intervals */
    bool unknown;           /* a collective of the open interval has no label */
    op_label_blocks blocks; /* of collectives of devices with streams */
    op_entry *entries;      /* [OP_ENTRIES] the latest collectives, by number; NULL: none */
    /* The latest closed interval, until its round is read. */
    fct_exchange *round; /* NULL: none */
    uint64_t first;      /* number of its first collective */
    uint64_t closed;     /* number of its collectives */
    op_checksums checksums;
} op_agreement;

/* The result of an agreement: what the ranks issue at the first difference, or "" if there is none.
 */
typedef struct fct_difference {
    char text[FCT_DIFFERENCE_BYTES];
} fct_difference;

/* Releases the memory. The struct can be used again. */
void op_agreement_fini(op_agreement *a);
/* Adds a collective that this rank has issued. With `tag` NULL, or an unknown label, the interval
 * counts as equal to those of all other ranks. */
void op_agreement_add(op_agreement *a, const fct_op_tag *tag);
/* The same for a collective of a device with streams, on which no agreement takes place. */
void op_agreement_add_of_device(op_agreement *a, const fct_op_tag *tag);
/* Whether the open interval has a collective or a checksum. */
bool op_agreement_is_needed(const op_agreement *a);
/* Closes the interval and sends its hashes, without a wait. Does nothing if the agreement is not
 * needed, and then writes false to *issued. All ranks must call it at the same point among their
 * collectives. Precondition: the previous round was read. */
FCT_CHECK int op_agreement_start(op_agreement *a, fct_pg *pg, bool *issued);
/* Waits for the hashes of all ranks, if a round was issued and not read. If hashes differ, the
 * ranks find the first difference in further rounds. */
FCT_CHECK int op_agreement_await(op_agreement *a, fct_pg *pg, fct_difference *difference);

/* The ranks describe a collective that they are about to issue, which differs between rank 0 and
 * `rank`. All ranks must call it at the same point. */
FCT_CHECK int op_entry_describe_difference(const op_entry *own, fct_pg *pg, int64_t rank,
                                           fct_difference *difference);

/* The latest collectives of a rank, or the checksums of an interval. */
typedef struct op_entry_list {
    int64_t rank;
    uint64_t first; /* number of the first one */
    size_t count;
    const void *entries; /* of op_entry; borrowed; may be unaligned */
} op_entry_list;
/* Copies the latest collectives, the oldest first. Writes the number of the first one. Returns how
 * many there are, at most OP_ENTRIES. */
size_t op_agreement_copy(const op_agreement *a, op_entry *entries, uint64_t *first);
/* Describes the first collective that differs between two ranks. `issued`: all collectives of the
 * lists were issued. Then both lists may be without the difference, and the text has the latest
 * collective of each rank. For lists of op_checksums_copy, describes the first checksum that
 * differs. */
void op_entries_describe_difference(const op_entry_list *a, const op_entry_list *b, bool issued,
                                    fct_difference *difference);

#endif
