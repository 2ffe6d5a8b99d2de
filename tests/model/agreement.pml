/* The agreement of ranks on collectives that carry no labels: csrc/transport/agreement.c, and the
 * end of a backward in csrc/core/state.c. Gloo moves the collectives of one process group and two
 * units of equal size. README.md lists what is modeled. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif

#include "ranks.pml"

/* Labels of gathers and reductions. A hash is the sequence of its labels, 3 bits each. */
#define GATHER_OF(unit) (1 + (unit))
#define REDUCE_OF(unit) (3 + (unit))
#define OTHER_PARAMS_OF(unit) (5 + (unit))
#define UNKNOWN 7
#define EMPTY_HASH 1

/* Messages of gloo. If messages of one algorithm differ in size, gloo ends the process by a signal.
 * Messages of different algorithms are not matched: the ranks wait. */
#define ROUND_1 1
#define GATHER 2
#define REDUCE 3
#define SUMMARY 4     /* op_agreement_start */
#define SEARCH 5      /* find_index */
#define FIRST_LABEL 6 /* the last exchange of describe_difference */
#define STUCK 7       /* ranks have issued messages of different algorithms */
#ifdef WITHOUT_EXCHANGE_HAS_OWN_ALGORITHM
#define ALGORITHM(message) ((message) == REDUCE -> 1 : 0)
#else
#define ALGORITHM(message) ((message) == REDUCE -> 1 : ((message) <= GATHER -> 0 : 2))
#endif
#define WINDOW 8 /* at most this number of collectives separates the first rank from the last */

byte issued[RANKS];
byte slot[WINDOW];             /* the message of a collective that some rank has not issued */
byte label_of[RANKS * WINDOW]; /* of a rank's gathers and reductions, with the step */
int summary[RANKS * 2];        /* the hash in a rank's last exchanges; 0: unknown */
bit allows[RANKS];             /* the rank allows agreements */
bit waits[RANKS];              /* the rank waits for round 1 at its first gather */
byte abort_step, abort_action; /* all ranks raise there, and reset */

/* ---- observations ---- */

byte differences;     /* collectives with different labels */
byte differs[STEPS];  /* pairs of ranks whose labels differ in a step */
byte unknowns[STEPS]; /* ranks with unknown labels in a step */
byte raised[RANKS];   /* mismatches that a rank has raised */
byte outcome[RANKS];
bit left_out;         /* a rank left out collectives that its peers issue */
bit left_late;        /* a rank left a backward after it had issued its collectives */
bit has_died, died_early;

#define PAIR(a, b) (1 << ((a) + (b) - 1))
#define PAIRS_OF(ranks) (((ranks) & 1 -> 3 : 0) | ((ranks) & 2 -> 5 : 0) | ((ranks) & 4 -> 6 : 0))
/* Pairs of ranks whose difference the agreement must find. */
#define VISIBLE (differs[step] & (7 - PAIRS_OF(unknowns[step])))
#define LABEL(entry) ((entry) & 7)
#define STEP(entry) ((entry) / 8)
#define ALLOWS(r) allows[r]
/* The ranks may have issued different sequences of collectives. Their waits may then last until the
 * time limit of the process group. */
#define MAY_SHIFT (left_out || (left_late && differences > 0))

/* Compares the label of collective `index` with those of the other ranks. */
inline observe_label(label) {
    label_of[me * WINDOW + index % WINDOW] = label + 8 * step;
    if
    :: label == UNKNOWN -> unknowns[step] = unknowns[step] | (1 << me)
    :: else ->
        for (other : 0 .. RANKS - 1) {
            entry = label_of[other * WINDOW + index % WINDOW];
            if
            :: other != me && issued[other] > index && LABEL(entry) != UNKNOWN &&
               LABEL(entry) != label ->
                differences++;
                differs[step] = differs[step] | PAIR(me, other);
                differs[STEP(entry)] = differs[STEP(entry)] | PAIR(me, other)
            :: else
            fi
        }
        other = 0;
        entry = 0
    fi
}

/* ---- gloo ---- */

#define HAS_ISSUED(r) (issued[r] > index)
#define IS_LOST(r) (gone[r] && issued[r] <= index)
#define HAS_ENDED(r) gone[r]

