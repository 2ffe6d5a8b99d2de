/* Unsharded parameters of a group: their memory from copy-out to free, and the parameter objects
 * over that memory. This module owns nothing; gather.c schedules the gathers that fill the memory.
 * Memory is allocated and freed on the device's current stream.
 *
 * Preconditions: the group has a comm context, and the plan is valid. */
#ifndef FSDP_C_CORE_UNSHARDED_H
#define FSDP_C_CORE_UNSHARDED_H

#include "chunks.h"
#include "group_base.h"
#include "plan.h"

/* Writes to *can whether the next gather makes the unsharded parameters aliases of their shards. It
 * does if the group has one rank and no fallback, and every parameter can be an alias. */
FC_CHECK fc_status fc_unsharded_can_alias(const fc_group_base *base, bool *can);
/* Makes the unsharded parameters of a group of one rank aliases of their shards. Sets *all to
 * false and creates no alias if a parameter cannot be an alias. The check runs first, because
 * creating and discarding an alias would replace the parameter's autograd leaf. */
FC_CHECK fc_status fc_unsharded_alias(fc_group_base *base, bool *all);
/* Stores the versions of the shards, so that fc_unsharded_check_leaves finds later changes of
 * aliases. Call it also after a gather by Python code, which copies the shards to the aliases of an
 * earlier gather. */
void fc_unsharded_record_versions(fc_group_base *base);
/* Allocates the outputs, and the inner tensors of extended parameters. A parameter that owns a
 * chunk adopts the memory of the gathered chunk. For all other parameters new memory is allocated.
 * After a failure some parameters may hold memory. */
FC_CHECK fc_status fc_unsharded_alloc(fc_group_base *base, const fc_gather_plan *plan,
                                      const fc_chunks *chunks);
/* Returns the memory of owned chunks, with its contents, to `chunks`. The copy-out can then be
 * repeated. */
void fc_unsharded_return_chunks(fc_group_base *base, const fc_gather_plan *plan,
                                const fc_chunks *chunks);
/* Creates the parameter objects over the outputs, with requires_grad of the shards. `extends`: runs
 * fsdp_post_all_gather for extended parameters. */
FC_CHECK fc_status fc_unsharded_make(fc_group_base *base, bool extends);
/* Creates the parameter objects over memory that the fallback has filled. Returns FC_ESTATE if a
 * parameter has no memory. */
FC_CHECK fc_status fc_unsharded_adopt(fc_group_base *base);
/* Call record_leaves before the gather of a backward, and check_leaves after it. Both return
 * FC_ESTATE if forward may have used another leaf than `unsharded`, because the gradients of that
 * leaf would be lost. The first function detects a conversion to another dtype since forward, the
 * second one that an alias was created again, because its shard was replaced. Frozen parameters
 * and parameters with all-gather hooks are not checked.
 *
 * check_leaves also returns FC_ESTATE if the shard of an alias, frozen or not, was changed in place
 * since the gather. Gradients would then depend on new parameters and old activations. */
FC_CHECK fc_status fc_unsharded_record_leaves(fc_group_base *base);
FC_CHECK fc_status fc_unsharded_check_leaves(fc_group_base *base);
/* Returns FC_ESTATE with torch's message if the memory of a parameter cannot be freed. Call it
 * before fc_unsharded_free. */
FC_CHECK fc_status fc_unsharded_can_free(const fc_group_base *base);
void fc_unsharded_free(fc_group_base *base);
/* Copies requires_grad from each unsharded parameter to its sharded parameter, if the user has
 * changed it. Call it before the unsharded parameters are unregistered. */
FC_CHECK fc_status fc_unsharded_copy_requires_grad(fc_group_base *base);

/* Returns FC_ESTATE with a message if memory exists although `unsharded` is false, or if memory is
 * missing although `unsharded` is true. Memory is not checked if `kept`, and for aliased
 * parameters. With `unsharded`, a parameter without flat (an extended one) needs an unsharded
 * tensor, and its memory is not checked. */
FC_CHECK fc_status fc_unsharded_check(const fc_group_base *base, bool unsharded, bool kept);

/* Drops the parameters over the smaller group's shards, and their data
 * (fc_gather_keep_post_forward). */
void fc_unsharded_drop_post_forward(const fc_group_base *base);

#endif
