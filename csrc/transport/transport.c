/* Selects the transport of each collective; see transport.h. The bridge owns the negotiation of a
 * process group while the group lives. */
#include "transport.h"

#include <assert.h>

#include "../bridge/error.h"
#include "../bridge/tensor.h"

/* Transports that the ranks negotiate. A collective uses the first one that is accepted, else the
 * group's own backend. */
static const fct_transport *const negotiated[] = {&fct_shm_transport};
enum { NEGOTIATED = sizeof negotiated / sizeof *negotiated };

const fct_transport *fct_transport_select(fct_pg *pg, fct_device device, fct_use use) {
    assert(pg != NULL);
    for (size_t i = 0; i < NEGOTIATED; i++) {
        bool accepted = false;
        if (negotiated[i]->negotiate(pg, device, use, &accepted) != 0) {
            return NULL;
        }
        if (accepted) {
            return negotiated[i];
        }
    }
    return &fct_pg_transport;
}

int fct_compare_plan(fct_pg *pg, fct_device device, uint64_t plan, bool waits,
                     fct_plan_result *result) {
    assert(pg != NULL && result != NULL);
    if (fct_fault("fct_compare_plan") != 0) {
        return -1;
    }
    *result = (fct_plan_result){.state = FCT_PLANS_EQUAL};
    if (device.type == FCT_DEVICE_CPU) {
        return fct_pg_is_gloo(pg) ? fct_shm_compare_plan(pg, plan, waits, result) : 0;
    }
    /* The negotiation counts the collectives and keeps their labels, which the stall monitors
     * compare. The counts must be equal, so ranks that compare nothing also count. */
    return fct_negotiation_open(pg) != NULL ? 0 : -1;
}

int fct_number_root(fct_pg *pg, fct_device device, uint64_t root, uint64_t *number) {
    assert(pg != NULL && number != NULL);
    *number = 0;
    if (device.type != FCT_DEVICE_CPU || !fct_pg_is_gloo(pg)) {
        return 0;
    }
    shm_negotiation *n = fct_negotiation_open(pg);
    return n != NULL ? shm_negotiation_number_root(n, root, number) : -1;
}

void fct_add_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    assert(pg != NULL && tag != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n != NULL) {
        op_checksums_add(shm_negotiation_checksums(n), tag, checksum);
    }
}

void fct_add_device_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    assert(pg != NULL && tag != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n != NULL) {
        op_checksums_add(shm_negotiation_device_checksums(n), tag, checksum);
    }
}

void fct_end_checksum_interval(fct_pg *pg, uint64_t number) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n != NULL) {
        op_checksums_end_interval(shm_negotiation_device_checksums(n), number);
    }
}

uint64_t fct_number_checksum_interval(fct_pg *pg) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    return n == NULL ? 0
                     : op_checksums_number_interval(shm_negotiation_device_checksums(n),
                                                    shm_negotiation_recorded_count(n));
}

void fct_drop_checksums(fct_pg *pg) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n != NULL) {
        op_checksums_drop(shm_negotiation_checksums(n));
    }
}

int fct_agree_start(fct_pg *pg, bool *issued) {
    assert(pg != NULL && issued != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    *issued = false;
    return n != NULL ? shm_negotiation_start_agreement(n, pg, issued) : 0;
}

bool fct_agree_start_waits(fct_pg *pg) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_find(pg);
    return n != NULL && shm_negotiation_agreement_waits(n);
}

int fct_agree_await(fct_pg *pg, fct_difference *difference) {
    assert(pg != NULL && difference != NULL);
    if (fct_fault("fct_agree_await") != 0) {
        return -1;
    }
    difference->text[0] = '\0';
    shm_negotiation *n = fct_negotiation_find(pg);
    return n != NULL ? shm_negotiation_await_agreement(n, pg, difference) : 0;
}

/* ---- collectives ---- */

int fct_all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                   bool async_op, fct_work **work) {
    assert(tag == NULL || tag->kind == FCT_OP_ALL_GATHER);
    const fct_transport *t = fct_transport_select(pg, fct_tensor_device(output), FCT_USE_GATHER);
    return t == NULL ? -1 : t->all_gather(pg, tag, output, input, async_op, work);
}