/* Issues a collective. `index` is its number. `label` 0: an exchange. */
inline issue(message, label) {
    d_step {
        index = issued[me];
        if
        :: slot[index % WINDOW] == 0 -> slot[index % WINDOW] = message
        :: slot[index % WINDOW] != 0 && slot[index % WINDOW] != message ->
            assert(MAY_SHIFT);
            assert(slot[index % WINDOW] == STUCK ||
                   ALGORITHM(slot[index % WINDOW]) != ALGORITHM(message));
            slot[index % WINDOW] = STUCK
        :: else
        fi;
        issued[me]++;
        if
        :: label != 0 && slot[index % WINDOW] != STUCK -> observe_label(label)
        :: else
        fi;
        if
        :: ALL(HAS_ISSUED) && slot[index % WINDOW] != STUCK ->
            slot[index % WINDOW] = 0;
            for (other : 0 .. RANKS - 1) { label_of[other * WINDOW + index % WINDOW] = 0 }
            other = 0
        :: else
        fi
    }
}

/* Waits for collective `awaited`. */
inline wait_for(awaited) {
    index = awaited;
    if
    :: atomic { gone[me] -> err = DEATH }
    :: atomic { !gone[me] && signaled[me] -> signaled[me] = 0; err = INTERRUPT }
    :: atomic { !gone[me] && ALL(HAS_ISSUED) && slot[index % WINDOW] != STUCK }
    :: atomic { !gone[me] && ((slot[index % WINDOW] == STUCK && ANY(HAS_ENDED)) ||
                              (!ALL(HAS_ISSUED) && ANY(IS_LOST))) -> err = CLOSED }
    :: atomic { timeout && MAY_SHIFT -> err = CLOSED }
    fi;
    index = 0
}

/* ---- negotiation.c: whether all ranks allow agreements ---- */

inline read_capabilities() {
    wait_for(round_1);
    if
    :: err == 0 ->
        round_1 = NONE;
#ifdef WITHOUT_ALL_RANKS_ALLOW
        agrees = allows[me]
#else
        agrees = ALL(ALLOWS)
#endif
    :: else
    fi
}

/* ---- agreement.c ---- */

/* op_agreement_add */
inline add_label(label) {
    d_step {
        if
        :: label == UNKNOWN -> unknown = 1
        :: else ->
#ifdef WITHOUT_LABEL_IS_HASHED
            hash = hash * 8 + (label <= 2 -> 1 : 3)
#else
            hash = hash * 8 + label
#endif
        fi;
        count++
    }
}

/* shm_negotiation_start_agreement, op_agreement_start */
inline start_agreement() {
    if
#ifndef WITHOUT_ROUND_1_IS_READ_FIRST
    :: count > 0 && round_1 != NONE -> read_capabilities()
#endif
    :: else
    fi;
    if
#ifdef WITHOUT_EMPTY_INTERVAL_HAS_NO_EXCHANGE
    :: err == 0 && agrees ->
#else
    :: err == 0 && agrees && count > 0 ->
#endif
        issue(SUMMARY, 0);
        d_step {
            summary[me * 2 + parity] = (unknown -> 0 : hash);
#ifdef WITHOUT_ABANDONED_ROUND_IS_DROPPED
            round = (round == NONE -> index : round);
            round_parity = (round == index -> parity : round_parity);
#else
            round = index;
            round_parity = parity;
#endif
            parity = 1 - parity;
#ifndef WITHOUT_INTERVAL_ENDS_AT_AGREEMENT_START
            hash = EMPTY_HASH;
#endif
            count = 0;
            unknown = 0;
            index = 0
        }
    :: else
    fi
}

/* find_ranks: the first rank with a known hash, and a rank with another. */
#define SENT(r) summary[(r) * 2 + round_parity]
#define DIFFER(a, b) (SENT(a) != 0 && SENT(b) != 0 && SENT(a) != SENT(b))
#if defined(WITHOUT_UNKNOWN_EQUALS_ALL)
#define FOUND (SENT(0) != SENT(1))
#elif RANKS == 2
#define FOUND DIFFER(0, 1)
#elif defined(WITHOUT_FIRST_KNOWN_RANK_IS_COMPARED)
#define FOUND (DIFFER(0, 1) || DIFFER(0, 2))
#else
#define FOUND (DIFFER(0, 1) || DIFFER(0, 2) || (SENT(0) == 0 && DIFFER(1, 2)))
#endif
#ifdef WITHOUT_ALL_RANKS_SEARCH
#define MAY_SEARCH (me == 0 || DIFFER(0, me))
#else
#define MAY_SEARCH true
#endif
#ifdef WITHOUT_ALL_RANKS_RAISE
#define MAY_RAISE DIFFER(0, me)
#else
#define MAY_RAISE true
#endif

