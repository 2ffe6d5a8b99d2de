/* Transitions of a group as the core itself calls them: the host may run another function in their
 * place (somebody has overridden or patched the method), and is asked each time.
 *
 * fc_group_unshard and its siblings (group.h) are the transitions themselves; fc_call_unshard asks
 * first. What replaces a transition usually ends up in it again, through the host's object. */
#ifndef FSDP_C_CORE_CALL_H
#define FSDP_C_CORE_CALL_H

#include <stdbool.h>

#include "status.h"

struct fc_group;

/* As bits: the host keeps sets of them. */
typedef enum fc_call {
    FC_CALL_UNSHARD = 1 << 0,
    FC_CALL_WAIT = 1 << 1,
    FC_CALL_RESHARD = 1 << 2,
    FC_CALL_TO_SHARDED = 1 << 3,
    FC_CALL_PRE_BACKWARD = 1 << 4,
    FC_CALL_POST_BACKWARD = 1 << 5,
    FC_CALL_FINALIZE = 1 << 6,
    FC_CALL_PREFETCH = 1 << 7, /* of the group that backward reaches next */
    FC_CALL_GATHER = 1 << 8,   /* moving data: the host does it, as for hosted groups */
    FC_CALL_REDUCE = 1 << 9,
    FC_CALL_MEMORY = 1 << 10, /* freeing unsharded parameters */
    FC_CALL_END = 1 << 11     /* bits from here on are the host's own */
} fc_call;

/* Whether the host wants `call` for this group. */
bool fc_call_overridden(const struct fc_group *g, fc_call call);

FC_CHECK fc_status fc_call_unshard(struct fc_group *g, bool async_op);
FC_CHECK fc_status fc_call_wait_unshard(struct fc_group *g);
FC_CHECK fc_status fc_call_reshard(struct fc_group *g);
FC_CHECK fc_status fc_call_to_sharded(struct fc_group *g);
FC_CHECK fc_status fc_call_pre_backward(struct fc_group *g, bool default_prefetch);
FC_CHECK fc_status fc_call_post_backward(struct fc_group *g);
FC_CHECK fc_status fc_call_finalize_backward(struct fc_group *g);
FC_CHECK fc_status fc_call_backward_prefetch(struct fc_group *g);

#endif
