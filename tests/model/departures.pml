/* How ranks over gloo compare the kind and size of each collective before they issue it:
 * csrc/transport/sequence.c and prediction.c, and departures through stores:
 * fsdp_c/_runtime/departures.py. A rank departs if its next collective is not the predicted one: it
 * waits until all ranks wait with the same collective. README.md lists what is modeled.
 *
 * All ranks run the same program of ITEMS collectives, except for faults. A prediction may have any
 * value, because it depends on all earlier collectives. It is equal on all ranks. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif

#include "ranks.pml"

#define CHANGED 6    /* "rank 0 issues another collective than before an exception" */
#define STOPPED 7    /* another rank has found a difference: shm_negotiation_stop */
#define TIME_LIMIT 8 /* of the process group */

/* Messages of gloo, as bits. The first three are the signatures of collectives. gloo ends the
 * process if messages of one algorithm differ in size. Messages of different algorithms are not
 * matched: the ranks wait. */
#define GATHER 1
#define LARGE_GATHER 2
#define AGREEMENT 4    /* an all-to-all of two integers */
#define EXCHANGE 8     /* of signatures, an all-to-all of one integer */
#define DESCRIPTION 16 /* of collectives, after an exchange with a difference */
#define GATHERED_EXCHANGE 32 /* of signatures, an all-gather of one integer */
#define ALL_GATHERS 35
#define ALL_TO_ALLS 28
#define ALGORITHM(message) (((message) & ALL_GATHERS) != 0 -> ALL_GATHERS : ALL_TO_ALLS)
#define NO_PREDICTION 255
#define WINDOW 8 /* at most this number of collectives separates the first rank from the last */

#define NUMBERS (ITEMS * (FAULTS + 1)) /* largest number of collectives of a rank */
#define REQUESTS 4               /* largest number of requests */
#define KEYS (NUMBERS * 3)       /* a key is a number and a signature of a collective */

byte program[ITEMS];      /* signatures; 0: not chosen yet */
byte prediction[NUMBERS]; /* op_prediction_next; 0: not chosen yet */
byte history[NUMBERS];    /* the signature that ranks have issued under a number */
byte count[RANKS];        /* op_prediction.count */
bit stopped[RANKS];       /* shm_negotiation.stopped */

/* gloo */
byte issued[RANKS];
byte slot[WINDOW]; /* the messages of a collective that is not complete */
byte first_signature[WINDOW]; /* in an exchange */
bit differs[WINDOW];          /* a rank has sent another one */

/* The store of the process group. */
byte counted[KEYS];  /* ranks that are about to issue this collective */
bit decided[KEYS];   /* a rank has read that all ranks are counted */
byte has_read[KEYS]; /* ranks that have read it, and leave their departure */

/* The store of the job. */
byte requests;
byte requester[REQUESTS], request_number[REQUESTS], request_signature[REQUESTS];
bit closed[REQUESTS];
bit difference[REQUESTS];

/* Departures of departures.py */
byte own_number[RANKS]; /* of the departure of this rank; NONE: the rank does not depart */
byte own_signature[RANKS];

/* ---- observations ---- */

bit diverged;   /* a rank was about to issue another collective than its program has */
bit shifted;    /* a rank left out a collective, or was about to issue an additional one */
bit left_out;   /* an interrupted rank has left a collective out, or has restarted the step */
bit has_died;
byte raised[RANKS]; /* mismatches of exchanges */
bit was_stopped[RANKS];
bit has_departed; /* all ranks have departed with one collective */
byte outcome[RANKS];

#define HAS_FINISHED(r) finished[r]
#define HAS_COMPLETED(r) (finished[r] && outcome[r] == 0 && !was_stopped[r])
/* A rank does not issue a collective that its peers wait for, and nothing detects it earlier. */
#define MAY_TIME_OUT (left_out || has_died || (shifted && ANY(HAS_COMPLETED)))

/* ---- departures.py: answers to requests ---- */

/* This rank has issued another collective under the number of request i. OWN_DIFFERS also compares
 * the collective with which this rank departs. */