int fct_reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                       fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    assert(tag == NULL || tag->kind == FCT_OP_REDUCE_SCATTER);
    const fct_transport *t = fct_transport_select(pg, fct_tensor_device(output), FCT_USE_REDUCE);
    return t == NULL ? -1 : t->reduce_scatter(pg, tag, output, input, op, factor, async_op, work);
}

int fct_all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                   double factor, bool async_op, fct_work **work) {
    assert(tag == NULL || tag->kind == FCT_OP_ALL_REDUCE);
    const fct_transport *t =
        fct_transport_select(pg, fct_tensor_device(tensor), FCT_USE_ALL_REDUCE);
    return t == NULL ? -1 : t->all_reduce(pg, tag, tensor, op, factor, async_op, work);
}

int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes) {
    assert(pg != NULL && takes != NULL);
    if (fct_fault("fct_pg_takes_chunks") != 0) {
        return -1;
    }
    const fct_transport *t =
        fct_transport_select(pg, device, gathers ? FCT_USE_GATHER : FCT_USE_REDUCE);
    if (t == NULL) {
        return -1;
    }
    *takes = false;
    return t->has_chunks ? fct_pg_can_pass_chunks(pg, takes) : 0;
}

/* fct_pg_takes_chunks has selected shared memory, the only transport with chunks. */
int fct_gather_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks, size_t count,
                      const fct_chunk_layout *layout, fct_work **work) {
    assert(count > 0 && layout->count > 0);
    return fct_shm_transport.all_gather_chunks(pg, tag, chunks, count, layout, work);
}

int fct_reduce_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                      fct_tensor *const *chunks, size_t count, const fct_chunk_layout *layout,
                      fct_reduce_op op, fct_work **work) {
    assert(count > 0 && layout->count > 0);
    return fct_shm_transport.reduce_scatter_chunks(pg, tag, output, chunks, count, layout, op,
                                                   work);
}

bool fct_gather_is_cpu_bound(fct_pg *pg, int64_t rank_bytes) {
    assert(pg != NULL && rank_bytes >= 0);
    bool is_bound = false;
    for (size_t i = 0; i < NEGOTIATED && !is_bound; i++) {
        is_bound = negotiated[i]->is_cpu_bound(pg, (size_t)rank_bytes);
    }
    return is_bound;
}

/* ---- for csrc/python ---- */

int fct_transport_enter(fct_pg *pg, fct_use use, int64_t bytes, void **entered) {
    static const fct_op_kind kinds[] = {FCT_OP_ALL_GATHER, FCT_OP_REDUCE_SCATTER,
                                        FCT_OP_ALL_REDUCE};
    assert(pg != NULL && use != FCT_USE_QUERY && bytes >= 0);
    if (fct_fault("fct_transport_enter") != 0) {
        return -1;
    }
    const fct_device cpu = {FCT_DEVICE_CPU, -1};
    const fct_transport *t = fct_transport_select(pg, cpu, use);
    if (t == NULL) {
        return -1;
    }
    if (t == &fct_shm_transport) {
        return fct_pg_enter_shm(pg, use == FCT_USE_ALL_REDUCE, entered);
    }
    *entered = NULL;
    /* The caller issues the collective through torch, so pg.c neither compares nor records it. */
    shm_negotiation *n = fct_negotiation_find(pg);
    if (n != NULL) {
        const uint64_t signature = bytes > 0 ? op_signature(kinds[use], (uint64_t)bytes) : 0;
        if (shm_negotiation_compare_size(n, pg, signature, NULL) != 0) {
            return -1;
        }
        shm_negotiation_record(n, signature, NULL);
        if (use != FCT_USE_REDUCE) {
            shm_negotiation_count_gather(n);
        }
    }
    return 0;
}

int fct_transport_pause(fct_pg *pg, bool paused) {
    assert(pg != NULL);
    shm_negotiation *n = fct_negotiation_open(pg);
    if (n == NULL) {
        return -1;
    }
    shm_negotiation_set_paused(n, paused);
    return 0;
}
