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
byte guards; /* ranks where the guard is on */

#include "negotiation.pml"

/* An operation: unit, kind, parameters, plan, and whether its label is known. */
#define UNIT(op) ((op) & 3)
#define IS_REDUCE(op) ((op) & 4)
#define OTHER_PARAMS 8
#define OTHER_PLAN 16
#define LABELED 32
/* Units 0 and 1 have the same size. */
#define TAG(op) (IS_REDUCE(op) + (UNIT(op) == 2 -> 1 : 0))
#define HAS_TAG_OF(a, b) (TAG(a) == TAG(b))
#define HAS_LABEL_OF(a, b) (!((a) & LABELED) || !((b) & LABELED) || (a) == (b))

#ifdef WEAK_TAG_IS_COMPARED
#define TAGS_MATCH(a, b) true
#else
#define TAGS_MATCH(a, b) HAS_TAG_OF(a, b)
#endif
#ifdef WEAK_LABEL_IS_COMPARED
#define LABELS_MATCH(a, b) true
#else
#define LABELS_MATCH(a, b) HAS_LABEL_OF(a, b)
#endif

/* ---- shared memory: the segment of each rank ---- */

byte committed[RANKS], released[RANKS];
bit closed[RANKS];
byte header[RANKS * CAPACITY]; /* the operation of a message */
byte content[RANKS * CAPACITY]; /* the number of the message whose data the memory holds */
#define SLOT(r, message) ((r) * CAPACITY + (message) % CAPACITY)

/* ---- observations ---- */

byte mismatch;   /* 1 + the number of the first messages whose labels differ; 0: none */
bit has_died;
bit died_early;  /* a rank, before its last collective */
byte used[WINDOW]; /* the transport of a collective: 1 gloo, 2 shared memory */
byte issued[RANKS];
bit finished[RANKS];
byte outcome[RANKS];
bit is_faulty; /* a fault happened that ranks must report */
byte abort_step, abort_action; /* all ranks raise there, and reset */

#define HAS_FINISHED(r) finished[r]
#define HAS_ISSUED_MORE(r) (issued[r] > number)

/* Records the transport of this rank's next collective, and compares it with that of its peers. */
inline record_transport(which) {
    d_step {
        number = issued[me];
        issued[me]++;
        if
        :: used[number % WINDOW] == 0 -> used[number % WINDOW] = which
        :: else -> assert(used[number % WINDOW] == which || shifted)
        fi;
        if
        :: ALL(HAS_ISSUED_MORE) -> used[number % WINDOW] = 0
        :: else
        fi;
        number = 0
    }
}

/* ---- shm_transport.c ---- */

#define PEER(distance) ((me + (distance)) % RANKS)
#define QUEUE 4 /* operations in flight */
#define OWN(message) own[(message) % QUEUE]

/* shm_ring_seq */
#if RANKS == 2
#define SEQ (committed[PEER(1)] + released[PEER(1)] + closed[PEER(1)])
#define LEAST_RELEASED released[PEER(1)]
#else
#define SEQ (committed[PEER(1)] + released[PEER(1)] + closed[PEER(1)] + \
             committed[PEER(2)] + released[PEER(2)] + closed[PEER(2)])
#define LEAST_RELEASED (released[PEER(1)] < released[PEER(2)] -> released[PEER(1)] : released[PEER(2)])
#endif
#ifdef WEAK_FULL_RING_IS_NOT_WRITTEN
#define HAS_SPACE true
#else
#define HAS_SPACE (written - LEAST_RELEASED < CAPACITY)
#endif
#define CAN_WRITE (written - dropped < queued && HAS_SPACE)

/* write_next: shm_ring_reserve and shm_ring_commit. */
inline write_next() {
    d_step {
        op = OWN(written - dropped);
        header[SLOT(me, written)] = op;
        content[SLOT(me, written)] = written;
        committed[me]++;
        distance = 1;
        do
        :: distance < RANKS ->
            if
            :: committed[PEER(distance)] > written &&
               !HAS_LABEL_OF(op, header[SLOT(PEER(distance), written)]) ->
                mismatch = (mismatch == 0 -> written + 1 : mismatch)
            :: else
            fi;
            distance++
        :: else -> break
        od;
        written++;
        op = 0;
        distance = 0
    }
}

/* fail_all */
inline fail_all(reason) {
    d_step {
        failed = reason;
#ifndef WEAK_FAILED_RANK_CLOSES
        closed[me] = 1;
#endif
        queued = 0;
        read = 0;
        written = 0;
        dropped = 0
    }
}

#ifdef WEAK_ALL_HEADERS_ARE_READ
#define STOP_AT_CLOSED break
#else
#define STOP_AT_CLOSED skip
#endif

#define SHOWS_ANOTHER_LABEL(r) \
    (committed[r] > read && !HAS_LABEL_OF(OWN(read), header[SLOT(r, read)]))