#define ISSUED_OTHER(i) \
    (count[me] > request_number[i] && history[request_number[i]] != request_signature[i])
#if defined(WITHOUT_OWN_DEPARTURE_IS_COMPARED)
#define OWN_DIFFERS(i) ISSUED_OTHER(i)
#elif defined(WITHOUT_OWN_NUMBER_IS_COMPARED)
#define OWN_DIFFERS(i) \
    (own_number[me] != NONE -> own_signature[me] != request_signature[i] : ISSUED_OTHER(i))
#else
#define OWN_DIFFERS(i) \
    (own_number[me] == request_number[i] -> own_signature[me] != request_signature[i] : \
                                            ISSUED_OTHER(i))
#endif

#ifdef WITHOUT_CLOSING_IS_ATOMIC
#define HAS_PUBLISHED_DIFFERENCE(i) (difference[i] && !closed[i])
#define CLAIMED (claimed != NONE)
#else
#define CLAIMED false
#define HAS_PUBLISHED_DIFFERENCE(i) difference[i]
#endif
#define HAS_UNPUBLISHED_DIFFERENCE(i) \
    (i < requests && !difference[i] && !closed[i] && OWN_DIFFERS(i))
#define ANY_REQUEST(condition) (condition(0) || condition(1) || condition(2) || condition(3))
#define MAY_ANSWER \
    (!stopped[me] && (ANY_REQUEST(HAS_PUBLISHED_DIFFERENCE) || \
                      ANY_REQUEST(HAS_UNPUBLISHED_DIFFERENCE) || CLAIMED))

/* The requesting rank waits in its departure, or it has died or was stopped. */
#define DEPARTS(i) \
    (gone[requester[i]] || stopped[requester[i]] || \
     (own_number[requester[i]] == request_number[i] && \
      own_signature[requester[i]] == request_signature[i]))

inline publish_difference(i) {
    assert(DEPARTS(i));
    difference[i] = 1;
    stopped[me] = 1
}

/* Departures.answer_requests: reads a difference, or publishes one. */
inline answer() {
    if
    :: ANY_REQUEST(HAS_PUBLISHED_DIFFERENCE) -> stopped[me] = 1
#ifdef WITHOUT_CLOSING_IS_ATOMIC
    :: claimed == NONE && HAS_UNPUBLISHED_DIFFERENCE(0) -> claimed = 0
    :: claimed == NONE && HAS_UNPUBLISHED_DIFFERENCE(1) -> claimed = 1
    :: claimed != NONE -> publish_difference(claimed); claimed = NONE
#else
    :: HAS_UNPUBLISHED_DIFFERENCE(0) -> publish_difference(0)
    :: HAS_UNPUBLISHED_DIFFERENCE(1) -> publish_difference(1)
    :: HAS_UNPUBLISHED_DIFFERENCE(2) -> publish_difference(2)
    :: HAS_UNPUBLISHED_DIFFERENCE(3) -> publish_difference(3)
#endif
    fi
}

/* ---- gloo ---- */

#define HAS_ISSUED(r) (issued[r] > index)
#define IS_LOST(r) (gone[r] && issued[r] <= index)
#define IS_COMPLETE (ALL(HAS_ISSUED) && slot[index % WINDOW] == 0)

/* Issues a message. `index` is its number. */
inline issue(message) {
    d_step {
        index = issued[me];
        /* gloo would end the process by a signal. */
        assert((slot[index % WINDOW] & ALGORITHM(message) & ~(message)) == 0);
        if
        :: slot[index % WINDOW] == 0 ->
            first_signature[index % WINDOW] = 0;
            differs[index % WINDOW] = 0
        :: else
        fi;
        slot[index % WINDOW] = slot[index % WINDOW] | (message);
        issued[me]++;
        if
        :: ALL(HAS_ISSUED) && slot[index % WINDOW] == (message) -> slot[index % WINDOW] = 0
        :: else
        fi
    }
}

