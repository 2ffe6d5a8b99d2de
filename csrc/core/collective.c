/* Issues and waits for a group's collectives; see collective.h. Borrows everything. The text of a
 * failure is made only once there is one. */
#include "collective.h"

#include <stdio.h>

/* Puts operation, group and rank in front of the pending exception's message. */
static fc_status explain(const fc_group *g, const fc_link *link, fc_operation operation) {
    static const char *const names[] = {"all-gather", "reduce-scatter", "all-reduce"};
    char text[512];
    bool named = g->name != NULL && g->name[0] != '\0';
    (void)snprintf(text, sizeof text,
                   "%s of %s%s%s failed on rank %lld of %lld of process group '%s'",
                   names[operation], named ? "parameter group '" : "the root's parameter group",
                   named ? g->name : "", named ? "'" : "", (long long)link->rank,
                   (long long)link->world, link->name != NULL ? link->name : "?");
    fct_error_explain(text);
    return FC_ERAISED;
}

fc_status fc_collective_gather(const fc_group *g, fc_link *link, fct_tensor *output,
                               fct_tensor *input, bool async_op, fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_all_gather(link->pg, output, input, async_op, work) != 0) {
        return explain(g, link, FC_ALL_GATHER);
    }
done:
    return status;
}

fc_status fc_collective_scatter(const fc_group *g, fc_link *link, fct_tensor *output,
                                fct_tensor *input, fct_reduce_op op, double factor, bool async_op,
                                fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_reduce_scatter(link->pg, output, input, op, factor, async_op, work) != 0) {
        return explain(g, link, FC_REDUCE_SCATTER);
    }
done:
    return status;
}

fc_status fc_collective_all_reduce(const fc_group *g, fc_link *link, fct_tensor *tensor,
                                   fct_reduce_op op, bool async_op, fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_all_reduce(link->pg, tensor, op, 1.0, async_op, work) != 0) {
        return explain(g, link, FC_ALL_REDUCE);
    }
done:
    return status;
}

fc_status fc_collective_wait(const fc_group *g, const fc_link *link, fc_operation operation,
                             fct_work **work) {
    if (*work == NULL) {
        return FC_OK;
    }
    if (fct_work_wait(*work) != 0) {
        return explain(g, link, operation);
    }
    fct_work_release(*work);
    *work = NULL;
    return FC_OK;
}