/* op_agreement_await, describe_difference */
inline await_agreement() {
    if
    :: round != NONE ->
        wait_for(round);
        if
        :: err == 0 -> round = NONE; found = FOUND
        :: else
        fi;
        if
        :: err == 0 && found && MAY_SEARCH ->
            issue(SEARCH, 0);
            wait_for(index);
            if
            :: err == 0 -> issue(FIRST_LABEL, 0); wait_for(index)
            :: else
            fi
        :: else
        fi;
        if
        :: err == 0 && found && MAY_RAISE -> err = MISMATCH
        :: else
        fi;
        found = 0
    :: else
    fi
}

/* ---- the program of a rank ---- */

/* Forward gathers both units, backward reduces both. A reduction is waited for before the next one
 * is issued. */
#define ACTIONS 11
#define LAST_REDUCTION 6
#define START 7
#define RAISED 6 /* an exception in the user's code on this rank alone */

inline run_collective(message, label, other_label) {
    if
    :: issued[me] == 0 -> issue(ROUND_1, 0); round_1 = index; index = 0
    :: else
    fi;
    if
    :: round_1 != NONE && waits[me] -> read_capabilities()
    :: else
    fi;
    if
    :: err != 0
    :: err == 0 -> issue(message, label); work = index; add_label(label)
    :: atomic { err == 0 && faults > 0 -> faults-- }
        issue(message, other_label); work = index; add_label(other_label)
    :: atomic { err == 0 && faults > 0 -> faults-- }
        issue(message, UNKNOWN); work = index; add_label(UNKNOWN)
    :: atomic { err == 0 && faults > 0 -> faults--; left_out = 1 } /* leaves it out */
    :: atomic { err == 0 && faults > 0 -> faults--; err = RAISED }
    fi
}

/* Waits for a gather or a reduction, unless this rank left it out. */
inline await_work() {
    if
    :: work != NONE -> wait_for(work); work = NONE
    :: else
    fi
}

inline run_optimizer() {
    /* The gradients of collectives with different labels are not used. */
    assert(VISIBLE == 0 || !ALL(ALLOWS) || raised_alone)
}

#ifdef WITHOUT_OPTIMIZER_FOLLOWS_AGREEMENT
#define OPTIMIZE 9
#else
#define OPTIMIZE 10
#endif

inline run_action() {
    if
    :: action == 0 -> run_collective(GATHER, GATHER_OF(0), GATHER_OF(1))
    :: action == 2 -> run_collective(GATHER, GATHER_OF(1), GATHER_OF(0))
    :: action == 4 -> run_collective(REDUCE, REDUCE_OF(1), OTHER_PARAMS_OF(1))
    :: action == LAST_REDUCTION -> run_collective(REDUCE, REDUCE_OF(0), OTHER_PARAMS_OF(0))
    :: action == 1 || action == 3 || action == 5 || action == 8 -> await_work()
    :: action == START -> start_agreement()
    :: action == OPTIMIZE -> run_optimizer()
    :: action > 8 && action != OPTIMIZE -> await_agreement()
    fi
}

/* fc_state_reset, zero_grad */
inline reset() {
    d_step {
        work = NONE;
        action = 0
    }
}

/* A rank catches its exception alone. Its peers may issue collectives that this rank leaves out. */
inline leave_step() {
    d_step {
        if
        :: issued[me] == issued_before_step && err == INTERRUPT
        :: action > START && err == INTERRUPT -> left_late = 1; step++
        :: else -> left_out = 1; step++
        fi;
        raised_alone = raised_alone || issued[me] != issued_before_step || err != INTERRUPT;
        issued_before_step = issued[me];
        err = 0
    }
    reset()
}