/* A guard with an effect: a signal handler raises, if a fault may still happen. */
#define CAUSE_SIGNAL faults > 0 -> faults--

/* Waits for collective `awaited`. The stall monitor of a waiting rank answers requests. */
inline wait_for(awaited) {
    index = awaited;
    do
    :: atomic { faults > 0 && !IS_COMPLETE -> faults--; gone[me] = 1; err = DEATH; break }
    :: atomic { faults > 0 && !IS_COMPLETE -> faults--; err = INTERRUPT; break }
    :: atomic { stopped[me] && !IS_COMPLETE -> err = STOPPED; break }
    :: atomic { IS_COMPLETE -> break }
    :: atomic { !IS_COMPLETE && ANY(IS_LOST) -> err = CLOSED; break }
    :: atomic { timeout && MAY_TIME_OUT -> err = TIME_LIMIT; break }
#ifndef WITHOUT_WAITING_RANKS_ANSWER
    :: atomic { MAY_ANSWER -> answer() }
#endif
    od;
    index = 0
}

/* Phases of a rank. Other ranks run between them. */
#define RUN 0
#define POLL 1
#define CLOSE 2   /* after an exception */
#define UNCOUNT 3
#define DECREMENT 4
#define READ 5 /* all ranks are counted */
#define END 6

/* ---- sequence.c ---- */

#ifdef WITHOUT_ALL_RANKS_READ_EXCHANGE
#define HAS_READ_DIFFERENCE (differs[round % WINDOW] && offered != program[0])
#else
#define HAS_READ_DIFFERENCE differs[round % WINDOW]
#endif

/* start_exchange and op_sequence_compare without a prediction. */
inline exchange_signatures() {
    if
    :: round == NONE ->
#ifdef WITHOUT_EXCHANGE_AFTER_CHANGE_HAS_OTHER_ALGORITHM
        issue(EXCHANGE);
#else
        if
        :: agreement_may_follow -> issue(GATHERED_EXCHANGE)
        :: else -> issue(EXCHANGE)
        fi;
#endif
        d_step {
            round = index;
            offered = signature;
            if
            :: first_signature[index % WINDOW] == 0 -> first_signature[index % WINDOW] = signature
            :: else -> differs[index % WINDOW] = differs[index % WINDOW] ||
                                                 first_signature[index % WINDOW] != signature
            fi;
            first_signature[index % WINDOW] =
                (ALL(HAS_ISSUED) -> 0 : first_signature[index % WINDOW]);
            index = 0
        }
    :: else
    fi;
    wait_for(round);
    if
    :: err == 0 && HAS_READ_DIFFERENCE ->
        round = NONE;
        issue(DESCRIPTION);
        wait_for(index);
        if
        :: err == 0 -> err = MISMATCH
        :: else
        fi
    :: err == 0 && !HAS_READ_DIFFERENCE ->
        round = NONE;
        if
#ifndef WITHOUT_OFFERED_SIGNATURE_IS_COMPARED
        :: offered != signature -> err = CHANGED; agreement_may_follow = (offered == AGREEMENT)
#endif
        :: else
        fi
#ifdef WITHOUT_INTERRUPTED_EXCHANGE_IS_KEPT
    :: err == INTERRUPT -> round = NONE
#endif
    :: else
    fi;
    offered = (round == NONE -> 0 : offered)
}
/* compare_size, op_sequence_expects, op_sequence_compare. If the rank departs, `phase` is not RUN
 * afterwards. */
inline compare() {
    if
    :: stopped[me] -> err = STOPPED
    :: !stopped[me] && required != 0 -> err = (required == signature -> 0 : CHANGED)
    :: !stopped[me] && required == 0 ->
        if
        :: round == NONE && prediction[count[me]] == 0 ->
            if
            :: prediction[count[me]] = NO_PREDICTION
            :: prediction[count[me]] = GATHER
            :: prediction[count[me]] = LARGE_GATHER
            :: prediction[count[me]] = AGREEMENT
            fi
        :: else
        fi;
        if
        :: round == NONE && prediction[count[me]] == signature
        :: round == NONE && prediction[count[me]] != signature &&
           prediction[count[me]] != NO_PREDICTION ->
#ifdef WITHOUT_PREDICTION_IS_COMPARED
            skip
#else
            count_rank()
#endif
        :: round != NONE || prediction[count[me]] == NO_PREDICTION ->
#ifdef WITHOUT_UNPREDICTED_COLLECTIVES_ARE_COMPARED
            skip
#else
            exchange_signatures()
#endif
        fi
    fi
}

