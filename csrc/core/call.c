/* Asking the host before each transition. Owns nothing; without fc_host.overridden (the tests of
 * the core alone) nothing is ever asked. */
#include "call.h"

#include "group.h"

bool fc_call_overridden(const fc_group *g, fc_call call) {
    return g->host->overridden != NULL && g->host->overridden(g->owner, call);
}

static fc_status run(fc_group *g, fc_call call, bool argument) {
    return g->host->run(g->owner, call, argument) == 0 ? FC_OK : FC_ERAISED;
}

fc_status fc_call_unshard(fc_group *g, bool async_op) {
    return fc_call_overridden(g, FC_CALL_UNSHARD) ? run(g, FC_CALL_UNSHARD, async_op)
                                                  : fc_group_unshard(g, async_op);
}

fc_status fc_call_wait_unshard(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_WAIT) ? run(g, FC_CALL_WAIT, false)
                                               : fc_group_wait_unshard(g);
}

fc_status fc_call_reshard(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_RESHARD) ? run(g, FC_CALL_RESHARD, false)
                                                  : fc_group_reshard(g);
}

fc_status fc_call_to_sharded(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_TO_SHARDED) ? run(g, FC_CALL_TO_SHARDED, false)
                                                     : fc_group_to_sharded(g);
}

fc_status fc_call_pre_backward(fc_group *g, bool default_prefetch) {
    return fc_call_overridden(g, FC_CALL_PRE_BACKWARD)
               ? run(g, FC_CALL_PRE_BACKWARD, default_prefetch)
               : fc_group_pre_backward(g, default_prefetch);
}

fc_status fc_call_post_backward(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_POST_BACKWARD) ? run(g, FC_CALL_POST_BACKWARD, false)
                                                        : fc_group_post_backward(g);
}

fc_status fc_call_finalize_backward(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_FINALIZE) ? run(g, FC_CALL_FINALIZE, false)
                                                   : fc_group_finalize_backward(g);
}

fc_status fc_call_backward_prefetch(fc_group *g) {
    return fc_call_overridden(g, FC_CALL_PREFETCH) ? run(g, FC_CALL_PREFETCH, false)
                                                   : fc_group_backward_prefetch(g);
}
