/* Several ranks in one process: instances of csrc/core, each in a thread with a simulation of its
 * own (sim.h).
 *
 * Time. One thread runs at a time. It passes the turn to another rank where it waits for a
 * collective, and at random calls that can fail. The seed selects the rank that continues, so a
 * seed repeats its schedule. If all ranks wait, their collectives fail, as after a time-out.
 *
 * Collectives. A communicator has a sequence of collectives. The n-th calls of its ranks are one
 * collective. The labels are compared when a rank issues it (op_label.h). A collective runs in the
 * device's queue of a rank only after all ranks have sent their data. After a mismatch this and all
 * later collectives of the communicator fail.
 *
 * Death. A dead rank sends nothing more, and all of its calls fail. So its thread frees its memory,
 * and other ranks cannot distinguish it from a process that has ended. */
#ifndef FSDP_C_TESTS_CORE_RANKS_H
#define FSDP_C_TESTS_CORE_RANKS_H

#include "sim_model.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "splitmix.h"
#include "transport/op_label.h"

enum { RANKS_MAX = 4, COMMUNICATORS = 4 * RANKS_MAX, COLLECTIVES_MAX = 512, POOL_MAX = 4096 };
enum { DATA_BYTES = 1 << 22 };

struct sim_collective {
    int world;                 /* of the process group */
    int sent;                  /* number of ranks that have sent their data */
    bool failed;               /* on all ranks */
    int group_rank[RANKS_MAX]; /* by rank of the world */
    struct {
        bool has_issued, has_sent;
        fct_op_kind kind;
        fct_op_label label;
        const void *data;
    } ranks[RANKS_MAX]; /* by rank of the group */
    int64_t bytes;      /* of the first data */
};

typedef struct communicator {
    sim_collective *list[COLLECTIVES_MAX];
    size_t count;
    size_t next[RANKS_MAX]; /* number of the next collective of a rank of the group */
    bool failed;            /* collectives from now on fail */
} communicator;

typedef struct rank {
    pthread_t thread;
    sem_t turn;
    int number;
    sim_scenario scenario;
    bool finished, dead;
    bool waits; /* until many.changes differs from `seen` */
    uint64_t seen;
    bool at_barrier;
    int64_t events;     /* counts down the calls that can fail, to the death of the rank; 0: none */
    bool meets_failure; /* a collective of this rank has failed */
    bool raised, by_user; /* the step raised; the user's code did */
    int64_t twice;        /* collectives until one is issued twice; 0: none */
    size_t failures;      /* of its simulation */
    char failure[512];
} rank;

/* Results of the step that all living ranks have ended. */
typedef struct outcome {
    bool any_raised, any_dead, all_by_user;
    bool any_failed; /* collective */
} outcome;

static struct {
    int world;
    rank ranks[RANKS_MAX];
    outcome result; /* at the end of the latest barrier */
    sem_t ended;    /* all ranks have finished */
    void (*program)(void);
    uint64_t random;
    uint32_t preemption; /* average number of calls until a rank passes the turn; 0: never */
    uint64_t changes;    /* number of collectives that have completed or failed */
    uint64_t digest;     /* of the schedule */
    bool timed_out;      /* all collectives that are not complete fail */
    bool restarts;       /* at the end of the barrier the communicators are created again */
    bool omits_labels;
    size_t mismatches, time_outs;
    char failure[512]; /* first violated invariant; "": none */
    communicator communicators[COMMUNICATORS];
    sim_collective pool[POOL_MAX];
    size_t pool_count;
    char data[DATA_BYTES];
    size_t data_bytes;
} many;

static _Thread_local rank *self; /* NULL in the main thread */

static uint64_t random_bits(void) {
    return splitmix64(&many.random);
}

static uint32_t random_below(uint32_t below) {
    return (uint32_t)(random_bits() >> 33) % below;
}

/* Records a violated invariant. */
static void report(const char *what) {
    if (many.failure[0] == '\0') {
        (void)snprintf(many.failure, sizeof many.failure, "rank %d: %s",
                       self != NULL ? self->number : -1, what);
    }
}

/* ---- turns ---- */

static void restart_communicators(void) {
    many.restarts = many.timed_out = false;
    for (int i = 0; i < COMMUNICATORS; i++) {
        communicator *c = &many.communicators[i];
        c->count = 0;
        c->failed = false;
        memset(c->next, 0, sizeof c->next);
    }
}

static void fail_from(communicator *c, size_t first) {
    for (size_t i = first; i < c->count; i++) {
        c->list[i]->failed = c->list[i]->failed || c->list[i]->sent < c->list[i]->world;
    }
    many.changes++;
}

static void time_out(void) {
    many.timed_out = true;
    many.time_outs++;
    for (int i = 0; i < COMMUNICATORS; i++) {
        fail_from(&many.communicators[i], 0);
    }
}

