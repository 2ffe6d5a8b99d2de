/* Training steps of several ranks: negotiation, plan, labels of messages in shared memory, resets
 * and dead peers. README.md lists what is modeled. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef CAPACITY
#define CAPACITY 1 /* messages that a ring holds */
#endif
#ifdef FINE
#define GRAIN
#else
#define GRAIN atomic /* other ranks run before and after an action, and while it waits */
#endif
#define PROCESS_GROUPS 1
#define pg 0
#define GROUPS 3
/* With all ranks waiting in round 1, no gather of ranks with different plans reaches gloo. */
#define MAY_REACH_GLOO(kind) \
    (!(plan_differs && all_wait && (kind) >= KIND_OF_OP && guards == RANKS && !shifted))

/* Gloo's collectives have no labels. If a rank leaves out one of them, the time limit of the process
 * group may end the wait. */
#define TIME_LIMIT_ENDS_WAITS (shifted && !all_wait)

bit plan_differs, all_wait;
byte guards; /* number of ranks with the guard on */

#include "negotiation.pml"

#include "shared_memory.pml"

/* ---- observations ---- */

bit has_died;
bit died_early;  /* a rank died before its last collective */
byte transport_of[WINDOW]; /* of a collective: 1 gloo, 2 shared memory */
byte issued[RANKS];
byte outcome[RANKS];
#ifdef REACH_INTERRUPT
bit was_interrupted; /* after a collective of the step */
#endif
bit is_faulty; /* a fault happened that ranks must report */
byte abort_step, abort_action; /* all ranks raise there, and reset */

#define HAS_FINISHED(r) finished[r]
#define HAS_ISSUED_MORE(r) (issued[r] > number)

/* Records the transport of this rank's next collective, and compares it with that of its peers. */
inline record_transport(transport) {
    d_step {
        number = issued[me];
        issued[me]++;
        if
        :: transport_of[number % WINDOW] == 0 -> transport_of[number % WINDOW] = transport
        :: else -> assert(transport_of[number % WINDOW] == transport || shifted)
        fi;
        if
        :: ALL(HAS_ISSUED_MORE) -> transport_of[number % WINDOW] = 0
        :: else
        fi;
        number = 0
    }
}

/* ---- core: gathers and reductions ---- */

/* Handles of works: NOTHING, gloo's number, or IN_SHM + the number of a message. */
#define NOTHING 255
#define IN_SHM 128

/* Issues an operation on the selected transport and writes its handle. */
inline issue(op_code, handle) {
    if
    :: state[MINE] == ACCEPTED ->
        record_transport(2);
        handle = IN_SHM + queued;
        submit(op_code)
    :: else ->
        record_transport(1);
        gloo_issue(KIND_OF_OP + TAG(op_code));
        d_step {
            handle = index;
            index = 0;
            if
            :: !IS_REDUCE(op_code) -> count_gather()
            :: else
            fi
        }
    fi
}

/* fc_process_group_complete */
inline wait_for(handle) {
    if
    :: handle == NOTHING
    :: handle != NOTHING && handle >= IN_SHM -> wait_for_message(handle - IN_SHM)
    :: handle < IN_SHM -> gloo_wait(handle)
    fi;
    handle = (err == INTERRUPT -> handle : NOTHING)
}

/* The bits of an operation that depend on the plan of this rank. */
#define LABEL_BITS (plan[MINE] != 0 -> LABELED + (plan[MINE] == 2 -> OTHER_PLAN : 0) : 0)

/* fc_gather_start: compares the plan, negotiates, issues the gather. After a fault `gathered` is not
 * the unit that the rank waits for. */
inline start_gather(expected, gathered) {
#ifndef WITHOUT_PLAN_PRECEDES_GATHER
    if
    :: !(compared & (1 << expected)) ->
        compare_plan(true, waits[MINE]);
        compared = (equal -> compared | (1 << expected) : compared);
        equal = 0
    :: else
    fi;
#endif
    if
    :: err == 0 -> run_negotiation(true)
    :: else
    fi;
    if
    :: err == 0 -> issue(gathered + LABEL_BITS, gather[expected])
    :: else
    fi
}

/* fc_gather_await */
inline await_gather(expected) {
    if
    :: gather[expected] != NOTHING && !(compared & (1 << expected)) ->
        compare_plan(true, true);
        compared = (equal -> compared | (1 << expected) : compared);
        equal = 0
    :: else
    fi;
    if
    :: err == 0 -> wait_for(gather[expected])
    :: else
    fi
}

