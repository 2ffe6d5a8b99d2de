/* Collectives over shared memory: all-gather, reduce-scatter and all-reduce of memory that the
 * caller describes by addresses. The messages of a rank shard contain its bytes in the order of
 * shm_segment.begin.
 *
 * Preconditions: shm_collective_new returned the collective. A collective is started once, and
 * waited for after its start. */
#ifndef FSDP_C_TRANSPORT_SHM_COLLECTIVE_H
#define FSDP_C_TRANSPORT_SHM_COLLECTIVE_H

#include "../bridge/shm_methods.h"

/* Whether the elements of a dtype can be summed in the order of gloo's ring. Required for
 * reduce-scatters and all-reduces. */
bool shm_can_sum(int32_t dtype);
/* Returns a new collective, or NULL if there is no memory. Copies the segments. Takes the label of
 * op_label_set_next. */
shm_collective *shm_collective_new(const shm_request *request);
/* Frees a collective that is not submitted, or that is complete. NULL is allowed. */
void shm_collective_free(shm_collective *c);
/* Frees the list of segments, so that the collective holds no stale address. Precondition: all
 * messages were read. */
void shm_collective_drop_segments(shm_collective *c);
/* Submits the collective; see shm_transport_submit. */
shm_submit_result shm_collective_start(shm_collective *c, shm_transport *t, shm_owner owner,
                                       char error[SHM_ERROR_BYTES]);
/* See shm_transport_wait. */
int shm_collective_wait(shm_collective *c, shm_transport *t, int64_t max_ms,
                        char error[SHM_ERROR_BYTES]);
/* The result of shm_transport_is_cpu_bound at shm_collective_start. */
bool shm_collective_is_cpu_bound(const shm_collective *c);
/* Writes the checksum of a rank's bytes of a segment; see fct_work_rank_checksum. Returns false if
 * the request has no checksums, or before all bytes were read. */
bool shm_collective_rank_checksum(const shm_collective *c, size_t segment, int64_t rank,
                                  uint64_t *checksum);

#endif
