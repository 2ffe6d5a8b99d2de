/* The shared-memory transport: see README.md.
 *
 * The bridge gives each process group a second c10d backend (bridge/shm_backend.cpp). The
 * collectives of that backend are the operations of shm_collective.h. The functions all_gather,
 * reduce_scatter and all_reduce of fct_shm_transport call an op of namespace c10d, as for the
 * group's own backend. The op dispatches to the second backend. Only collectives of chunks call the
 * second backend directly. */
#include "shm.h"

#include <assert.h>

#include "../bridge/shm_methods.h"
#include "group_negotiation.h"
#include "op_label.h"
#include "shm_collective.h"

static const fct_shm_methods backend_methods = {
    .retain_negotiation = shm_negotiation_retain,
    .release_negotiation = shm_negotiation_release,
    .close_negotiation = shm_negotiation_close,
    .active_transport = shm_negotiation_active_transport,
    .release_transport = shm_transport_release,
    .progress = shm_transport_progress,
    .can_sum = shm_can_sum,
    .new_collective = shm_collective_new,
    .free_collective = shm_collective_free,
    .drop_segments = shm_collective_drop_segments,
    .start = shm_collective_start,
    .wait = shm_collective_wait,
    .is_cpu_bound = shm_collective_is_cpu_bound,
    .rank_checksum = shm_collective_rank_checksum,
};

/* Adds the shared-memory backend to the group. The end of the backend closes the negotiation; see
 * shm_attach. */
static int attach(fct_pg *pg, shm_negotiation *n, bool *attached) {
    return fct_pg_add_shm_backend(pg, &backend_methods, n, attached);
}

static int negotiate(fct_pg *pg, fct_device device, fct_use use, bool *accepted) {
    *accepted = false;
    if (device.type != FCT_DEVICE_CPU || !fct_pg_is_gloo(pg)) {
        return 0;
    }
    shm_negotiation *n = fct_negotiation_open(pg);
    if (n == NULL) {
        return -1;
    }
    return shm_negotiation_is_paused(n) ? 0 : shm_negotiation_run(n, pg, use, attach, accepted);
}

int fct_shm_compare_plan(fct_pg *pg, uint64_t plan, bool waits, fct_plan_result *result) {
    assert(pg != NULL && result != NULL);
    shm_negotiation *n = fct_negotiation_open(pg);
    return n != NULL ? shm_negotiation_compare_plan(n, pg, plan, waits, attach, result) : -1;
}

/* Attaches the label of `tag` to the collective that the following call submits. */
static void attach_label(const fct_op_tag *tag) {
    op_label_set_next(tag != NULL ? &tag->label : NULL);
}

/* Removes the label if the call has submitted nothing to shared memory. Returns `status`. */
static int detach_label(int status) {
    op_label_set_next(NULL);
    return status;
}

static int all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                      bool async_op, fct_work **work) {
    attach_label(tag);
    return detach_label(fct_pg_all_gather(pg, true, output, input, async_op, work));
}

static int reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                          fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    attach_label(tag);
    return detach_label(fct_pg_reduce_scatter(pg, true, output, input, op, factor, async_op, work));
}

static int all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                      double factor, bool async_op, fct_work **work) {
    attach_label(tag);
    return detach_label(fct_pg_all_reduce(pg, true, tensor, op, factor, async_op, work));
}

static int all_gather_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks,
                             size_t count, const fct_chunk_layout *layout, fct_work **work) {
    attach_label(tag);
    return detach_label(fct_pg_gather_chunks(pg, chunks, count, layout, work));
}

static int reduce_scatter_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                                 fct_tensor *const *chunks, size_t count,
                                 const fct_chunk_layout *layout, fct_reduce_op op,
                                 fct_work **work) {
    attach_label(tag);
    return detach_label(fct_pg_reduce_chunks(pg, output, chunks, count, layout, op, work));
}

static bool is_cpu_bound(fct_pg *pg, size_t shard_bytes) {
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n == NULL || shm_negotiation_is_paused(n)) {
        return false;
    }
    shm_transport *transport = shm_negotiation_active_transport(n);
    if (transport == NULL) {
        return false;
    }
    const bool bound = shm_transport_is_cpu_bound(transport, shard_bytes);
    shm_transport_release(transport);
    return bound;
}

const fct_transport fct_shm_transport = {
    .negotiate = negotiate,
    .is_cpu_bound = is_cpu_bound,
    .has_chunks = true,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .all_gather_chunks = all_gather_chunks,
    .reduce_scatter_chunks = reduce_scatter_chunks,
};
