/* Checksums of all-gathers; see gather_checksum.h. Owns nothing.
 *
 * On devices with streams, the sum of a rank has two terms. The first is the checksum of all rank
 * shards. The second is twice the difference between the checksums of its own shard after and
 * before the all-gather. So the sums of all ranks are equal if all have the same rank shards, and
 * no own shard has changed. */
#include "gather_checksum.h"

#include <assert.h>

enum { OWN_FACTOR = 2 };

static bool is_used(const fc_group_base *base, bool on_streams) {
    return base->comm != NULL && base->comm->checksums && base->comm->has_streams == on_streams;
}

fc_checksum *fc_gather_checksum_of_pack(fc_gather_checksum *c, const fc_group_base *base) {
    assert(!c->added);
    return is_used(base, false) ? &c->packed : NULL;
}

fc_checksum *fc_gather_checksum_of_copy_out(fc_gather_checksum *c, const fc_group_base *base) {
    assert(base->comm != NULL);
    c->gathered = c->owned;
    return is_used(base, false) ? &c->gathered : NULL;
}

bool fc_gather_checksum_needs_chunks(const fc_group_base *base) {
    return is_used(base, false);
}

void fc_gather_checksum_take_owned(fc_gather_checksum *c, const fc_group_base *base,
                                   const fc_gather_plan *plan, int64_t rank, const fct_work *work) {
    assert(plan->chunks.split && work != NULL);
    size_t run = 0; /* slots and runs are in the order of a rank shard */
    for (size_t i = 0; is_used(base, false) && i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (!plan->chunks.chunks[slot->chunk].owned) {
            continue;
        }
        while (run < plan->chunks.run_count && plan->chunks.runs[run].chunk != slot->chunk) {
            run++;
        }
        for (int64_t r = 0; r < plan->world; r++) {
            const fc_checksum_shard shard = {r, r == rank};
            uint64_t sum = 0;
            if (fct_work_rank_checksum(work, run, r, &sum)) {
                fc_checksum_add_sum(&c->owned, i, shard, sum);
            } else {
                c->owned.unknown = true;
            }
        }
    }
}

/* Writes the address of the buffer's data, and checks that it has `bytes` bytes. */
static fc_status find_data(const fct_tensor *buffer, int64_t bytes, const char **data,
                           fc_error *err) {
    fct_facts facts;
    fct_tensor_facts(buffer, &facts);
    if (!fct_facts_has_bytes(&facts, bytes)) {
        return fc_error_set(err, FC_EASSERT, "a checksum of %lld bytes does not fit its buffer",
                            (long long)bytes);
    }
    *data = (const char *)facts.data;
    return FC_OK;
}

fc_status fc_gather_checksum_read_packed(fc_gather_checksum *c, const fc_group_base *base,
                                         const fc_gather_plan *plan, int64_t rank,
                                         const fct_tensor *buffer) {
    assert(rank >= 0 && rank < plan->world);
    fc_status status = FC_OK;
    const char *data = NULL;
    if (!is_used(base, true) || buffer == NULL) {
        return FC_OK;
    }
    fc_device_checksums **d = &base->comm->device_checksums;
    fc_error *err = &base->comm->error;
    FC_TRY(find_data(buffer, plan->world * plan->rank_bytes, &data, err));
    const fck_range own = {.data = data + rank * plan->rank_bytes,
                           .bytes = plan->rank_bytes,
                           .factor = UINT64_MAX - (OWN_FACTOR - 1)};
    if ((uintptr_t)data % sizeof(uint64_t) == 0) {
        FC_TRY(fc_device_checksums_take(d, base->device, &c->sum));
        FC_TRY(fc_device_checksums_add(*d, &c->sum, &own, 1, err));
    }
done:
    return status;
}

/* Reads the gathered rank shards, on devices with streams. */
static fc_status read_gathered(fc_gather_checksum *c, const fc_group_base *base, int64_t rank,
                               const fc_gather_plan *plan, const fct_tensor *buffer) {
    fc_status status = FC_OK;
    const char *data = NULL;
    fc_error *err = &base->comm->error;
    FC_TRY(find_data(buffer, plan->world * plan->rank_bytes, &data, err));
    const fck_range ranges[] = {
        {.data = data, .bytes = plan->world * plan->rank_bytes, .factor = 1},
        {.data = data + rank * plan->rank_bytes, .bytes = plan->rank_bytes, .factor = OWN_FACTOR},
    };
    FC_TRY(fc_device_checksums_add(base->comm->device_checksums, &c->sum, ranges, 2, err));
done:
    return status;
}

fc_status fc_gather_checksum_add(fc_gather_checksum *c, const fc_group_base *base,
                                 fc_process_group *pg, const fc_gather_plan *plan,
                                 const fct_tensor *buffer) {
    assert(pg != NULL);
    fc_status status = FC_OK;
    if (c->added || pg->world == 1) {
        return FC_OK;
    }
    if (is_used(base, false)) {
        fc_group_base_add_checksum(base, pg, FC_ALL_GATHER,
                                   fc_checksum_of_shards(&c->gathered, &c->packed));
    } else if (is_used(base, true)) {
        c->sum.at = buffer != NULL ? c->sum.at : NULL;
        if (c->sum.at != NULL) {
            FC_TRY(read_gathered(c, base, pg->rank, plan, buffer));
        }
        fc_group_base_add_device_sum(base, pg, FC_ALL_GATHER, &c->sum);
    }
    c->added = true;
done:
    return status;
}

void fc_gather_checksum_add_unknown(fc_gather_checksum *c, const fc_group_base *base,
                                    fc_process_group *pg) {
    assert(pg != NULL);
    if (!c->added) {
        fc_group_base_add_checksum(base, pg, FC_ALL_GATHER, 0);
    }
    c->added = true;
}
