/* Checksums of data in the memory of a device with streams, for the guard mode "hash".
 *
 * A kernel adds the checksum of the data of each all-gather and all-reduce to one 64-bit sum. The
 * sums of an interval are a table in the memory of the device. An interval ends with a backward, or
 * before a forward if its collectives could use half of the table. At its end the table is copied
 * to pinned memory. A later end passes the sums to the transport, if their copy is done. So the
 * host does not wait for the copy.
 *
 *   open --- end ---> copying --- copy done, earlier intervals passed ---> passed
 *
 * While a CUDA graph captures the current stream, checksums are unknown and no interval ends: a
 * replay must not write to the table.
 *
 * Precondition of all functions: one thread at a time uses the checksums of a context. Only
 * fc_device_checksums_free and fc_device_checksums_end_interval need the GIL. */
#ifndef FSDP_C_CORE_DEVICE_CHECKSUMS_H
#define FSDP_C_CORE_DEVICE_CHECKSUMS_H

#include "../bridge/stream.h"
#include "../kernels/kernels.h"
#include "process_group.h"

/* The checksums of one comm context. */
typedef struct fc_device_checksums fc_device_checksums;

/* The sum of one collective. Initialize it with zeros. */
typedef struct fc_device_sum {
    uint64_t *at; /* in the memory of the device; NULL: the checksum is unknown */
    const fc_device_checksums *owner; /* the sum is unknown to another context */
    uint64_t interval;                /* that contains the sum */
} fc_device_sum;

/* NULL is allowed. Checksums that were not passed are lost. */
void fc_device_checksums_free(fc_device_checksums *d);
/* Takes a sum of the open interval. *d: NULL before the first call. The sum is unknown if the
 * device computes no checksums, if the table is full, and if a capture prevents the allocation of
 * the table. */
FC_CHECK fc_status fc_device_checksums_take(fc_device_checksums **d, fct_device device,
                                            fc_device_sum *sum);
/* Adds the checksums of ranges of memory to the sum, on the current stream. No effect if the sum is
 * unknown. Makes the sum unknown if its interval has ended, during a capture, and if too many
 * streams add sums in one interval. */
FC_CHECK fc_status fc_device_checksums_add(fc_device_checksums *d, fc_device_sum *sum,
                                           const fck_range *ranges, size_t count, fc_error *err);
/* Ends the sum of the latest all-gather or all-reduce of `modules` over `pg`. *d: NULL before the
 * first call. */
void fc_device_checksums_complete(fc_device_checksums **d, fct_device device,
                                  const fc_device_sum *sum, fc_process_group *pg,
                                  const char *modules, fc_operation operation);
/* Whether the interval should end before the next forward, because its collectives could use half
 * of the table, as in a long evaluation. d: NULL is allowed. */
bool fc_device_checksums_is_half_full(const fc_device_checksums *d);
/* Ends the interval. Passes the checksums of ended intervals to the transport, up to the first
 * interval whose copy is not done. The current stream waits for all additions. During a capture,
 * only makes the checksums unknown. d: NULL is allowed. */
FC_CHECK fc_status fc_device_checksums_end_interval(fc_device_checksums *d);
/* Makes the completed checksums of the open interval unknown, for example when all ranks reset a
 * model. d: NULL is allowed. */
void fc_device_checksums_drop(fc_device_checksums *d);

#endif