static outcome outcome_of_step(void) {
    outcome o = {.all_by_user = true, .any_failed = many.timed_out || many.mismatches > 0};
    for (int i = 0; i < many.world; i++) {
        const rank *r = &many.ranks[i];
        o.any_raised = o.any_raised || r->raised;
        o.any_dead = o.any_dead || r->dead;
        o.all_by_user = o.all_by_user && r->by_user;
    }
    return o;
}

/* Ends the barrier at which all living ranks are. */
static void end_barrier(void) {
    many.result = outcome_of_step();
    if (many.restarts) {
        restart_communicators();
    }
    for (int i = 0; i < many.world; i++) {
        many.ranks[i].at_barrier = false;
    }
}

static bool can_continue(const rank *r) {
    return !r->finished && !r->at_barrier && !(r->waits && r->seen == many.changes);
}

/* Returns the rank that continues, or NULL if all have finished. */
static rank *choose_rank(void) {
    for (;;) {
        rank *found[RANKS_MAX];
        uint32_t count = 0;
        bool any_waits = false, any_lives = false;
        for (int i = 0; i < many.world; i++) {
            rank *r = &many.ranks[i];
            if (can_continue(r)) {
                found[count++] = r;
            }
            any_lives = any_lives || !r->finished;
            any_waits = any_waits || (!r->finished && r->waits);
        }
        if (count > 0) {
            rank *next = found[count > 1 ? random_below(count) : 0];
            many.digest = many.digest * 31 + (uint64_t)next->number;
            return next;
        }
        if (!any_lives) {
            return NULL;
        }
        if (any_waits) {
            time_out();
        } else {
            end_barrier();
        }
    }
}

static void pass_turn(void) {
    rank *next = choose_rank();
    const bool finished = self->finished; /* the next schedule may begin after the post */
    if (next != self) {
        assert_int_equal(sem_post(next != NULL ? &next->turn : &many.ended), 0);
        while (!finished && sem_wait(&self->turn) != 0) {
        }
    }
}

/* Waits until all living ranks are here. */
static void reach_barrier(bool restarts) {
    many.restarts = many.restarts || restarts;
    self->at_barrier = true;
    pass_turn();
}

static void *run_thread(void *argument) {
    self = (rank *)argument;
    for (;;) {
        while (sem_wait(&self->turn) != 0) {
        }
        many.program();
        self->finished = true;
        pass_turn();
    }
    return NULL;
}

/* ---- collectives ---- */

/* Returns the communicator of a process group, and this rank in the group. The groups of one mesh
 * share a communicator; sim_model.c names them. */
static communicator *find_communicator(const char *group, int *group_rank, int *world) {
    const sim_scenario *s = &self->scenario;
    const int forward_world = s->post_forward_world > 0 ? (int)s->post_forward_world : 1;
    int kind = strstr(group, ".scatter") != NULL ? 1 : 0;
    int instance = (int)s->replica;
    *group_rank = (int)s->rank;
    *world = (int)s->world;
    if (strstr(group, ".replicas") != NULL) {
        kind = 2;
        instance = (int)s->rank;
        *group_rank = (int)s->replica;
        *world = (int)s->replicas;
    } else if (strstr(group, ".forward") != NULL) {
        kind = 3;
        instance = (int)(s->replica * s->world + s->rank) / forward_world;
        *group_rank = (int)s->rank % forward_world;
        *world = forward_world;
    }
    return &many.communicators[kind * RANKS_MAX + instance];
}

static sim_collective *collective_new(int world) {
    if (many.pool_count == POOL_MAX) {
        fail_msg("the ranks issue too many collectives");
    }
    sim_collective *c = &many.pool[many.pool_count++];
    memset(c, 0, sizeof *c);
    c->world = world;
    return c;
}

/* Compares the label of a rank with those of the ranks that have issued the collective. Counts a
 * mismatch, and returns whether there is one. */
static bool detect_mismatch(const sim_collective *c, int group_rank) {
    for (int i = 0; i < c->world; i++) {
        const bool is_same_kind = c->ranks[i].kind == c->ranks[group_rank].kind;
        if (c->ranks[i].has_issued && i != group_rank &&
            !(is_same_kind && op_label_is_equal(&c->ranks[i].label, &c->ranks[group_rank].label))) {
            char own[256], other[256];
            op_label_describe(&c->ranks[group_rank].label, &c->ranks[i].label,
                              c->ranks[group_rank].kind, 0, own, sizeof own);
            op_label_describe(&c->ranks[i].label, &c->ranks[group_rank].label, c->ranks[i].kind, 0,
                              other, sizeof other);
            if (strcmp(own, other) == 0) {
                report("a mismatch names one operation for both ranks");
            }
            many.mismatches++;
            return true;
        }
    }
    return false;
}

