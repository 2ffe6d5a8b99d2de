/* The program of each rank of the simulation in many_ranks.h: steps of a model of three units over
 * one process group, with the transport's real functions. It replaces csrc/core and csrc/bridge.
 *
 * Forward gathers units 0, 1 and 2. Backward gathers unit 2 again, prefetches unit 1, and reduces
 * 2, 1 and 0. The numbers are small integers, so each rank computes the exact parameters of every
 * step. Gloo's collectives match by their order of issue. */
#ifndef FSDP_C_TESTS_MANY_RANKS_STEP_H
#define FSDP_C_TESTS_MANY_RANKS_STEP_H

#include "many_ranks.h"

#include "bridge/error.h"
#include "kernels/kernels.h"
#include "transport/group_users.h"
#include "transport/negotiation.h"
#include "transport/op_label.h"
#include "transport/shm_collective.h"
#include "transport/shm_tag.h"

enum { UNITS = 3, STEPS = 3, ACTIONS = 16, NUMEL_MAX = 6, OPS_MAX = 96, LIMIT_MS = 60000 };

typedef enum fault_kind {
    NO_FAULT = 0,
    DIES,           /* at any access to shared memory, or between actions */
    LATE,           /* sleeps before an action */
    NO_MEMORY,      /* an allocation fails */
    INTERRUPTED,    /* a wait; the rank repeats the step */
    OTHER_UNIT,     /* gathers another unit */
    OTHER_PARAMS,   /* reduces the gradients of other parameters */
    LEAVES_OUT,     /* a collective */
    OTHER_PLAN,     /* of the model; this and the next two faults begin with the schedule */
    VETO,           /* of shared memory */
    CANNOT_CONNECT, /* cannot map a ring */
    RAISES_ON_ALL,  /* every rank raises at the same action and resets */
    FAULT_KINDS,
} fault_kind;

typedef struct fault {
    fault_kind kind;
    int rank, step, action;
    bool done;
} fault;

/* Copies of bugs of FSDP implementations, on the last rank or on all ranks. */
typedef enum known_bug {
    NO_BUG = 0,
    FREES_GATHER_BEFORE_COPY_OUT,
    REDUCES_IN_ANOTHER_ORDER, /* one rank */
    REUSES_REDUCTION_BUFFER,  /* without a wait for the previous reduction */
    PREFETCHES_WRONG_UNIT,    /* one rank */
    RESET_FORGETS_GATHER,     /* one rank */
    OMITS_LABELS, /* not an implementation's bug: shows that the simulation needs labels */
    KNOWN_BUGS,
} known_bug;

typedef enum outcome {
    COMPLETED = 0,
    CLOSED,   /* a peer has ended, or gloo is broken */
    MISMATCH, /* of labels */
    PLAN,     /* the plans differ */
    TIMED_OUT,
    MEMORY, /* an allocation has failed */
    INTERRUPT
} outcome;

/* One collective of one rank. The transport may use it until `released`. */
typedef struct collective_op {
    struct collective_op *next; /* abandoned operations */
    shm_collective *shm;        /* NULL: gloo */
    shm_transport *transport;
    int number; /* in the order of its transport */
    fct_op_kind kind;
    int unit;
    float *buffer; /* a gather's output or a reduction's input */
    float *output;
    bool started, completed, released;
    char error[SHM_ERROR_BYTES];
} collective_op;

typedef struct unit_state {
    float shard[NUMEL_MAX];
    float full[NUMEL_MAX * RANKS_MAX]; /* the unsharded parameter */
    collective_op *gather;
    bool compared;
} unit_state;

struct fct_pg {
    int rank;
    bool waits;    /* for the comparison of plans, before it starts a gather */
    uint64_t plan; /* 0: the guard is off */
    shm_negotiation *negotiation;
    unit_state units[UNITS];
    collective_op *reduction;
    collective_op *abandoned;
    int step, action, updates, issued, issued_before;
    int gloo_count, shm_count;
    int more_users;  /* registered parameter groups that are not used */
    bool interrupts; /* the next wait */
    outcome raised;  /* in the current call, then in the program */
};

/* A collective that a rank has issued. */
typedef struct log_entry {
    uint64_t code; /* 0: none; kind, unit, parameters, plan */
    uint32_t tag;
    float data[NUMEL_MAX * RANKS_MAX]; /* over gloo */
    int64_t integers[8];               /* of an exchange */
} log_entry;

