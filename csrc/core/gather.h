/* The gather of a group: pack, all-gather, copy out. What is in flight is in fc_group.gather. */
#ifndef FSDP_C_CORE_GATHER_H
#define FSDP_C_CORE_GATHER_H

#include "group.h"

/* Packs this rank's row and issues the collective; on failure nothing is in flight. `overlaps`: on
 * the context's gather streams, where there are any and nobody asked for a work to wait for. */
FC_CHECK fc_status fc_gather_start(fc_group *g, bool async_op, bool overlaps);
/* Makes the current stream (or the host) see the gathered rows. */
FC_CHECK fc_status fc_gather_await(fc_group *g);
/* Everything of the unshard that can fail: memory, contents and the parameter objects. On failure
 * no unsharded parameter holds memory. */
FC_CHECK fc_status fc_gather_copy_out(fc_group *g);
/* The parameter objects over what somebody else has gathered into their memory. FC_ESTATE where a
 * parameter holds none. */
FC_CHECK fc_status fc_gather_adopt(fc_group *g);
/* The last that can fail: orders whoever reuses the buffer after the copy-out. *copied is set where
 * that is left to the next group's wait. */
FC_CHECK fc_status fc_gather_end_copy_out(fc_group *g, fct_event **copied);
/* After the swap: the gather is over, its buffer kept (until `copied`, which is taken) or freed. */
void fc_gather_retire(fc_group *g, fct_event *copied);
/* Frees the memory of the unsharded parameters. */
void fc_gather_free(fc_group *g);
/* Gives up on the gather in flight without waiting. */
void fc_gather_drop(fc_group *g);
/* The same with work on the buffer still queued: whichever stream it was allocated on waits for
 * that first. */
void fc_gather_abandon(fc_group *g);

#endif