static sim_collective *issue_once(const char *group, const fct_op_tag *tag) {
    int group_rank = 0, world = 0;
    communicator *c = find_communicator(group, &group_rank, &world);
    const size_t at = c->next[group_rank]++;
    if (at == COLLECTIVES_MAX) {
        fail_msg("the ranks issue too many collectives");
    }
    if (at == c->count) {
        c->list[c->count++] = collective_new(world);
    }
    sim_collective *found = c->list[at];
    found->group_rank[self->number] = group_rank;
    found->ranks[group_rank].has_issued = true;
    found->ranks[group_rank].kind = tag->kind;
    found->ranks[group_rank].label = tag->label;
    if (many.omits_labels) {
        found->ranks[group_rank].label.unit = 0;
    }
    if (detect_mismatch(found, group_rank)) {
        c->failed = true;
        fail_from(c, at);
    }
    found->failed = found->failed || c->failed || many.timed_out;
    return found;
}

static sim_collective *issue_collective(const char *group, const fct_op_tag *tag) {
    if (self->twice > 0 && --self->twice == 0) {
        (void)issue_once(group, tag);
    }
    return issue_once(group, tag);
}

static bool is_complete(sim_collective *c, const void *data, int64_t bytes) {
    const int group_rank = c->group_rank[self->number];
    if (c->failed || self->dead) {
        return true;
    }
    if (!c->ranks[group_rank].has_sent) {
        char *copy = many.data + many.data_bytes;
        if (many.data_bytes + (size_t)bytes > DATA_BYTES) {
            fail_msg("the ranks send too much data");
        }
        if (bytes > 0) {
            memcpy(copy, data, (size_t)bytes);
        }
        many.data_bytes += ((size_t)bytes + 15) / 16 * 16;
        c->ranks[group_rank].data = copy;
        c->ranks[group_rank].has_sent = true;
        c->bytes = c->sent == 0 ? bytes : c->bytes;
        if (c->bytes != bytes) {
            report("equal labels have different sizes");
            c->failed = true;
        }
        if (++c->sent == c->world || c->failed) {
            many.changes++;
        }
    }
    return c->failed || c->sent == c->world;
}

static bool has_failed(const sim_collective *c) {
    const bool failed = c->failed || self->dead;
    self->meets_failure = self->meets_failure || failed;
    return failed;
}

static const void *data_of(const sim_collective *c, int64_t group_rank) {
    return c->ranks[group_rank].data;
}

static void wait_for_change(void) {
    self->waits = true;
    self->seen = many.changes;
    pass_turn();
    self->waits = false;
}

/* The death of a rank closes its connections, so its peers fail at once. In half of the cases, by
 * chance, the peers wait until the time-out instead. */
static void preempt(void) {
    if (self == NULL) {
        return;
    }
    if (self->events > 0 && --self->events == 0) {
        self->dead = true;
        sim_fault_arm(1, SIM_ALL_AFTER);
        if (random_below(2) == 0) {
            time_out();
        }
    }
    if (many.preemption > 0 && random_below(many.preemption) == 0) {
        pass_turn();
    }
}

static const sim_ranks_table ranks_table = {.issue = issue_collective,
                                            .is_complete = is_complete,
                                            .has_failed = has_failed,
                                            .data_of = data_of,
                                            .wait = wait_for_change,
                                            .preempt = preempt};

/* ---- schedules ---- */

static void start_threads(void) {
    sim_ranks = &ranks_table;
    assert_int_equal(sem_init(&many.ended, 0, 0), 0);
    for (int i = 0; i < RANKS_MAX; i++) {
        rank *r = &many.ranks[i];
        r->number = i;
        assert_int_equal(sem_init(&r->turn, 0, 0), 0);
        assert_int_equal(pthread_create(&r->thread, NULL, run_thread, r), 0);
    }
}

static void begin_schedule(uint64_t seed, int world) {
    many.world = world;
    many.random = seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    many.digest = many.changes = many.mismatches = many.time_outs = 0;
    many.pool_count = many.data_bytes = 0;
    many.omits_labels = false;
    many.failure[0] = '\0';
    restart_communicators();
    for (int i = 0; i < RANKS_MAX; i++) {
        rank *r = &many.ranks[i];
        r->finished = r->dead = r->waits = r->at_barrier = false;
        r->meets_failure = r->raised = r->by_user = false;
        r->events = r->twice = 0;
        r->failures = 0;
    }
}

/* Runs the program on all ranks. */
static void run_schedule(void) {
    rank *first = choose_rank();
    assert_int_equal(sem_post(&first->turn), 0);
    while (sem_wait(&many.ended) != 0) {
    }
}

#endif