/* find_missing_peer. Sets `found` to an error, or `missing` to a rank (NONE: no rank). The order of
 * the reads of shm_ring_peek matters, so each is a step. */
inline find_missing_peer() {
    d_step {
        found = 0;
        missing = NONE;
        distance = 1;
#if RANKS == 3
        differs = SHOWS_ANOTHER_LABEL(PEER(1)) || SHOWS_ANOTHER_LABEL(PEER(2))
#endif
    }
    do
    :: distance < RANKS ->
#ifdef WEAK_CLOSED_IS_READ_FIRST
        has_message = committed[PEER(distance)] > read;
        is_closed = closed[PEER(distance)];
#else
        is_closed = closed[PEER(distance)];
        has_message = committed[PEER(distance)] > read;
#endif
        d_step {
            if
            :: !has_message && is_closed -> found = CLOSED
            :: !has_message && !is_closed -> missing = (missing == NONE -> PEER(distance) : missing)
            :: has_message && TAGS_MATCH(OWN(read), header[SLOT(PEER(distance), read)]) &&
               LABELS_MATCH(OWN(read), header[SLOT(PEER(distance), read)])
            :: else -> found = MISMATCH
            fi
        }
        if
        :: found == MISMATCH -> break
        :: found == CLOSED -> STOP_AT_CLOSED
        :: else
        fi;
        distance++
    :: else -> break
    od;
#if RANKS == 3
    /* A closed peer hides no mismatch. */
    assert(!(differs && found == CLOSED));
#endif
    atomic { is_closed = 0; has_message = 0; distance = 0; differs = 0 }
}

/* shm_op_methods.read: uses the data of all peers. */
inline use_messages() {
    d_step {
        distance = 1;
        do
        :: distance < RANKS ->
            assert(content[SLOT(PEER(distance), read)] == read);
            assert(HAS_TAG_OF(OWN(read), header[SLOT(PEER(distance), read)]));
            assert(HAS_LABEL_OF(OWN(read), header[SLOT(PEER(distance), read)]));
            distance++
        :: else -> break
        od;
        distance = 0
    }
}

/* shm_ring_release */
inline release() {
    d_step {
        released[me]++;
        read++
    }
}

/* read_next, after find_missing_peer has found the messages of all peers. */
inline read_next() {
#ifdef WEAK_RELEASE_FOLLOWS_READ
    released[me]++;
    use_messages();
    read++
#else
    use_messages();
    release()
#endif
}

/* A rank writes first, and reads a message only after it has written its own. */
#ifdef WEAK_MESSAGE_IS_COMMITTED_FIRST
#define MAY_READ (read < queued)
#define OR_ELSE MAY_READ || !CAN_WRITE
#define MAY_WRITE_FIRST CAN_WRITE
#else
#define MAY_READ (read < written - dropped)
#define OR_ELSE else
#define MAY_WRITE_FIRST false
#endif

/* shm_ring_peer_has_ended: the system call that tests the lock of a process. */
#ifdef WEAK_PEER_IS_TESTED
#define PEER_HAS_ENDED(r) closed[r]
#else
#define PEER_HAS_ENDED(r) (closed[r] || gone[r])
#endif

/* shm_ring_slowest_reader */
#if RANKS == 2
#define SLOWEST_READER PEER(1)
#else
#define SLOWEST_READER (released[PEER(2)] < released[PEER(1)] -> PEER(2) : PEER(1))
#endif

/* check_peers: fails all operations if the rank that is waited for has ended. */
inline check_peers() {
    if
    :: MAY_READ -> find_missing_peer()
    :: else -> missing = SLOWEST_READER
    fi;
    if
    :: found != 0 -> fail_all(found)
    :: found == 0 && missing != NONE && PEER_HAS_ENDED(missing) ->
#ifdef WEAK_COUNTERS_ARE_READ_AGAIN
        fail_all(CLOSED)
#else
        if
        :: SEQ == seen -> fail_all(CLOSED)
        :: else
        fi
#endif
    :: else
    fi
}

/* shm_transport_wait, for message `last`. */
inline wait_for_message(last) {
    do
    :: gone[me] -> err = DEATH; break
    :: !gone[me] && failed != 0 -> err = failed; break
    :: !gone[me] && failed == 0 && read > last -> break
    :: !gone[me] && failed == 0 && read <= last ->
        seen = SEQ;
        found = 0;
        missing = NONE;
        if
        :: CAN_WRITE -> write_next()
        :: OR_ELSE ->
            if
            :: MAY_READ -> find_missing_peer()
            :: else -> missing = SLOWEST_READER
            fi;
            if
            :: found != 0 -> fail_all(found)
            :: found == 0 && missing == NONE -> read_next()
            :: found == 0 && missing != NONE ->
                /* shm_ring_wait sleeps until a counter changes, for at most 0.1 s */
                if
                :: SEQ != seen || MAY_WRITE_FIRST
                :: atomic { SEQ == seen && PEER_HAS_ENDED(missing) } -> check_peers()
#ifdef FINE
                :: atomic { SEQ == seen && !has_checked -> has_checked = 1 } -> check_peers()
#endif
                :: atomic { timeout && TIME_LIMIT_ENDS_WAITS } -> fail_all(CLOSED)
                :: atomic { signaled[me] -> signaled[me] = 0; err = INTERRUPT }; break
                :: gone[me]
                fi
            fi
        fi
    od;
    atomic { seen = 0; found = 0; missing = 0; distance = 0 }
}