static struct {
    int world;
    known_bug bug;
    fault faults[2];
    bool all_wait;     /* no rank starts a gather before the comparison of plans has ended */
    bool guard_is_off; /* a rank compares nothing */
    bool plan_differs;
    bool diverged;    /* ranks have issued different collectives with one number */
    bool shifted;     /* a rank has issued more or fewer collectives than the others */
    bool gloo_broken; /* all its collectives fail, because sizes differed */
    struct fct_pg ranks[RANKS_MAX];
    log_entry gloo[OPS_MAX][RANKS_MAX], shm[OPS_MAX][RANKS_MAX];
    int transports[OPS_MAX]; /* of a collective, in the order of issue; 1: gloo, 2: shared memory */
    int failures;            /* violated invariants */
    char failure[200];       /* the first */
    uint64_t digest;         /* of what the schedule did */
    bool used_shm;
} simulated;

static const int64_t numels[UNITS] = {4, 4, 6};

static void report(const char *text, int rank) {
    if (simulated.failures++ == 0) {
        (void)snprintf(simulated.failure, sizeof simulated.failure, "%s (rank %d)", text, rank);
    }
}

static void add_to_digest(uint64_t value) {
    simulated.digest = (simulated.digest ^ value) * UINT64_C(1099511628211);
}

static bool never(void *argument) {
    (void)argument;
    return false;
}

static void suspend_for(int64_t ms) {
    suspend_until(never, NULL, ms);
}

static bool is_due(fault_kind kind, const struct fct_pg *pg) {
    for (int i = 0; i < 2; i++) {
        fault *f = &simulated.faults[i];
        if (f->kind == kind && !f->done && f->step == pg->step && f->action <= pg->action &&
            (f->rank == pg->rank || kind == RAISES_ON_ALL)) {
            f->done = kind != RAISES_ON_ALL;
            return true;
        }
    }
    return false;
}

static bool has_bug(known_bug bug, const struct fct_pg *pg) {
    return simulated.bug == bug && pg->rank == simulated.world - 1;
}

/* ---- gloo ---- */

static bool have_all_issued(int number) {
    for (int rank = 0; rank < simulated.world; rank++) {
        if (simulated.gloo[number][rank].code == 0) {
            return false;
        }
    }
    return true;
}

/* A rank has ended before it issued the collective. */
static bool is_lost(int number) {
    for (int rank = 0; rank < simulated.world; rank++) {
        if (simulated.gloo[number][rank].code == 0 && many.ranks[rank].finished) {
            return true;
        }
    }
    return false;
}

static bool gloo_wakes(void *argument) {
    const int number = *(const int *)argument;
    return have_all_issued(number) || is_lost(number) || simulated.gloo_broken;
}

/* Gloo ends the process if sizes differ. */
static log_entry *gloo_issue(struct fct_pg *pg, uint64_t code, uint32_t tag, int *number) {
    preempt();
    *number = pg->gloo_count++;
    log_entry *entry = &simulated.gloo[*number][pg->rank];
    entry->code = code;
    entry->tag = tag;
    for (int rank = 0; rank < simulated.world; rank++) {
        const log_entry *other = &simulated.gloo[*number][rank];
        if (other->code != 0 && other->tag != tag) {
            simulated.gloo_broken = true;
            if (!simulated.shifted && !simulated.diverged) {
                report("collectives of different sizes met in gloo", pg->rank);
            }
        }
    }
    return entry;
}

static outcome gloo_wait(struct fct_pg *pg, int number) {
    if (pg->interrupts) {
        pg->interrupts = false;
        return INTERRUPT;
    }
    if (!gloo_wakes(&number)) {
        suspend_until(gloo_wakes, &number, LIMIT_MS);
    }
    if (simulated.gloo_broken) {
        return CLOSED;
    }
    return have_all_issued(number) ? COMPLETED : is_lost(number) ? CLOSED : TIMED_OUT;
}

/* ---- functions of the bridge ---- */

struct fct_exchange {
    struct fct_pg *pg;
    int number, owners;
    size_t count;
    int64_t values[8 * RANKS_MAX];
};

int64_t fct_pg_world_size(const fct_pg *pg) {
    (void)pg;
    return simulated.world;
}

int64_t fct_pg_rank(const fct_pg *pg) {
    return pg->rank;
}

const char *fct_pg_name(const fct_pg *pg) {
    static const char *const names[RANKS_MAX] = {"rank 0", "rank 1", "rank 2", "rank 3"};
    return names[pg->rank];
}

bool fct_pg_has_plain_gloo(const fct_pg *pg) {
    (void)pg;
    return true;
}

bool fct_c10d_is_debugged(void) {
    return false;
}

void fct_error_no_memory(void) {}

void fct_error_runtime(const char *text) {
    (void)text;
}

int fct_pg_stop_waits(fct_pg *pg, const char *text) {
    (void)pg, (void)text;
    return 0;
}