#define HAS_PASSED(r) (count[r] >= count[me])

/* A collective over gloo, then op_sequence_add. */
inline issue_collective() {
    issue(signature);
    d_step {
        work = index;
        /* All ranks issue the same collective under each number. */
        assert(history[count[me]] == 0 || history[count[me]] == signature);
        history[count[me]] = signature;
        count[me]++;
        prediction[count[me] - 1] = (ALL(HAS_PASSED) -> 0 : prediction[count[me] - 1]);
        required = 0;
        agreement_may_follow = 0;
        item = (is_additional -> item : item + 1);
        is_additional = 0;
        signature = 0;
        index = 0
    }
}

/* ---- departures.py ---- */

#if defined(WITHOUT_KEY_HAS_NUMBER)
#define KEY (signature / 2)
#elif defined(WITHOUT_KEY_HAS_SIGNATURE)
#define KEY (count[me] * 3)
#else
#define KEY (count[me] * 3 + signature / 2)
#endif

#ifdef WITHOUT_TWO_RANKS_REQUEST
#define MAX_REQUESTING_RANKS 1
#else
#define MAX_REQUESTING_RANKS 2
#endif

#ifdef WITHOUT_DEPARTING_RANK_WAITS
#define ALL_ARE_COUNTED true
#else
#define ALL_ARE_COUNTED (counted[KEY] >= RANKS)
#endif

/* depart: adds this rank to the counter. A signal may arrive while store.add() runs. */
inline count_rank() {
    counted[KEY]++;
    is_first = counted[KEY] <= MAX_REQUESTING_RANKS;
    own_number[me] = count[me];
    own_signature[me] = signature;
    if
    :: phase = POLL
    :: CAUSE_SIGNAL;
        err = INTERRUPT;
#ifndef WITHOUT_COUNT_IS_TAKEN_BACK
        phase = UNCOUNT
#endif
    fi
}

/* Ends the departure. */
inline leave_departure() {
    own_number[me] = NONE;
    own_signature[me] = 0;
    request = NONE;
    is_first = 0;
    phase = RUN
}

/* One step of _wait. */
inline poll() {
    if
    :: ALL_ARE_COUNTED ->
#ifndef WITHOUT_LEAVING_IS_ATOMIC
        decided[KEY] = 1;
#endif
        if
        :: close_request(); phase = READ
        :: CAUSE_SIGNAL; err = INTERRUPT; phase = CLOSE
        fi
    :: !ALL_ARE_COUNTED && request == NONE && is_first && requests < REQUESTS ->
        request = requests;
        requester[request] = me;
        request_number[request] = count[me];
        request_signature[request] = signature;
        requests++;
        if /* a signal while store.set() runs */
        :: skip
        :: CAUSE_SIGNAL;
            err = INTERRUPT;
            phase = CLOSE;
#ifdef WITHOUT_REQUEST_IS_KEPT_FIRST
            request = NONE
#endif
        fi
    :: !ALL_ARE_COUNTED && stopped[me] ->
        err = STOPPED;
        phase = CLOSE
    :: MAY_ANSWER -> answer()
    :: faults > 0 -> faults--; gone[me] = 1; err = DEATH; phase = END
    :: CAUSE_SIGNAL; err = INTERRUPT; phase = CLOSE
    :: timeout && MAY_TIME_OUT -> err = TIME_LIMIT; phase = CLOSE
    fi
}

