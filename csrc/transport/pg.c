/* The transport of torch's process group: the backend of the group (gloo, NCCL, ...) moves the
 * data.
 *
 * This transport counts its gathers and all-reduces, because the negotiation about shared memory
 * needs their number. Messages of this transport carry no tags. So the ranks compare the sizes of
 * collectives before the backend moves data, and their labels afterwards. For collectives of
 * devices with streams only the labels are recorded: the calling thread may not hold the GIL
 * (bridge/gil.h), and a process group may have collectives of the CPU, too. */
#include "pg.h"

#include "../bridge/tensor.h"
#include "group_negotiation.h"

/* A collective that is about to be issued. */
typedef struct next_op {
    shm_negotiation *negotiation; /* NULL: the ranks compare nothing */
    bool on_cpu;                  /* the CPU backend moves the data */
    uint64_t signature;
    const fct_op_tag *tag;
} next_op;

static int begin(fct_pg *pg, fct_op_kind kind, const fct_op_tag *tag, const fct_tensor *input,
                 next_op *next) {
    fct_facts facts;
    *next = (next_op){.negotiation = fct_negotiation_find(pg),
                      .on_cpu = fct_tensor_device(input).type == FCT_DEVICE_CPU,
                      .tag = tag};
    if (next->negotiation == NULL) {
        return 0;
    }
    if (!next->on_cpu) {
        return shm_negotiation_check_stopped(next->negotiation);
    }
    if (shm_negotiation_compares_sizes(next->negotiation)) {
        fct_tensor_facts(input, &facts);
        next->signature = op_signature((uint64_t)kind, (uint64_t)(facts.numel * facts.itemsize));
    }
    return shm_negotiation_compare_size(next->negotiation, pg, next->signature, tag);
}

/* Records the collective if it was issued, and counts a gather or an all-reduce (`gathers`).
 * `status`: the result of the call. */
static int end(const next_op *next, bool gathers, int status) {
    if (status != 0 || next->negotiation == NULL) {
        return status;
    }
    if (!next->on_cpu) {
        shm_negotiation_record_of_device(next->negotiation, next->tag);
        return 0;
    }
    shm_negotiation_record(next->negotiation, next->signature, next->tag);
    if (gathers) {
        shm_negotiation_count_gather(next->negotiation);
    }
    return 0;
}

static int all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                      bool async_op, fct_work **work) {
    next_op next;
    if (begin(pg, FCT_OP_ALL_GATHER, tag, input, &next) != 0) {
        return -1;
    }
    return end(&next, true, fct_pg_all_gather(pg, false, output, input, async_op, work));
}

static int reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                          fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    next_op next;
    if (begin(pg, FCT_OP_REDUCE_SCATTER, tag, input, &next) != 0) {
        return -1;
    }
    return end(&next, false,
               fct_pg_reduce_scatter(pg, false, output, input, op, factor, async_op, work));
}

static int all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                      double factor, bool async_op, fct_work **work) {
    next_op next;
    if (begin(pg, FCT_OP_ALL_REDUCE, tag, tensor, &next) != 0) {
        return -1;
    }
    return end(&next, true, fct_pg_all_reduce(pg, false, tensor, op, factor, async_op, work));
}

const fct_transport fct_pg_transport = {
    .negotiate = NULL,
    .is_cpu_bound = NULL,
    .has_chunks = false,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .all_gather_chunks = NULL,
    .reduce_scatter_chunks = NULL,
};