int fct_exchange_start(fct_pg *pg, const int64_t *values, size_t count, fct_exchange **out) {
    fct_exchange *exchange = (fct_exchange *)calloc(1, sizeof *exchange);
    if (exchange == NULL) {
        pg->raised = MEMORY;
        return -1;
    }
    *exchange = (fct_exchange){.pg = pg, .owners = 1, .count = count};
    log_entry *entry = gloo_issue(pg, 1, (uint32_t)count, &exchange->number);
    memcpy(entry->integers, values, count * sizeof *values);
    *out = exchange;
    return 0;
}

int fct_exchange_start_distinct(fct_pg *pg, const int64_t *values, size_t count,
                                fct_exchange **out) {
    return fct_exchange_start(pg, values, count, out);
}

int fct_exchange_wait(fct_exchange *exchange, const int64_t **results) {
    exchange->pg->raised = gloo_wait(exchange->pg, exchange->number);
    if (exchange->pg->raised != COMPLETED) {
        return -1;
    }
    for (int rank = 0; rank < simulated.world; rank++) {
        memcpy(exchange->values + (size_t)rank * exchange->count,
               simulated.gloo[exchange->number][rank].integers,
               exchange->count * sizeof *exchange->values);
    }
    *results = exchange->values;
    return 0;
}

void fct_exchange_retain(fct_exchange *exchange) {
    exchange->owners++;
}

void fct_exchange_release(fct_exchange *exchange) {
    if (exchange != NULL && --exchange->owners == 0) {
        free(exchange);
    }
}

char *__real_getenv(const char *name);
char *__wrap_getenv(const char *name);
char *__wrap_getenv(const char *name) {
    static char gloo[] = "gloo";
    const fault *f = simulated.faults;
    const bool is_vetoed = (f[0].kind == VETO && f[0].rank == many.current) ||
                           (f[1].kind == VETO && f[1].rank == many.current);
    return is_vetoed && strcmp(name, "FSDP_C_TRANSPORT") == 0 ? gloo : NULL;
}

static int attach(fct_pg *pg, shm_negotiation *n, bool *attached) {
    (void)pg, (void)n;
    *attached = true;
    return 0;
}

/* ---- collectives ---- */

static const char *name_dtype(int32_t dtype) {
    (void)dtype;
    return "Float";
}

static void complete_op(void *object, const char *error) {
    collective_op *op = (collective_op *)object;
    op->completed = true;
    (void)snprintf(op->error, sizeof op->error, "%s", error != NULL ? error : "");
}

static void release_op(void *object) {
    ((collective_op *)object)->released = true;
}

static void free_op(collective_op *op) {
    if (op != NULL) {
        shm_collective_free(op->shm);
        if (op->transport != NULL) {
            shm_transport_release(op->transport);
        }
        free(op->buffer);
        free(op->output);
        free(op);
    }
}

static uint64_t code_of(const struct fct_pg *pg, const collective_op *op, uint64_t params) {
    return 2 + (uint64_t)op->kind + 8 * (uint64_t)op->unit + 64 * params + 1024 * pg->plan;
}

static fct_op_label label_of(const struct fct_pg *pg, const collective_op *op, uint64_t params) {
    fct_op_label label = {.unit = 0};
    if (pg->plan != 0 && simulated.bug != OMITS_LABELS) {
        label.unit = 16 * pg->plan + (uint64_t)op->unit + 1;
        label.params = params;
        label.contents = (uint64_t)op->kind;
        label.divisor = op->kind == FCT_OP_ALL_GATHER ? 0 : 1;
        label.step = (uint32_t)pg->step;
        (void)snprintf(label.name, sizeof label.name, "unit %d", op->unit);
    }
    return label;
}

static void record_transport(struct fct_pg *pg, int transport) {
    int *recorded = &simulated.transports[pg->issued++];
    if (*recorded == 0) {
        *recorded = transport;
    } else if (*recorded != transport && !simulated.shifted) {
        report("ranks use different transports for the same collective", pg->rank);
    }
    add_to_digest((uint64_t)(pg->rank * 4 + transport));
}

static outcome outcome_of(const char *error) {
    return strstr(error, "collective mismatch") != NULL ? MISMATCH
           : strstr(error, "Timed out") != NULL         ? TIMED_OUT
           : error[0] != '\0'                           ? CLOSED
                                                        : COMPLETED;
}

