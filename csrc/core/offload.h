/* Offload: shards that are in the host's memory while their group computes on a device with
 * streams, and gradients that go there. Owns nothing: copies are queued on the current stream, and
 * whoever queued a gradient's waits for it (reduce.c).
 *
 *   gather:  shard --upload--> row                          where no shard is cast
 *            shard --upload--> staged --pack, cast--> row   else
 *   reduce:  view of the reduced row --copy--> gradient in the host's memory
 *
 * Pinned memory belongs to whoever has the tensor. It may be let go at any time: torch's allocator
 * hands it out again only after the copies that were queued from it or to it. */
#ifndef FSDP_C_CORE_OFFLOAD_H
#define FSDP_C_CORE_OFFLOAD_H

#include "host.h"
#include "plan.h"

/* Queues the upload of all shards of a plan without casts or extended parameters: to their slots in
 * the row of `buffer` that starts `start` bytes into its storage. */
FC_CHECK fc_status fc_offload_place(const fc_gather_plan *plan, fc_param *const *params,
                                    const fct_tensor *buffer, int64_t start, fc_error *err);
/* Queues the upload of the shards, but for those of extended parameters, whose inputs are on the
 * device, to fc_param.staged, which is what the plan packs then, until
 * fc_offload_unstage(). */
FC_CHECK fc_status fc_offload_stage(const fc_gather_plan *plan, fc_param *const *params,
                                    fct_device device, fc_error *err);
void fc_offload_unstage(const fc_gather_plan *plan, fc_param *const *params);
/* Queues the upload of all shards, one after the other, each cast into its flat tensor: the unshard
 * of a group of one rank. */
FC_CHECK fc_status fc_offload_fill(const fc_gather_plan *plan, fc_param *const *params,
                                   fct_device device, fc_error *err);

/* The gradient `view` in the host's memory. *queued: the copy is on its way, and somebody has to
 * wait for it before the gradient is read; *local is new. It is done at once where the memory is
 * not to be pinned, where there is a gradient that it will be added to, and where hooks see it. */
FC_CHECK fc_status fc_offload_send(const fc_param *p, const fc_host *host, fct_tensor *view,
                                   fct_tensor **local, bool *queued);

#endif
