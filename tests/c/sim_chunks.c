/* Collectives over separate chunks: whether the transport takes chunks, and their layouts. */
#include "sim_internal.h"

int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes) {
    (void)pg;
    (void)device;
    (void)gathers;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_pg_takes_chunks")) {
        return -1;
    }
    *takes = sim_now.chunks && !sim_now.streams;
    return 0;
}

void sim_check_layout(int64_t world, fct_tensor *const *chunks, size_t count,
                      const fct_chunk_layout *layout) {
    int64_t total = 0;
    for (size_t k = 0; k < count; k++) {
        int64_t filled = 0;
        for (size_t i = 0; i < layout->count; i++) {
            const fct_run *run = &layout->runs[i];
            if (run->chunk == k && run->offset != filled) {
                sim_fail("run %zu begins at %lld of chunk %zu; expected %lld", i,
                         (long long)run->offset, k, (long long)filled);
            }
            filled += run->chunk == k ? run->numel : 0;
        }
        sim_view view = sim_view_of(chunks[k], "a collective over chunks");
        if (view.numel != filled * world) {
            sim_fail("chunk %zu has %lld elements; its runs %lld for each rank", k,
                     (long long)view.numel, (long long)filled);
        }
        total += filled;
    }
    if (total != layout->rank_numel) {
        sim_fail("the runs have %lld elements; the rank shard %lld", (long long)total,
                 (long long)layout->rank_numel);
    }
}
