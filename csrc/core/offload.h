/* CPU offload on devices with streams: uploads of shards from host memory, and copies of gradients
 * to host memory. Owns nothing. Copies are queued on the current stream; the caller that queued the
 * copy of a gradient waits for it (reduce.c).
 *
 *   gather:  shard --upload--> gather buffer                          without casts and extensions
 *            shard --upload--> staged --pack, cast--> gather buffer   otherwise
 *   reduce:  view of the reduced gradients --copy--> gradient in host memory
 *
 * A tensor owns its pinned memory and may be released at any time: torch's allocator reuses the
 * memory only after the copies that were queued from it or to it. */
#ifndef FSDP_C_CORE_OFFLOAD_H
#define FSDP_C_CORE_OFFLOAD_H

#include "callbacks.h"
#include "plan.h"

/* Queues the upload of all shards into their slots. This rank's shard starts `start` bytes into the
 * storage of `buffer`. Precondition: the plan has neither casts nor extended parameters. */
FC_CHECK fc_status fc_offload_upload(const fc_gather_plan *plan, fc_param *const *params,
                                     const fct_tensor *buffer, int64_t start, fc_error *err);
/* Queues the upload of each offloaded shard in host memory to a new tensor fc_param.staged, which
 * the pack reads instead of the shard. fc_offload_unstage() releases these tensors. Other shards
 * and extended parameters are skipped: their data is on the device. */
FC_CHECK fc_status fc_offload_stage(const fc_gather_plan *plan, fc_param *const *params,
                                    fct_device device, fc_error *err);
/* Releases the staged copies. */
void fc_offload_unstage(const fc_gather_plan *plan, fc_param *const *params);
/* Queues the upload of each shard and casts the shard into its flat tensor. Used for groups of one
 * rank. */
FC_CHECK fc_status fc_offload_fill(const fc_gather_plan *plan, fc_param *const *params,
                                   fct_device device, fc_error *err);

/* Copies the gradient `view` to host memory. *local is a new reference. *queued is true if the copy
 * is asynchronous. The caller must then wait for the copy before the gradient is read. The copy is
 * synchronous if the memory is not pinned, if `view` will be added to an existing gradient, or if
 * hooks read it. */
FC_CHECK fc_status fc_offload_copy_gradient(const fc_param *p, const fc_callbacks *callbacks,
                                            fct_tensor *view, fct_tensor **local, bool *queued);

#endif