/* shm_transport_submit */
inline submit(submitted) {
    if
    :: failed != 0 -> err = failed
    :: else ->
        d_step { OWN(queued) = submitted; queued++ }
#ifndef WEAK_MESSAGE_IS_COMMITTED_FIRST
        do
        :: CAN_WRITE -> write_next()
        :: else -> break
        od
#endif
    fi
}

/* ---- core: gathers and reductions ---- */

/* Handles of works: NOTHING, gloo's number, or IN_SHM + the number of a message. */
#define NOTHING 255
#define IN_SHM 128

/* Issues an operation on the selected transport and writes its handle. */
inline issue(op_code, handle) {
    if
    :: state[X] == ACCEPTED ->
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

/* fc_process_group_wait */
inline wait_for(handle) {
    if
    :: handle == NOTHING
    :: handle != NOTHING && handle >= IN_SHM -> wait_for_message(handle - IN_SHM)
    :: handle < IN_SHM -> gloo_wait(handle)
    fi;
    handle = (err == INTERRUPT -> handle : NOTHING)
}

#define LABEL_OF_RANK (plan[X] != 0 -> LABELED + (plan[X] == 2 -> OTHER_PLAN : 0) : 0)

/* fc_gather_start: compares the plan, negotiates, issues the gather. */
inline start_gather(which, code) {
#ifndef WEAK_PLAN_PRECEDES_GATHER
    if
    :: !(compared & (1 << which)) ->
        compare_plan(true, waits[X]);
        compared = (equal -> compared | (1 << which) : compared);
        equal = 0
    :: else
    fi;
#endif
    if
    :: err == 0 -> run_negotiation(true)
    :: else
    fi;
    if
    :: err == 0 -> issue(code + LABEL_OF_RANK, gather[which])
    :: else
    fi
}

/* fc_gather_await */
inline await_gather(which) {
    if
    :: gather[which] != NOTHING && !(compared & (1 << which)) ->
        compare_plan(true, true);
        compared = (equal -> compared | (1 << which) : compared);
        equal = 0
    :: else
    fi;
    if
    :: err == 0 -> wait_for(gather[which])
    :: else
    fi
}

/* fc_reduce_run */
inline start_reduction(reduced) {
    run_negotiation(false);
    if
    :: err == 0 -> issue(reduced + LABEL_OF_RANK, reduction)
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
#ifdef WEAK_ABANDONED_WORK_IS_COMPLETED
        dropped = dropped + queued - read;
        queued = read;
#endif
        action = 0
    }
}

/* States that a search must visit. Otherwise the model is blocked, and its properties hold without
 * meaning. */
#ifdef REACH_DEATH
#define REACHED (err == DEATH && step == STEPS - 1 && action == 10)
#elif defined(REACH_CLOSED)
#define REACHED (err == CLOSED && step == STEPS - 1 && action == 10)
#elif defined(REACH_MISMATCH)
#define REACHED (err == MISMATCH && step == STEPS - 1 && action == 10)
#elif defined(REACH_PLAN)
#define REACHED (err == PLAN)
#elif defined(REACH_INTERRUPT)
#define REACHED (err == MISMATCH && shifted && step == STEPS - 1)
#elif defined(REACH_RESET)
#define REACHED (err == 0 && abort_step == 0 && abort_action == 10)
#elif defined(REACH_LATE_SHM)
#define REACHED (err == 0 && !all_wait && state[X] == ACCEPTED)
#elif defined(REACH_GLOO)
#define REACHED (err == 0 && state[X] == DECLINED)
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
#define COLLECTIVES 8 /* in a step */

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
    byte step, action, kind, unit, compared, before;
    byte gather[GROUPS], reduction;
    byte own[QUEUE], queued, read, written, dropped, failed;
    byte seen, found, missing, distance, index, number, op, err;
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
        before = issued[me]
    :: !gone[me] && step < STEPS && !(step == abort_step && action == abort_action) -> GRAIN {
        decode();
        run_action();
        if
        :: err == INTERRUPT -> /* the rank raises, catches it alone, and repeats the step */
            d_step {
                err = 0;
                if
                :: issued[me] != before -> shifted = 1; is_faulty = 1; before = issued[me]
                :: else
                fi
            }
            reset_iter_state()
        :: err == 0 ->
            d_step {
                action++;
                if
                :: action == ACTIONS -> action = 0; step++; before = issued[me]
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
        step = 0; kind = 0; unit = 0; compared = 0; before = 0; failed = 0; err = 0;
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