inline close_request() {
    if
    :: request != NONE ->
#if defined(WITHOUT_INTERRUPTED_REQUEST_IS_CLOSED)
        skip
#elif defined(WITHOUT_CLOSING_IS_ATOMIC)
        closed[request] = !stopped[me]
#elif defined(WITHOUT_DIFFERENCE_REMAINS)
        difference[request] = 0;
        closed[request] = 1
#else
        if
        :: difference[request] -> stopped[me] = 1
        :: else -> closed[request] = 1; requester[request] = 0; request_number[request] = 0;
            request_signature[request] = 0
        fi
#endif
    :: else
    fi;
    request = NONE
}

/* Removes an interrupted rank from the counter, unless the collective is decided. */
inline uncount_rank() {
#if defined(WITHOUT_INTERRUPTED_RANK_IS_UNCOUNTED)
    leave_departure()
#elif defined(WITHOUT_LEAVING_IS_ATOMIC)
    if
    :: counted[KEY] < RANKS -> phase = DECREMENT
    :: else -> leave_departure()
    fi
#else
    if
    :: !decided[KEY] -> counted[KEY]--
    :: else ->
#ifndef WITHOUT_DEPARTED_COLLECTIVE_IS_KEPT
        required = signature
#endif
    fi;
    leave_departure()
#endif
}

inline decrement() {
    counted[KEY]--;
    leave_departure()
}

/* The end of depart. A signal may arrive before or after has_read is incremented. */
inline read_count() {
    has_departed = 1;
    if
    :: CAUSE_SIGNAL; err = INTERRUPT
    :: has_read[KEY]++;
        if
        :: has_read[KEY] == RANKS -> counted[KEY] = 0; has_read[KEY] = 0; decided[KEY] = 0
        :: else
        fi;
        if
        :: skip
        :: CAUSE_SIGNAL; err = INTERRUPT
        fi
    fi;
#ifdef WITHOUT_DEPARTED_COLLECTIVE_IS_KEPT
    required = (err == INTERRUPT -> 0 : signature);
#else
    required = signature;
#endif
    leave_departure()
}

/* ---- the program of a rank ---- */

/* Chooses the next collective, unless this rank repeats one. */
inline choose_collective() {
    if
    :: signature == 0 && program[item] == 0 ->
        if
        :: program[item] = GATHER
        :: program[item] = AGREEMENT
        fi
    :: else
    fi;
    if
    :: signature != 0
    :: signature == 0 -> signature = program[item]
    :: signature == 0 && faults > 0 -> /* another collective */
        faults--; diverged = 1;
        signature = LARGE_GATHER
    :: signature == 0 && faults > 0 -> /* leaves it out */
        faults--; diverged = 1; shifted = 1;
        item++
    :: signature == 0 && faults > 0 -> /* an additional one */
        faults--; diverged = 1; shifted = 1;
        is_additional = 1;
        if
        :: signature = LARGE_GATHER
        :: signature = program[item]
        fi
    fi
}

/* A rank that was interrupted before it issued a collective. */
inline continue_after_interrupt() {
    err = 0;
    if
    :: skip /* repeats the collective */
    :: is_additional || signature != program[item] -> /* corrects its program */
        signature = program[item];
        is_additional = 0
    :: left_out = 1; /* leaves it out */
        item = (is_additional -> item : item + 1);
        is_additional = 0;
        signature = 0
    :: item > 0 -> /* restarts the step */
        left_out = 1;
        item = 0;
        is_additional = 0;
        signature = 0
    fi
}

inline skip_item() {
    item = (item < ITEMS -> item + 1 : item);
    signature = 0;
    is_additional = 0;
    err = 0
}

inline handle_error() {
    if
    :: phase != RUN || err == 0
    :: phase == RUN && err == INTERRUPT -> continue_after_interrupt()
    :: phase == RUN && err == MISMATCH ->
        assert(diverged || left_out);
        raised[me]++;
        skip_item()
    :: phase == RUN && err == CHANGED ->
        assert(left_out || diverged);
        skip_item()
    :: phase == RUN && err == STOPPED ->
        assert(diverged || left_out);
        was_stopped[me] = 1;
        work = NONE;
        skip_item()
    :: phase == RUN && (err == CLOSED || err == TIME_LIMIT || err == DEATH) -> phase = END
    fi
}