static outcome issue_shm(struct fct_pg *pg, collective_op *op, uint64_t params) {
    const size_t bytes = (size_t)numels[op->unit] * sizeof(float);
    const shm_segment segment = {(char *)op->buffer, bytes, 0, bytes};
    const fct_op_label label = label_of(pg, op, params);
    const shm_request request = {.kind = op->kind,
                                 .dtype = FCK_FLOAT32,
                                 .itemsize = sizeof(float),
                                 .rank = pg->rank,
                                 .world = simulated.world,
                                 .segments = &segment,
                                 .segment_count = 1,
                                 .bytes = bytes,
                                 .output = (char *)op->output,
                                 .timeout_ms = LIMIT_MS,
                                 .dtype_name = name_dtype};
    op_label_set_next(&label);
    op->shm = shm_collective_new(&request);
    op_label_set_next(NULL);
    if (op->shm == NULL) {
        return MEMORY;
    }
    record_transport(pg, 2);
    simulated.used_shm = true;
    op->number = pg->shm_count++;
    simulated.shm[op->number][pg->rank].code = code_of(pg, op, params);
    simulated.shm[op->number][pg->rank].tag = shm_tag_make(op->kind, FCK_FLOAT32, bytes);
    op->started =
        shm_collective_start(op->shm, op->transport, (shm_owner){op, complete_op, release_op},
                             op->error) != SHM_SUBMIT_FAILED;
    return op->started ? COMPLETED : outcome_of(op->error);
}

static outcome issue_gloo(struct fct_pg *pg, collective_op *op, uint64_t params) {
    const bool is_gather = op->kind == FCT_OP_ALL_GATHER;
    const int64_t numel = numels[op->unit];
    if (simulated.plan_differs && simulated.all_wait && !simulated.guard_is_off &&
        !simulated.shifted) {
        report("ranks with different plans use gloo", pg->rank);
    }
    record_transport(pg, 1);
    log_entry *entry = gloo_issue(pg, code_of(pg, op, params),
                                  16 + (uint32_t)numel * 2 + (uint32_t)is_gather, &op->number);
    memcpy(entry->data, is_gather ? op->buffer + pg->rank * numel : op->buffer,
           (size_t)(is_gather ? numel : numel * simulated.world) * sizeof(float));
    if (is_gather) {
        shm_negotiation_count_gather(pg->negotiation);
    }
    return COMPLETED;
}

/* Issues the operation on the transport of the negotiation. */
static outcome issue(struct fct_pg *pg, collective_op *op, uint64_t params) {
    bool accepted = false;
    pg->raised = COMPLETED;
    const fct_use use = op->kind == FCT_OP_ALL_GATHER ? FCT_USE_GATHER : FCT_USE_REDUCE;
    if (shm_negotiation_run(pg->negotiation, pg, use, attach, &accepted) != 0) {
        return pg->raised != COMPLETED ? pg->raised : MEMORY;
    }
    op->transport = accepted ? shm_negotiation_active_transport(pg->negotiation) : NULL;
    return op->transport != NULL ? issue_shm(pg, op, params) : issue_gloo(pg, op, params);
}

/* Reports data of another collective that the operation has used. */
static void check_used_data(const struct fct_pg *pg, const collective_op *op) {
    const log_entry *own = &simulated.shm[op->number][pg->rank];
    for (int rank = 0; rank < simulated.world; rank++) {
        const log_entry *other = &simulated.shm[op->number][rank];
        const bool labeled = pg->plan != 0 && simulated.ranks[rank].plan != 0;
        if (other->code == 0 || other->tag != own->tag || (labeled && other->code != own->code)) {
            report("a rank used the data of another collective", pg->rank);
        }
    }
}

static outcome wait_shm(struct fct_pg *pg, collective_op *op) {
    do {
        if (pg->interrupts && !op->completed) {
            pg->interrupts = false;
            return INTERRUPT;
        }
    } while (shm_collective_wait(op->shm, op->transport, 100, op->error) != 1);
    const outcome result = outcome_of(op->error);
    if (result == COMPLETED) {
        check_used_data(pg, op);
    }
    return result;
}

/* Copies the data of all ranks, or sums it. */
static outcome wait_gloo(struct fct_pg *pg, collective_op *op) {
    const outcome result = gloo_wait(pg, op->number);
    const int64_t numel = numels[op->unit];
    for (int rank = 0; rank < simulated.world && result == COMPLETED; rank++) {
        const float *data = simulated.gloo[op->number][rank].data;
        for (int64_t i = 0; i < numel; i++) {
            if (op->kind == FCT_OP_ALL_GATHER) {
                op->buffer[rank * numel + i] = data[i];
            } else {
                op->output[i] += data[pg->rank * numel + i];
            }
        }
    }
    return result;
}

static outcome wait_for(struct fct_pg *pg, collective_op *op) {
    preempt();
    return op->shm != NULL ? wait_shm(pg, op) : wait_gloo(pg, op);
}

#endif