/* States that a search must visit. */
#ifdef REACH_TRAINED_AFTER_MISMATCH
#define REACHED (err == 0 && step == STEPS && raised[me] == 1 && raised[1 - me] == 1)
#elif defined(REACH_TIME_LIMIT)
#define REACHED (err == CLOSED && !has_died && differences > 0)
#else
#define REACHED false
#endif

proctype rank(byte me) {
    byte step, action, issued_before_step, work, index, err, other, entry;
    byte count, round_1, round;
    int hash;
    bit unknown, agrees, parity, round_parity, found, raised_alone, has_local_backward;
    round_1 = NONE;
    round = NONE;
    work = NONE;
    hash = EMPTY_HASH;
    do
    :: gone[me] -> err = DEATH; break
    :: !gone[me] && step == STEPS -> break
    :: !gone[me] && step < STEPS && step == abort_step && action == abort_action ->
        atomic { reset(); step++; issued_before_step = issued[me] }
    :: !gone[me] && step > 0 && step < STEPS && action == 0 && !has_local_backward &&
       abort_step == NONE ->
        atomic { /* a backward without collectives, on this rank alone */
            has_local_backward = 1;
            start_agreement()
        }
    :: !gone[me] && step < STEPS && !(step == abort_step && action == abort_action) -> atomic {
        run_action();
        if
        :: err == 0 ->
            action++;
            if
            :: action == 1 && issued_before_step == 0 -> issued_before_step = 1 /* round 1 */
            :: action == ACTIONS -> action = 0; step++; issued_before_step = issued[me]
            :: else
            fi
        :: err == MISMATCH ->
            raised[me]++;
            assert(raised[me] <= differences || MAY_SHIFT); /* no error without a difference */
            err = 0;
            reset();
            step++;
            issued_before_step = issued[me]
        :: err == INTERRUPT || err == RAISED -> leave_step()
        :: else -> break
        fi }
    od;
    atomic {
        assert(!REACHED);
        if
        :: err == DEATH ->
            has_died = 1;
            died_early = died_early ||
                         step * ACTIONS + action < (STEPS - 1) * ACTIONS + LAST_REDUCTION
        :: else
        fi;
        gone[me] = 1;
        outcome[me] = err;
        finished[me] = 1;
        /* Equal states of finished ranks are merged. */
        reset();
        step = 0; issued_before_step = 0; err = 0; count = 0; round_1 = 0; round = 0; hash = 0;
        unknown = 0; agrees = 0; parity = 0; round_parity = 0; raised_alone = 0;
        has_local_backward = 0
    }
}

/* ---- properties ---- */

#define HAS_FINISHED(r) finished[r]
#define HAS_COMPLETED(r) (outcome[r] == 0)

inline check_outcomes() {
    d_step {
        for (r : 0 .. RANKS - 1) {
            /* An error has a cause. */
            assert(outcome[r] == 0 || has_died || MAY_SHIFT);
            /* A dead peer leads to an error on every survivor. */
            assert(!died_early || outcome[r] != 0 || left_out || left_late ||
                   abort_step == STEPS - 1);
            /* All ranks raise a mismatch, or none. */
            assert(!ALL(HAS_COMPLETED) || raised[r] == raised[0] || MAY_SHIFT)
        }
    }
}

init {
    byte r;
    faults = FAULTS;
    abort_step = NONE;
    for (r : 0 .. RANKS - 1) {
        allows[r] = 1;
#ifdef ORDINARY
        waits[r] = 1
#else
        if /* the first gather of forward, or unshard(async_op=True) */
        :: waits[r] = 1
        :: waits[r] = 0
        fi
#endif
    }
#ifndef ORDINARY
    if
    :: skip
    :: allows[RANKS - 1] = 0 /* FSDP_C_GUARD=off, or a flight recorder */
    fi;
#endif
    if
    :: skip
    :: faults > 0 -> faults--; abort_step = 0;
        do
        :: abort_action < ACTIONS - 1 -> abort_action++
        :: break
        od
    fi;
    atomic {
        for (r : 0 .. RANKS - 1) { run rank(r) }
        r = 0
    }
    cause_faults();
    ALL(HAS_FINISHED);
    check_outcomes()
}
