/* The part of a simulation that several ranks in one process share (core_ranks.h), and waits that
 * seeded bugs drop. Inactive unless a test sets sim_ranks or drops a wait. */
#include "sim_internal.h"

const sim_ranks_table *sim_ranks;
_Thread_local bool sim_data_is_lost;
static _Thread_local int64_t waits_until_dropped[SIM_WAIT_KINDS];

void sim_ranks_begin(void) {
    sim_data_is_lost = false;
    for (int kind = 0; kind < SIM_WAIT_KINDS; kind++) {
        waits_until_dropped[kind] = 0;
    }
}

static bool may_run(void *args) {
    const sim_shared *s = (const sim_shared *)args;
    return sim_ranks->is_complete(s->collective, s->data, s->bytes);
}

sim_collective *sim_share(sim_op *op, const char *group, const fct_op_tag *tag) {
    if (sim_ranks == NULL || tag == NULL) {
        return NULL;
    }
    sim_collective *collective = sim_ranks->issue(group, tag);
    ((sim_shared *)op->args)->collective = collective;
    op->may_run = may_run;
    return collective;
}

bool sim_is_lost(const sim_shared *s) {
    const bool is_lost = s->collective != NULL && sim_ranks->has_failed(s->collective);
    sim_data_is_lost = sim_data_is_lost || is_lost;
    return is_lost;
}

int sim_check_shared(const sim_collective *c) {
    return c != NULL && sim_ranks->has_failed(c) ? sim_raise() : 0;
}

void sim_wait_drop(sim_wait_kind kind, int64_t n) {
    waits_until_dropped[kind] = n;
}

bool sim_wait_is_dropped(sim_wait_kind kind) {
    int64_t *left = &waits_until_dropped[kind];
    return *left < 0 || (*left > 0 && --*left == 0);
}