/* fc_reduce_run */
inline start_reduction(op_code) {
    run_negotiation(false);
    if
    :: err == 0 -> issue(op_code + LABEL_BITS, reduction)
    :: else
    fi
}

/* fc_state_reset: abandons collectives in flight. The transport completes them. */
inline reset_iter_state() {
    atomic {
        gather[0] = NOTHING;
        gather[1] = NOTHING;
        gather[2] = NOTHING;
        reduction = NOTHING;
#ifdef WITHOUT_ABANDONED_WORK_IS_COMPLETED
        dropped = dropped + queued - read;
        queued = read;
#endif
        action = 0
    }
}

/* States that a search must visit. Otherwise the model is blocked, and its properties hold without
 * meaning. LATE_SHM: ranks use shared memory after gathers over gloo. */
#ifdef REACH_DEATH
#define REACHED (err == DEATH && step == STEPS - 1 && action == 10)
#elif defined(REACH_CLOSED)
#define REACHED (err == CLOSED && step == STEPS - 1 && action == 10)
#elif defined(REACH_MISMATCH)
#define REACHED (err == MISMATCH && step == STEPS - 1 && action == 10)
#elif defined(REACH_PLAN)
#define REACHED (err == PLAN)
#elif defined(REACH_INTERRUPT)
#define REACHED (err == MISMATCH && was_interrupted && step == STEPS - 1)
#elif defined(REACH_RESET)
#define REACHED (err == 0 && abort_step == 0 && abort_action == 10)
#elif defined(REACH_LATE_SHM)
#define REACHED (err == 0 && !all_wait && state[MINE] == ACCEPTED)
#elif defined(REACH_DECLINED)
#define REACHED (err == 0 && state[MINE] == DECLINED)
#else
#define REACHED false
#endif

/* ---- the program of a rank ---- */

/* Forward gathers units 0, 1 and 2. Backward gathers unit 2 again and prefetches unit 1; the root,
 * unit 0, stays unsharded. A reduction is waited for before the next one. */
#define GATHER 0
#define AWAIT 1
#define REDUCE 2
#define FINISH 3
#define ACTIONS 16

inline decode() {
    d_step {
        if
        :: action < 6 -> kind = action % 2; unit = action / 2
        :: action == 6 -> kind = GATHER; unit = 2
        :: action == 7 -> kind = AWAIT; unit = 2
        :: action == 8 -> kind = GATHER; unit = 1
        :: action == 9 -> kind = REDUCE; unit = 2
        :: action == 10 -> kind = AWAIT; unit = 1
        :: action == 11 -> kind = FINISH; unit = 0
        :: action == 12 -> kind = REDUCE; unit = 1
        :: action == 13 -> kind = FINISH; unit = 0
        :: action == 14 -> kind = REDUCE; unit = 0
        :: action == 15 -> kind = FINISH; unit = 0
        fi
    }
}

inline run_action() {
    if
    :: kind == GATHER ->
        if
        :: true -> start_gather(unit, unit)
        :: atomic { faults > 0 && err == 0 -> faults--; diverged = 1; is_faulty = 1 }
            start_gather(unit, (unit + 1) % GROUPS) /* another unit */
        :: atomic { faults > 0 -> faults--; shifted = 1; is_faulty = 1 } /* leaves it out */
        fi
    :: kind == AWAIT -> await_gather(unit)
    :: kind == REDUCE ->
        if
        :: true -> start_reduction(4 + unit)
        :: atomic { faults > 0 -> faults--; diverged = 1; is_faulty = 1 }
            start_reduction(4 + unit + OTHER_PARAMS)
        :: atomic { faults > 0 -> faults--; shifted = 1; is_faulty = 1 }
        fi
    :: kind == FINISH -> wait_for(reduction)
    fi
}

