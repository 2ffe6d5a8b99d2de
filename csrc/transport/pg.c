/* The transport of torch's process group: the backend of the group (gloo, NCCL, ...) moves the
 * data.
 *
 * This transport counts its gathers and all-reduces, because the negotiation about shared memory
 * needs their number. It records the tags of its collectives, because their messages carry no tags.
 */
#include "pg.h"

#include "group_negotiation.h"

static int negotiate(fct_pg *pg, fct_use use, bool *accepted) {
    (void)pg, (void)use;
    *accepted = true;
    return 0;
}

/* Records a collective that was issued, and counts a gather or an all-reduce (`gathers`). Returns
 * `status`, the result of the call. */
static int record(fct_pg *pg, const fct_op_tag *tag, bool gathers, int status) {
    shm_negotiation *n = status == 0 ? fct_negotiation_find(pg) : NULL;
    if (n != NULL) {
        shm_negotiation_record(n, tag);
        if (gathers) {
            shm_negotiation_count_gather(n);
        }
    }
    return status;
}

static int all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                      bool async_op, fct_work **work) {
    return record(pg, tag, true, fct_pg_all_gather(pg, false, output, input, async_op, work));
}

static int reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                          fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    return record(pg, tag, false,
                  fct_pg_reduce_scatter(pg, false, output, input, op, factor, async_op, work));
}

static int all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                      double factor, bool async_op, fct_work **work) {
    return record(pg, tag, true, fct_pg_all_reduce(pg, false, tensor, op, factor, async_op, work));
}

static bool is_cpu_bound(fct_pg *pg, size_t shard_bytes) {
    (void)pg, (void)shard_bytes;
    return false;
}

const fct_transport fct_pg_transport = {
    .name = "process group",
    .has_chunks = false,
    .negotiate = negotiate,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .all_gather_chunks = NULL,
    .reduce_scatter_chunks = NULL,
    .is_cpu_bound = is_cpu_bound,
};