inline take_step() {
    if
    :: work != NONE ->
        wait_for(work);
        if
        :: err == 0 -> work = NONE
        :: err == INTERRUPT ->
            err = 0;
            if
            :: skip /* waits again, or not */
            :: item > 0 -> left_out = 1; item = 0; work = NONE /* restarts the step */
            fi
        :: else
        fi
#ifdef ORDINARY
    :: work == NONE && item < ITEMS ->
#else
    :: item < ITEMS ->
#endif
        choose_collective();
        if
        :: signature != 0 ->
            compare();
            if
            :: err == 0 && phase == RUN -> issue_collective()
            :: else
            fi
        :: else
        fi
    fi
}

#define IS_COMPLETED (phase == RUN && item >= ITEMS && work == NONE)

proctype rank(byte me) {
    byte item, phase, signature, work, request, err, index;
    byte round, offered, required; /* of op_sequence */
    bit agreement_may_follow, is_additional, is_first;
#ifdef WITHOUT_CLOSING_IS_ATOMIC
    byte claimed = NONE; /* this rank is about to publish a difference */
#endif
    work = NONE;
    round = NONE;
    request = NONE;
    do
    :: atomic { faults > 0 && !IS_COMPLETED && phase != END ->
        faults--; gone[me] = 1; err = DEATH; phase = END }
    :: IS_COMPLETED || phase == END -> break
    :: atomic { phase == RUN && !IS_COMPLETED -> take_step(); handle_error() }
    :: atomic { phase == POLL -> poll() }
    :: atomic { phase == CLOSE -> close_request(); phase = UNCOUNT }
    :: atomic { phase == UNCOUNT -> uncount_rank(); handle_error() }
#ifdef WITHOUT_LEAVING_IS_ATOMIC
    :: atomic { phase == DECREMENT -> decrement(); handle_error() }
#endif
    :: atomic { phase == READ -> read_count(); handle_error() }
    od;
    atomic {
        has_died = has_died || err == DEATH;
        outcome[me] = err;
        finished[me] = 1;
        own_number[me] = NONE;
        /* Equal states of finished ranks are merged. */
        own_signature[me] = 0; item = 0; phase = 0; signature = 0;
        work = 0; round = 0; offered = 0; required = 0; agreement_may_follow = 0; request = 0;
        err = 0; is_additional = 0; is_first = 0
    }
}

/* ---- properties ---- */

#define HAS_RAISED(r) (was_stopped[r] || raised[r] > 0)

inline check_outcomes() {
    d_step {
        for (r : 0 .. RANKS - 1) {
            assert(outcome[r] == 0 || has_died || MAY_TIME_OUT);
            /* All ranks raise a difference, or none, unless a rank has died, has left a collective
             * out, or has added or restarted collectives. */
            assert(HAS_RAISED(r) || !ANY(HAS_RAISED) || left_out || has_died || shifted);
            assert(was_stopped[r] || !was_stopped[0] || left_out || has_died || shifted);
            assert(was_stopped[0] || !was_stopped[r] || left_out || has_died || shifted)
        }
    }
}

#if defined(REACH_STOPPED)
#define REACHED (was_stopped[0] && was_stopped[RANKS - 1])
#elif defined(REACH_DEPARTED)
#define REACHED (has_departed && ALL(HAS_COMPLETED))
#elif defined(REACH_TIMED_OUT)
#define REACHED (outcome[0] == TIME_LIMIT)
#else
#define REACHED false
#endif

init {
    byte r;
    faults = FAULTS;
    atomic {
        for (r : 0 .. RANKS - 1) { own_number[r] = NONE }
        for (r : 0 .. RANKS - 1) { run rank(r) }
        r = 0
    }
    faults = 0; /* at any time, so that a search also covers fewer faults */
    ALL(HAS_FINISHED);
    check_outcomes();
    assert(!REACHED)
}
