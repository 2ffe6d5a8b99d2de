/* Checksums of all-gathers; see gather_checksum.h. Keeps no pointer.
 *
 * On devices with streams, the sum of a rank has two terms. The first is the checksum of all rows.
 * The second is twice the difference between the checksums of its own row after and before the
 * all-gather. So the sums of all ranks are equal if all have the same rows, and no own row has
 * changed. */
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

fc_checksum *fc_gather_checksum_of_rows(fc_gather_checksum *c, const fc_group_base *base) {
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
    size_t run = 0; /* slots and runs are in the order of a row */
    for (size_t i = 0; is_used(base, false) && i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (!plan->chunks.chunks[slot->chunk].owned) {
            continue;
        }
        while (run < plan->chunks.run_count && plan->chunks.runs[run].chunk != slot->chunk) {
            run++;
        }
        for (int64_t row = 0; row < plan->world; row++) {
            const fc_checksum_row of = {row, row == rank};
            uint64_t sum = 0;
            if (fct_work_row_checksum(work, run, row, &sum)) {
                fc_checksum_add_sum(&c->owned, i, of, sum);
            } else {
                c->owned.unknown = true;
            }
        }
    }
}

/* Writes the address of the rows, and checks that the buffer contains them. */
static fc_status find_rows(const fct_tensor *rows, int64_t bytes, const char **data,
                           fc_error *err) {
    fct_facts facts;
    fct_tensor_facts(rows, &facts);
    if (!fct_facts_hold(&facts, bytes)) {
        return fc_error_set(err, FC_EASSERT, "a checksum of %lld bytes does not fit its buffer",
                            (long long)bytes);
    }
    *data = (const char *)facts.data;
    return FC_OK;
}

fc_status fc_gather_checksum_read_packed(fc_gather_checksum *c, const fc_group_base *base,
                                         const fc_gather_plan *plan, int64_t rank,
                                         const fct_tensor *rows) {
    assert(rank >= 0 && rank < plan->world);
    fc_status status = FC_OK;
    const char *data = NULL;
    if (!is_used(base, true) || rows == NULL) {
        return FC_OK;
    }
    fc_device_checksums **d = &base->comm->device_checksums;
    fc_error *err = &base->comm->error;
    FC_TRY(find_rows(rows, plan->world * plan->row_bytes, &data, err));
    const fck_range own = {.data = data + rank * plan->row_bytes,
                           .bytes = plan->row_bytes,
                           .factor = UINT64_MAX - (OWN_FACTOR - 1)};
    if ((uintptr_t)data % sizeof(uint64_t) == 0) {
        FC_TRY(fc_device_checksums_take(d, base->device, &c->sum));
        FC_TRY(fc_device_checksums_add(*d, &c->sum, &own, 1, err));
    }
done:
    return status;
}

/* Reads the gathered rows, on devices with streams. */
static fc_status read_rows(fc_gather_checksum *c, const fc_group_base *base, int64_t rank,
                           const fc_gather_plan *plan, const fct_tensor *rows) {
    fc_status status = FC_OK;
    const char *data = NULL;
    fc_error *err = &base->comm->error;
    FC_TRY(find_rows(rows, plan->world * plan->row_bytes, &data, err));
    const fck_range ranges[] = {
        {.data = data, .bytes = plan->world * plan->row_bytes, .factor = 1},
        {.data = data + rank * plan->row_bytes, .bytes = plan->row_bytes, .factor = OWN_FACTOR},
    };
    FC_TRY(fc_device_checksums_add(base->comm->device_checksums, &c->sum, ranges, 2, err));
done:
    return status;
}

fc_status fc_gather_checksum_add(fc_gather_checksum *c, const fc_group_base *base,
                                 fc_process_group *pg, const fc_gather_plan *plan,
                                 const fct_tensor *rows) {
    assert(pg != NULL);
    fc_status status = FC_OK;
    if (c->added || pg->world == 1) {
        return FC_OK;
    }
    if (is_used(base, false)) {
        fc_group_base_add_checksum(base, pg, FC_ALL_GATHER,
                                   fc_checksum_of_rows(&c->gathered, &c->packed));
    } else if (is_used(base, true)) {
        c->sum.at = rows != NULL ? c->sum.at : NULL;
        if (c->sum.at != NULL) {
            FC_TRY(read_rows(c, base, pg->rank, plan, rows));
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