proctype rank(byte me) {
    byte step, action, kind, unit, issued_before_step;
    byte compared; /* bit i: the plan was compared for a gather of unit i */
    byte gather[GROUPS], reduction;
    byte own[QUEUE], queued, read, written, dropped, failed;
    byte seen_seq, found, missing, distance, index, number, op, err;
    bit equal, is_closed, has_message, differs;
#ifdef FINE
    bit has_checked; /* a rank may check its peers once before one of them has ended */
#endif
    reset_iter_state();
    do
    :: gone[me] -> err = DEATH; break
    :: !gone[me] && step < STEPS && step == abort_step && action == abort_action ->
        reset_iter_state();
        step++;
        issued_before_step = issued[me]
    :: !gone[me] && step < STEPS && !(step == abort_step && action == abort_action) -> GRAIN {
        decode();
        run_action();
        if
        :: err == INTERRUPT -> /* the rank raises, catches it alone, and repeats the step */
            d_step {
                err = 0;
                if
                :: issued[me] != issued_before_step ->
                    shifted = 1;
                    is_faulty = 1;
#ifdef REACH_INTERRUPT
                    was_interrupted = 1;
#endif
                    issued_before_step = issued[me]
                :: else
                fi
            }
            reset_iter_state()
        :: err == 0 ->
            d_step {
                action++;
                if
                :: action == ACTIONS -> action = 0; step++; issued_before_step = issued[me]
                :: else
                fi
            }
        :: else -> break
        fi }
    :: !gone[me] && step == STEPS -> break
    od;
    atomic {
        if
        :: err == DEATH ->
            has_died = 1;
            died_early = died_early || step * ACTIONS + action < STEPS * ACTIONS - 1;
            gone[me] = 1
        :: err == MISMATCH && !shifted /* the process lives on */
        :: else ->
            closed[me] = 1; /* shm_ring_destroy */
            gone[me] = 1
        fi;
        assert(!REACHED);
        outcome[me] = err;
        finished[me] = 1;
        /* Equal states of finished ranks are merged. */
        reset_iter_state();
        step = 0; kind = 0; unit = 0; compared = 0; issued_before_step = 0; failed = 0; err = 0;
        queued = 0; read = 0; written = 0; dropped = 0; op = 0; index = 0; number = 0;
        own[0] = 0; own[1] = 0; own[2] = 0; own[3] = 0
    }
}

/* ---- properties ---- */

#define SENT_MISMATCH(r) (mismatch > 0 && committed[r] >= mismatch)

inline check_outcomes() {
    d_step {
        r = 0;
        do
        :: r < RANKS ->
            /* A differing label is reported by every rank. */
            assert(!SENT_MISMATCH(r) || outcome[r] != 0 || guards < RANKS);
            assert(!SENT_MISMATCH(r) || outcome[r] == MISMATCH || has_died || shifted ||
                   guards < RANKS);
            /* Different plans are reported by every rank, before data of the model is used. */
            assert(!plan_differs || outcome[r] != 0 || guards < RANKS);
            assert(!plan_differs || outcome[r] == PLAN || has_died || shifted || guards < RANKS);
            /* A dead peer leads to an error on every survivor. */
            assert(!died_early || outcome[r] != 0 || shifted);
            /* No false alarm; the step after a reset on all ranks completes. */
            assert(is_faulty || has_died || plan_differs || outcome[r] == 0);
            r++
        :: else -> break
        od
    }
}

/* ---- settings ---- */

inline set_rank(r) {
    d_step {
        registered[r] = GROUPS;
        accepts[r] = 1;
        connects[r] = 1;
        plan[r] = 1;
        capabilities[r] = NONE;
        connection[r] = NONE
    }
#ifdef ORDINARY
    waits[r] = 1
#else
    if /* the first gather of forward, or unshard(async_op=True) */
    :: waits[r] = 1
    :: waits[r] = 0
    fi
#endif
}

init {
    byte r;
    faults = FAULTS;
    abort_step = NONE;
    guards = RANKS;
    do
    :: r < RANKS -> set_rank(r); r++
    :: else -> break
    od;
    all_wait = ALL(WAITS);
#ifndef ORDINARY
    if /* a rank with one parameter group more, which it does not use */
    :: skip
    :: registered[RANKS - 1] = GROUPS + 1
    fi;
    if /* a rank whose guard is off */
    :: skip
    :: plan[0] = 0; guards--
    fi;
#endif
    if
    :: skip
    :: faults > 0 -> faults--; accepts[RANKS - 1] = 0 /* FSDP_C_TRANSPORT=gloo */
    :: faults > 0 -> faults--; connects[RANKS - 1] = 0 /* cannot map a ring */
    fi;
    if
    :: skip
    :: faults > 0 -> faults--; plan[RANKS - 1] = 2; plan_differs = 1; diverged = 1
    fi;
    if
    :: skip
    :: faults > 0 -> faults--; abort_step = 0;
        do
        :: abort_action < ACTIONS - 1 -> abort_action++
        :: break
        od
    fi;
    atomic {
        r = 0;
        do
        :: r < RANKS -> run rank(r); r++
        :: else -> break
        od;
        r = 0
    }
    cause_faults();
    ALL(HAS_FINISHED);
    check_outcomes()
}
